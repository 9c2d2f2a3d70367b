#pragma once

#include <functional>

namespace apollo {

// Note [Parking the caller's team]
// The workers of an OpenMP team spin for milliseconds after a parallel region in case another one follows. After the
// caller ran a segment they would spin on the cores of the lanes for which the caller now waits. There is no call that
// puts a team to sleep, but a team that is inside a region does what the region says: the caller waits inside a region
// whose workers block. A team of our own is no way out: libgomp shortens the spinning of all teams as soon as there are
// more threads than cores, which made everything 1.7 times slower.

/// The OpenMP team of whichever thread calls `park`, in the OpenMP library that the process has loaded, if any.
///
/// The library is found at run time: to link one would bring a second one beside torch's.
class OpenMpTeam {
 public:
  /// Looks for the library; without `enabled`, or where none is loaded, `park` only waits.
  explicit OpenMpTeam(bool enabled);

  bool is_found() const { return parallel_ != nullptr; }

  /// Calls `wait` on this thread and `sleep` on the other threads of its team, all at once; throws what `wait` throws.
  ///
  /// `wait` ends, however it ends, what the others sleep for. Where there is no team it is called alone.
  void park(const std::function<void()>& wait, const std::function<void()>& sleep) const;

 private:
  using Parallel = void (*)(void (*region)(void*), void* arguments, unsigned num_threads, unsigned flags);

  Parallel parallel_ = nullptr;
  int (*max_threads_)() = nullptr;
  int (*in_parallel_)() = nullptr;
};

}  // namespace apollo
