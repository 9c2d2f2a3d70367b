#include "apollo/machine.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#if defined(__GLIBC__)
#include <gnu/libc-version.h>
#include <malloc.h>
#endif

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

namespace apollo {

namespace {

std::mutex kept_mutex;
std::optional<cpu_set_t> kept;  // guarded by kept_mutex; those of the first thread, while it is elsewhere

cpu_set_t cores_of_first_thread() {
  const std::lock_guard lock(kept_mutex);
  if (kept) {
    return *kept;
  }
  cpu_set_t set;
  if (sched_getaffinity(getpid(), sizeof(set), &set) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot read on which cores the process may run");
  }
  return set;
}

}  // namespace

KeptCores::KeptCores() {
  if (gettid() != getpid()) {
    return;
  }
  // A forked child has only the thread that forked: if that was another thread, nothing would ever reset these.
  static const int code = pthread_atfork(nullptr, nullptr, [] {
    new (&kept_mutex) std::mutex;
    kept.reset();
  });
  static_cast<void>(code);
  cpu_set_t set;
  const std::lock_guard lock(kept_mutex);
  if (!kept && sched_getaffinity(0, sizeof(set), &set) == 0) {
    kept = set;
    has_kept_ = true;
  }
}

KeptCores::~KeptCores() {
  if (has_kept_) {
    const std::lock_guard lock(kept_mutex);
    kept.reset();
  }
}

std::vector<int> available_cores() {
  const cpu_set_t set = cores_of_first_thread();
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(static_cast<std::size_t>(core), &set)) {
      cores.push_back(core);
    }
  }
  return cores;
}

namespace {

constexpr int kMaxAttempts = 16;

std::atomic<bool> is_heap_shared{false};

/// Returns whether the calling thread allocates from the first thread's heap, the only one below the program break.
bool is_on_first_heap() {
#if defined(__GLIBC__)
  const std::unique_ptr<void, decltype(&std::free)> block(std::malloc(1), &std::free);
  return std::less<>()(block.get(), sbrk(0));
#else
  return true;
#endif
}

#if defined(__GLIBC__)
/// Returns the base address of the library that has the function.
template <typename Function>
const void* library_of(Function* function) {
  Dl_info info{};
  return dladdr(reinterpret_cast<const void*>(function), &info) != 0 ? info.dli_fbase : nullptr;
}

/// Returns whether malloc is glibc's: a library loaded before it, such as jemalloc or a sanitizer, may replace it.
bool does_glibc_allocate() { return library_of(&std::malloc) == library_of(&gnu_get_libc_version); }
#endif

/// A thread that checks which heap it allocates from, and waits to be told whether to run `work`.
class Applicant {
 public:
  explicit Applicant(std::function<void()> work) {
    std::promise<bool> is_well_placed;
    is_well_placed_ = is_well_placed.get_future();
    thread_ = std::thread([work = std::move(work), is_well_placed = std::move(is_well_placed),
                           is_wanted = is_wanted_.get_future()]() mutable {
      is_well_placed.set_value(is_on_first_heap());
      if (is_wanted.get()) {
        work();
      }
    });
  }
  Applicant(const Applicant&) = delete;
  Applicant& operator=(const Applicant&) = delete;
  ~Applicant() {
    if (thread_.joinable()) {
      is_wanted_.set_value(false);
      thread_.join();
    }
  }

  bool is_well_placed() { return is_well_placed_.get(); }

  std::thread take() {
    is_wanted_.set_value(true);
    return std::move(thread_);
  }

 private:
  std::future<bool> is_well_placed_;
  std::promise<bool> is_wanted_;
  std::thread thread_;
};

}  // namespace

std::thread start_thread(std::function<void()> work) {
  if (!is_heap_shared.load()) {
    return std::thread(std::move(work));
  }
  // Rejected threads stay alive until one is taken: glibc would give the heap of one that ended to the next one.
  std::vector<std::unique_ptr<Applicant>> applicants;
  do {
    applicants.push_back(std::make_unique<Applicant>(work));
  } while (!applicants.back()->is_well_placed() && applicants.size() < kMaxAttempts);
  return applicants.back()->take();
}

bool keep_memory() {
#if defined(__GLIBC__)
  if (!does_glibc_allocate()) {
    return false;
  }
  constexpr int kLargestThreshold = 32 * 1024 * 1024;  // glibc refuses more
  constexpr int kGrowth = 64 * 1024 * 1024;
  constexpr int kNever = -1;  // becomes the largest size
  const bool is_threshold_set = mallopt(M_MMAP_THRESHOLD, kLargestThreshold) != 0;
  const bool is_mapping_off = mallopt(M_MMAP_MAX, 0) != 0;
  const bool is_trimming_off = mallopt(M_TRIM_THRESHOLD, kNever) != 0;
  const bool is_growth_set = mallopt(M_TOP_PAD, kGrowth) != 0;
  is_heap_shared = mallopt(M_ARENA_MAX, 1) != 0;
  return is_threshold_set && is_mapping_off && is_trimming_off && is_growth_set && is_heap_shared;
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
