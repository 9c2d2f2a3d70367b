#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace apollo {

/// A point in the execution of one thread that others wait for, once per epoch.
///
/// Epochs make events reusable without a reset: the n-th run records and awaits epoch n. Writes before `record` are
/// visible to a thread after its wait.
class Event {
 public:
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  /// Marks `epoch` as reached and wakes sleeping threads.
  void record(std::uint32_t epoch);

  bool is_recorded(std::uint32_t epoch) const { return epoch_.load(std::memory_order_acquire) == epoch; }

  /// Spins until `epoch` is recorded or `patience` is over, and returns whether it is recorded.
  bool spin(std::uint32_t epoch, std::chrono::microseconds patience) const;

  /// Waits for `epoch`: spins for at most `patience`, then sleeps.
  void wait(std::uint32_t epoch, std::chrono::microseconds patience);

  /// Waits for `epoch` without spinning, so that an idle thread uses no core.
  void sleep(std::uint32_t epoch);

  /// Sleeps until `epoch` is recorded or `timeout` is over, and returns whether it is recorded.
  bool sleep_for(std::uint32_t epoch, std::chrono::nanoseconds timeout);

 private:
  bool sleep_once(std::uint32_t epoch, const std::chrono::nanoseconds* timeout);

  // A cache line of its own: neighbours in an array are written by other lanes.
  alignas(64) std::atomic<std::uint32_t> epoch_{0};
  std::atomic<std::uint32_t> num_sleepers_{0};
};

}  // namespace apollo
