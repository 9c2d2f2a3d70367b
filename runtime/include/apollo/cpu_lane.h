#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "apollo/event.h"

namespace apollo {

/// Runs one task at a time on one thread that is pinned to `cores`; the thread sleeps between tasks.
///
/// One thread at a time may use it: LaneSet sees to that. The destructor stops and joins the thread.
class CpuLane {
 public:
  using Task = std::function<void()>;

  /// Starts the thread, pins it before it does anything else, and runs `on_start` on it.
  ///
  /// Returns when `on_start` has returned; throws what it threw, or Error if the thread cannot be pinned to the cores.
  CpuLane(int id, std::vector<int> cores, const Task& on_start);
  CpuLane(const CpuLane&) = delete;
  CpuLane& operator=(const CpuLane&) = delete;
  ~CpuLane();

  const std::vector<int>& cores() const { return cores_; }

  /// Hands `task` to the thread once the task before it has returned.
  void start(std::shared_ptr<const Task> task);

 private:
  void work(const Task& on_start);
  void pin() const;

  const int id_;
  const std::vector<int> cores_;
  std::shared_ptr<const Task> task_;  // published to the thread by started_; null tells it to stop
  std::exception_ptr start_failure_;  // published by the thread through finished_, epoch 1
  std::uint32_t epoch_ = 1;           // of the last task; the thread counts along
  Event started_;
  Event finished_;
  std::thread thread_;  // last: starts after every member is ready
};

}  // namespace apollo
