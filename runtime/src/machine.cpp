#include "apollo/machine.h"

#include <sched.h>
#include <unistd.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <cerrno>
#include <system_error>

namespace apollo {

std::vector<int> available_cores() {
  // Of the process, which is its first thread: the calling thread may be a lane.
  cpu_set_t set;
  if (sched_getaffinity(getpid(), sizeof(set), &set) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot read on which cores the process may run");
  }
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(static_cast<std::size_t>(core), &set)) {
      cores.push_back(core);
    }
  }
  return cores;
}

bool keep_memory() {
#if defined(__GLIBC__)
  constexpr int kLargestThreshold = 32 * 1024 * 1024;  // glibc refuses more
  constexpr int kGrowth = 64 * 1024 * 1024;
  constexpr int kNever = -1;  // becomes the largest size
  const bool is_threshold_set = mallopt(M_MMAP_THRESHOLD, kLargestThreshold) != 0;
  const bool is_mapping_off = mallopt(M_MMAP_MAX, 0) != 0;
  const bool is_trimming_off = mallopt(M_TRIM_THRESHOLD, kNever) != 0;
  const bool is_growth_set = mallopt(M_TOP_PAD, kGrowth) != 0;
  return is_threshold_set && is_mapping_off && is_trimming_off && is_growth_set;
#else
  return false;
#endif
}

bool trim_memory() {
#if defined(__GLIBC__)
  return malloc_trim(0) != 0;
#else
  return false;
#endif
}

}  // namespace apollo
