#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include "apollo/program.h"

namespace apollo {

/// A stretch of the caller's lane without a launch, up to the next record behind a wait.
///
/// What comes before `first_wait` is done at once, the waits are one join, and what lies between them is let go after
/// it.
struct Pause {
  std::size_t begin;
  std::size_t first_wait;
  std::size_t end;
  int num_arrivals;
  std::vector<int> idle;  ///< cores of lanes on which no lane works during the pause
};

/// What the record of an event means to the caller's lane.
struct Arrival {
  int pause = -1;         ///< in which the caller's lane waits for the event; -1: in none
  std::vector<int> left;  ///< cores that nobody works on between the record and the end of the pause
};

/// What the end of a lane means to the caller.
struct End {
  bool is_awaited;        ///< whether the lane may still be at work when the caller's pauses are over
  std::vector<int> left;  ///< cores that nobody works on between that and the end of the run
};

/// How the lanes of a program wait: found out once, before it is executed.
struct Waits {
  std::vector<std::vector<std::chrono::microseconds>> patience;  ///< per lane and instruction: how long a wait may spin
  std::vector<Pause> pauses;                                     ///< of the caller's lane, in order
  std::vector<Arrival> arrivals;                                 ///< per event
  std::vector<End> ends;                                         ///< per lane
  std::vector<int> idle_at_end;                                  ///< cores on which no lane works when they are over
};

/// Looks through a program that `check_program` passed; `cores` are those of each lane, none for the caller's lane.
Waits plan_waits(const Program& program, const std::vector<std::vector<int>>& cores);

}  // namespace apollo
