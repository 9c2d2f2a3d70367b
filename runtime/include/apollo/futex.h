#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

namespace apollo {

// Note [Why futexes]
// Threads of the runtime sleep on plain 32-bit words. A condition variable would do, but for two things: its destructor
// waits for its waiters, so a forked child, which has none of the threads, would hang in it; and it needs a mutex
// around every wake-up on the way from lane to lane. std::atomic::wait knows no timeout, which the caller needs to see
// Ctrl-C.

/// Sleeps while `word` is `seen`, until it is woken, or `timeout` is over; may return for no reason.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::optional<std::chrono::nanoseconds> timeout);

/// Wakes every thread that sleeps on `word`.
void futex_wake_all(std::atomic<std::uint32_t>& word);

}  // namespace apollo
