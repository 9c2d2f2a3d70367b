#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <optional>

namespace apollo {

/// The first exception of a run; later ones are dropped.
class Failure {
 public:
  /// Whether the run must stop. If a thread reads true and then records an event, threads that wait for it read true.
  bool is_set() const { return is_set_.load(std::memory_order_acquire); }

  void set(std::exception_ptr exception, std::optional<int> segment);
  void clear();

  /// Rethrows the exception, if there is one, and keeps only the segment.
  void rethrow();

  std::optional<int> segment() const;

 private:
  std::atomic<bool> is_set_{false};
  mutable std::mutex mutex_;
  std::exception_ptr exception_;  // guarded by mutex_
  std::optional<int> segment_;    // guarded by mutex_
};

}  // namespace apollo
