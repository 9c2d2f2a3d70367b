#pragma once

#include <functional>

namespace apollo {

// Note [Parking the caller's team]
// The workers of an OpenMP team spin for milliseconds after a parallel region in case another one follows. After the
// caller has run a segment they would spin on the cores of the lanes for which the caller now waits. OpenMP has no call
// that puts a team to sleep, but inside a region its workers run our code: so the caller waits inside a region whose
// workers block. A second team of our own does not help: libgomp shortens the spinning of all teams as soon as there
// are more threads than cores, which made everything 1.7 times slower.

/// The OpenMP team of the thread that calls `park`, in the OpenMP library that the process has loaded, if any.
///
/// The library is found at run time, because linking one could load a second one in addition to torch's.
class OpenMpTeam {
 public:
  /// Looks for the library; without `enabled`, or if none is loaded, `park` only waits.
  explicit OpenMpTeam(bool enabled);

  bool is_found() const { return parallel_ != nullptr; }

  /// Calls `wait` on this thread and `sleep` on the other threads of its team concurrently; throws what `wait` throws.
  ///
  /// `wait` must wake the other threads, even if it throws. Without a team, only `wait` is called.
  void park(const std::function<void()>& wait, const std::function<void()>& sleep) const;

 private:
  using Parallel = void (*)(void (*region)(void*), void* arguments, unsigned num_threads, unsigned flags);

  Parallel parallel_ = nullptr;
  int (*max_threads_)() = nullptr;
  int (*in_parallel_)() = nullptr;
};

}  // namespace apollo
