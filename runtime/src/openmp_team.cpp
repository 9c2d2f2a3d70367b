#include "apollo/openmp_team.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <exception>
#include <string>
#include <string_view>
#include <thread>

// ThreadSanitizer does not see the barriers at both ends of a region, which are inside the OpenMP library: it has to be
// told what they order.
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define APOLLO_BEFORE_BARRIER(address) __tsan_release(address)
#define APOLLO_BEHIND_BARRIER(address) __tsan_acquire(address)
#else
#define APOLLO_BEFORE_BARRIER(address) static_cast<void>(address)
#define APOLLO_BEHIND_BARRIER(address) static_cast<void>(address)
#endif

namespace apollo {

namespace {

// LLVM's and Intel's libraries have GNU's entry points too.
constexpr std::array kNames = {"libgomp.so.1", "libomp.so", "libomp.so.5", "libiomp5.so"};

/// Returns the path of a loaded library whose name is one of `kNames` with a hash inserted, as in wheels.
std::string find_renamed_library() {
  std::string found;
  dl_iterate_phdr(
      [](dl_phdr_info* library, std::size_t, void* result) {
        const std::string_view path = library->dlpi_name;
        const std::string_view name = path.substr(path.rfind('/') + 1);
        const bool is_openmp = name.starts_with("libgomp") || name.starts_with("libomp") || name.starts_with("libiomp");
        if (is_openmp) {
          *static_cast<std::string*>(result) = path;
        }
        return is_openmp ? 1 : 0;
      },
      &found);
  return found;
}

void* find_library() {
  for (const char* name : kNames) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) {
      return library;
    }
  }
  const std::string path = find_renamed_library();
  return path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
}

// A forked child inherits the record of a team but not its threads: the next region would wait for them forever.
std::atomic<bool> is_forked_child{false};

void watch_forks() {
  static const int code = pthread_atfork(nullptr, nullptr, [] { is_forked_child = true; });
  static_cast<void>(code);
}

template <typename Function>
Function find_function(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

/// What the threads of the region share; lives on the caller's stack, since the region ends with a barrier.
struct Parking {
  const std::function<void()>& wait;
  const std::function<void()>& sleep;
  std::thread::id caller;
  std::exception_ptr failure = nullptr;

  static void enter(void* arguments) {
    APOLLO_BEHIND_BARRIER(arguments);
    static_cast<Parking*>(arguments)->stay();
    APOLLO_BEFORE_BARRIER(arguments);
  }

  void stay() {
    if (std::this_thread::get_id() != caller) {
      sleep();
      return;
    }
    try {
      wait();
    } catch (...) {
      failure = std::current_exception();  // the library's frames cannot be unwound
    }
  }
};

}  // namespace

OpenMpTeam::OpenMpTeam(bool enabled) {
  void* library = enabled ? find_library() : nullptr;
  if (library == nullptr) {
    return;
  }
  const auto parallel = find_function<Parallel>(library, "GOMP_parallel");
  max_threads_ = find_function<int (*)()>(library, "omp_get_max_threads");
  in_parallel_ = find_function<int (*)()>(library, "omp_in_parallel");
  if (max_threads_ != nullptr && in_parallel_ != nullptr) {
    parallel_ = parallel;
    watch_forks();
  }
}

void OpenMpTeam::park(const std::function<void()>& wait, const std::function<void()>& sleep) const {
  const bool can_park = is_found() && !is_forked_child && in_parallel_() == 0;
  const int num_threads = can_park ? max_threads_() : 1;
  if (num_threads <= 1) {
    wait();
    return;
  }
  Parking parking{wait, sleep, std::this_thread::get_id()};
  APOLLO_BEFORE_BARRIER(&parking);
  parallel_(&Parking::enter, &parking, static_cast<unsigned>(num_threads), 0);
  APOLLO_BEHIND_BARRIER(&parking);
  if (parking.failure) {
    std::rethrow_exception(parking.failure);
  }
}

}  // namespace apollo
