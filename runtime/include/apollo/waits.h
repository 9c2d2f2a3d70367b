#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include "apollo/program.h"

namespace apollo {

/// A range of instructions of the caller's lane without a launch, which ends before the next record after a wait.
///
/// Instructions before `first_wait` are executed at once, the waits become one join, and releases between the waits are
/// executed after it.
struct Pause {
  std::size_t begin;
  std::size_t first_wait;
  std::size_t end;
  int num_arrivals;
  std::vector<int> idle;  ///< cores of lanes on which no lane runs during the pause
};

/// Effect of the record of an event on the caller's lane.
struct Arrival {
  int pause = -1;         ///< in which the caller's lane waits for the event; -1: in none
  std::vector<int> left;  ///< cores on which no lane runs between the record and the end of the pause
};

/// Effect of the end of a lane on the caller.
struct End {
  bool is_awaited;        ///< whether the lane may still run when the caller's pauses are over
  std::vector<int> left;  ///< cores on which no lane runs between the end of the lane and the end of the run
};

/// How the lanes of a program wait: computed once, before the first run.
struct Waits {
  std::vector<std::vector<std::chrono::microseconds>> patience;  ///< per lane and instruction: how long a wait may spin
  std::vector<Pause> pauses;                                     ///< of the caller's lane, in order
  std::vector<Arrival> arrivals;                                 ///< per event
  std::vector<End> ends;                                         ///< per lane
  std::vector<int> idle_at_end;                                  ///< cores on which no lane runs after the pauses
};

/// Analyses a program that `check_program` accepted; `cores` are those of each lane, none for the caller's lane.
Waits plan_waits(const Program& program, const std::vector<std::vector<int>>& cores);

}  // namespace apollo
