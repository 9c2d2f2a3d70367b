#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "apollo/body.h"
#include "apollo/event.h"
#include "apollo/failure.h"
#include "apollo/join.h"
#include "apollo/lane_set.h"
#include "apollo/program.h"
#include "apollo/ranges.h"
#include "apollo/tensor.h"
#include "apollo/waits.h"

namespace apollo {

/// Measured start and end of one segment, in nanoseconds since the run began.
struct Span {
  int segment;
  int lane;
  std::int64_t start_ns;
  std::int64_t end_ns;
  int core;  ///< of the lane's thread when the segment ended
};

/// Executes one program on a set of lanes, any number of times.
///
/// Any thread may call `run`; runs on the same lanes take turns.
class Executor {
 public:
  /// Throws InvalidProgramError as `check_program` does.
  Executor(std::shared_ptr<LaneSet> lanes, TensorApi api, Program program, std::vector<std::shared_ptr<Body>> bodies);
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Runs the program once and returns its outputs, empty where the program has none.
  ///
  /// The first exception of a body stops the run: lanes finish their current segment, start no other, and `run` throws
  /// that exception. An exception of `poll` has the same effect. Handles that the run still owns are then dropped.
  ///
  /// With `ranges`, whose names are as many as the program's segments, lanes take part in the caller's profile for as
  /// long as the run lasts, and it gets a range per segment on the thread that runs it.
  std::vector<Tensor> run(std::vector<Tensor> inputs, const Poll& poll = {}, const Ranges* ranges = nullptr);

  int num_inputs() const { return static_cast<int>(program_.inputs.size()); }
  TensorApi tensor_api() const { return api_; }

  /// Returns the spans of the last finished run, by start. A failed run has spans of the segments that ended.
  std::vector<Span> spans() const;
  std::int64_t duration_ns() const;

  /// Returns the segment whose body failed in the last run; none if it succeeded or was cancelled.
  std::optional<int> last_failure() const { return failure_.segment(); }

 private:
  void work_as_caller(const LaneSet::Turn& turn, const Poll& poll);
  void execute(int lane, std::size_t begin, std::size_t end);
  void launch(const Launch& launch, int lane);
  void gather_inputs(const Launch& launch, std::span<void*> inputs);
  std::vector<Tensor> take_outputs();
  std::int64_t now_ns() const;

  const std::shared_ptr<LaneSet> lanes_;
  const TensorApi api_;
  const Program program_;
  const std::vector<std::shared_ptr<Body>> bodies_;
  std::vector<bool> is_last_;                                // per output: whether no later one returns the same buffer
  std::vector<std::shared_ptr<const CpuLane::Task>> tasks_;  // one per lane
  std::vector<std::vector<void*>> scratch_;                  // one per lane, used by that lane alone
  const Waits waits_;
  const std::unique_ptr<Event[]> events_;
  const std::shared_ptr<Join[]> joins_;  // one per pause of the caller's lane, and one for the end of all lanes

  std::mutex run_mutex_;  // held for a run; guards the following members, which the lanes of the run use too
  std::uint32_t epoch_ = 0;
  std::chrono::steady_clock::time_point start_;
  std::vector<Tensor> slots_;  // one per buffer; lanes touch a slot in the order of the program's events
  std::vector<Span> spans_;    // one per segment, written by its lane
  Profile profile_;            // of the caller
  Failure failure_;

  mutable std::mutex last_mutex_;  // held briefly: the caller may be inside a run, a body or a signal handler
  std::vector<Span> last_spans_;   // of the last run that has ended
  std::int64_t last_duration_ns_ = 0;
};

}  // namespace apollo
