#include "apollo/lane_set.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "apollo/error.h"
#include "apollo/machine.h"

namespace apollo {

namespace {

constexpr std::chrono::milliseconds kPollInterval{50};

/// The lanes in whose run this thread is, as caller or as lane.
thread_local const LaneSet* current_lanes = nullptr;

void check_cores(const std::vector<std::vector<int>>& lanes) {
  const std::vector<int> available = available_cores();
  if (std::count(lanes.begin(), lanes.end(), std::vector<int>()) > 1) {
    throw std::invalid_argument(
        "cannot make lanes: more than one has no cores; only one lane can use the calling thread");
  }
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
    for (const int core : lanes[lane]) {
      if (!std::binary_search(available.begin(), available.end(), core)) {
        throw std::invalid_argument("cannot make lane " + std::to_string(lane) + ": core " + std::to_string(core) +
                                    " is not one of the " + std::to_string(available.size()) +
                                    " on which the process may run; see available_cores()");
      }
    }
  }
}

}  // namespace

LaneSet::LaneSet(std::vector<std::vector<int>> cores, const std::function<void(int lane)>& on_start, bool park_team)
    : cores_(std::move(cores)), owner_(getpid()), team_(park_team) {
  check_cores(cores_);
  lanes_.resize(cores_.size());
  for (int id = 0; id < num_lanes(); ++id) {
    const auto index = static_cast<std::size_t>(id);
    if (!cores_[index].empty()) {
      lanes_[index] = std::make_unique<CpuLane>(id, cores_[index], [&] {
        current_lanes = this;  // for as long as the thread lives: it does nothing but runs of these lanes
        if (on_start) {
          on_start(id);
        }
      });
    }
  }
}

LaneSet::~LaneSet() {
  if (is_forked()) {
    // The child has no such threads; to join or detach one, or to destroy the std::thread, would hang or abort.
    for (std::unique_ptr<CpuLane>& lane : lanes_) {
      static_cast<void>(lane.release());
    }
  }
}

void LaneSet::close() {
  if (is_forked()) {
    return;  // nothing to stop: the threads are the parent's
  }
  if (current_lanes == this) {
    throw Error("cannot close lanes from inside a run of them: the run would wait for itself");
  }
  const std::lock_guard lock(turn_mutex_);
  is_closed_ = true;
  for (std::unique_ptr<CpuLane>& lane : lanes_) {
    lane.reset();
  }
}

int LaneSet::num_threads() const {
  return static_cast<int>(
      std::count_if(cores_.begin(), cores_.end(), [](const std::vector<int>& cores) { return !cores.empty(); }));
}

bool LaneSet::is_forked() const { return getpid() != owner_; }

void LaneSet::check_owner() const {
  if (is_forked() && num_threads() > 0) {
    throw ClosedError("cannot use lanes in process " + std::to_string(getpid()) + ": their threads belong to process " +
                      std::to_string(owner_) +
                      ", which forked it; start worker processes with the 'spawn' method, or compile in the child");
  }
}

LaneSet::Turn::Turn(LaneSet& lanes, const Poll& poll) : lanes_(lanes), outer_(current_lanes) {
  lanes.check_owner();
  if (outer_ == &lanes) {
    throw Error("cannot start a run from inside a run on the same lanes: it would wait for itself");
  }
  lock_ = std::unique_lock(lanes.turn_mutex_, std::try_to_lock);
  if (!lock_) {
    Event has_ended;
    const auto wait = [&] {
      try {
        // With the system clock: ThreadSanitizer does not support the call that waits by the steady clock.
        while (!lock_.try_lock_until(std::chrono::system_clock::now() + kPollInterval)) {
          if (poll) {
            poll();
          }
        }
      } catch (...) {
        has_ended.record(1);
        throw;
      }
      has_ended.record(1);
    };
    lanes.team_.park(wait, [&] { has_ended.sleep(1); });
  }
  if (lanes.is_closed_) {
    throw ClosedError("cannot run on lanes that were closed; compile again to get new ones");
  }
  current_lanes = &lanes;
}

LaneSet::Turn::~Turn() { current_lanes = outer_; }

void LaneSet::Turn::wait(Join& join, std::uint32_t epoch, const std::function<void()>& first, const Poll& poll) const {
  if (join.is_complete(epoch)) {
    first();
    return;
  }
  const auto wait = [&] {
    first();
    join.wait(epoch, poll, kPollInterval);
  };
  lanes_.team_.park(wait, [&] { join.wait(epoch, {}, kPollInterval); });
}

}  // namespace apollo
