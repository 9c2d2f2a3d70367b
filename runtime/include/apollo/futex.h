#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

namespace apollo {

// Note [Why futexes]
// Threads of the runtime sleep on plain 32-bit words. A condition variable has two disadvantages: its destructor waits
// for its waiters, so a forked child, which has none of the threads, would hang in it; and every wake-up of another
// lane would need a mutex. std::atomic::wait has no timeout, which the caller needs to notice Ctrl-C.

/// Sleeps while `word` equals `seen`, until woken, or for `timeout`; may wake spuriously.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::optional<std::chrono::nanoseconds> timeout);

/// Wakes every thread that sleeps on `word`.
void futex_wake_all(std::atomic<std::uint32_t>& word);

}  // namespace apollo
