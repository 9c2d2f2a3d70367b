#include "apollo/event.h"

#include <optional>

#include "apollo/futex.h"

namespace apollo {

namespace {

using Clock = std::chrono::steady_clock;

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Event::record(std::uint32_t epoch) {
  // Sequentially consistent, as is the waiter's side: either this thread sees the sleeper or the sleeper the epoch.
  epoch_.store(epoch, std::memory_order_seq_cst);
  if (num_sleepers_.load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(epoch_);
  }
}

bool Event::spin(std::uint32_t epoch, std::chrono::microseconds patience) const {
  if (is_recorded(epoch)) {
    return true;
  }
  for (const Clock::time_point end = Clock::now() + patience; Clock::now() < end;) {
    for (int i = 0; i < 16; ++i) {
      if (is_recorded(epoch)) {
        return true;
      }
      pause_core();
    }
  }
  return false;
}

void Event::wait(std::uint32_t epoch, std::chrono::microseconds patience) {
  if (!spin(epoch, patience)) {
    sleep(epoch);
  }
}

void Event::sleep(std::uint32_t epoch) {
  while (!sleep_once(epoch, nullptr)) {
  }
}

bool Event::sleep_for(std::uint32_t epoch, std::chrono::nanoseconds timeout) {
  for (const Clock::time_point end = Clock::now() + timeout;;) {
    const std::chrono::nanoseconds left = end - Clock::now();
    if (left.count() <= 0) {
      return is_recorded(epoch);
    }
    if (sleep_once(epoch, &left)) {
      return true;
    }
  }
}

bool Event::sleep_once(std::uint32_t epoch, const std::chrono::nanoseconds* timeout) {
  num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t seen = epoch_.load(std::memory_order_seq_cst);
  if (seen != epoch) {
    futex_wait(epoch_, seen, timeout != nullptr ? std::optional(*timeout) : std::nullopt);
  }
  num_sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return is_recorded(epoch);
}

}  // namespace apollo
