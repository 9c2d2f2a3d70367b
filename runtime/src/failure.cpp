#include "apollo/failure.h"

#include <utility>

namespace apollo {

void Failure::set(std::exception_ptr exception, std::optional<int> segment) {
  {
    const std::lock_guard lock(mutex_);
    if (!exception_) {
      exception_ = std::move(exception);
      segment_ = segment;
    }
  }
  is_set_.store(true, std::memory_order_release);
}

void Failure::clear() {
  const std::lock_guard lock(mutex_);
  is_set_.store(false, std::memory_order_relaxed);
  exception_ = nullptr;
  segment_.reset();
}

void Failure::rethrow() {
  std::exception_ptr exception;
  {
    const std::lock_guard lock(mutex_);
    exception = std::exchange(exception_, nullptr);
  }
  if (exception) {
    std::rethrow_exception(std::move(exception));
  }
}

std::optional<int> Failure::segment() const {
  const std::lock_guard lock(mutex_);
  return segment_;
}

}  // namespace apollo
