#include "apollo/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace apollo {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t), "the kernel compares a plain word");

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::optional<std::chrono::nanoseconds> timeout) {
  timespec limit{};
  if (timeout) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(*timeout);
    limit.tv_sec = seconds.count();
    limit.tv_nsec = (*timeout - seconds).count();
  }
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, timeout ? &limit : nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace apollo
