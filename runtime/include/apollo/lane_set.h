#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "apollo/cpu_lane.h"
#include "apollo/join.h"
#include "apollo/openmp_team.h"

namespace apollo {

/// Called periodically on the thread that waits in `Executor::run`; throws to cancel the run.
using Poll = std::function<void()>;

/// The lanes of a process, shared by all executors; runs one program at a time.
///
/// A lane without cores is the caller lane: it has every unit of the device, so no other lane runs at the same time,
/// and it uses the thread that calls `Executor::run`, whose OpenMP team is warm. Every other lane is a CpuLane.
class LaneSet {
 public:
  /// Starts a thread per lane that has cores and runs `on_start(lane)` on it; rethrows its exceptions.
  LaneSet(std::vector<std::vector<int>> cores, const std::function<void(int lane)>& on_start, bool park_team);
  LaneSet(const LaneSet&) = delete;
  LaneSet& operator=(const LaneSet&) = delete;
  ~LaneSet();

  /// Stops and joins the threads after the run in flight, if any; later calls, and calls in a forked child, do nothing.
  ///
  /// Throws Error on a thread that is inside a run of these lanes.
  void close();

  int num_lanes() const { return static_cast<int>(cores_.size()); }
  const std::vector<std::vector<int>>& cores() const { return cores_; }
  int num_threads() const;
  bool is_team_found() const { return team_.is_found(); }

  /// Exclusive use of the lanes by one run.
  class Turn {
   public:
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn();

    /// Returns the lane's thread; null for the caller lane.
    CpuLane* lane(int id) const { return lanes_.lanes_[static_cast<std::size_t>(id)].get(); }

    /// Parks the caller's OpenMP team, calls `first` and waits until `join` is complete, calling `poll` about every
    /// 50 ms.
    ///
    /// Start the lanes in `first`, not before: a lane that wakes up on the caller's core would keep the caller from
    /// parking its team, whose workers then spin on the cores of the other lanes.
    void wait(Join& join, std::uint32_t epoch, const std::function<void()>& first, const Poll& poll) const;

   private:
    friend class LaneSet;
    explicit Turn(LaneSet& lanes, const Poll& poll);

    LaneSet& lanes_;
    std::unique_lock<std::timed_mutex> lock_;
    const LaneSet* outer_;
  };

  /// Waits until no other run uses the lanes; throws ClosedError, Error if called by a body of a run of these lanes,
  /// and what `poll` throws.
  Turn take_turn(const Poll& poll) { return Turn(*this, poll); }

 private:
  void check_owner() const;
  bool is_forked() const;

  const std::vector<std::vector<int>> cores_;
  const pid_t owner_;
  const OpenMpTeam team_;
  std::timed_mutex turn_mutex_;
  bool is_closed_ = false;                       // guarded by turn_mutex_
  std::vector<std::unique_ptr<CpuLane>> lanes_;  // changed and used only under turn_mutex_; last: has the threads
};

}  // namespace apollo
