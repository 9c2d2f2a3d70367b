#pragma once

#include <functional>
#include <thread>
#include <vector>

namespace apollo {

/// Returns the cores on which the process may run, ascending: those of its first thread, as the caller may be a lane.
std::vector<int> available_cores();

/// While it lives, available_cores() returns the cores from before, although the calling thread is pinned elsewhere.
///
/// It only has an effect on the first thread; of nested ones, the outermost has it.
class KeptCores {
 public:
  KeptCores();
  KeptCores(const KeptCores&) = delete;
  KeptCores& operator=(const KeptCores&) = delete;
  ~KeptCores();

 private:
  bool has_kept_ = false;
};

/// Tells the C library to keep freed memory in the process, for all threads; returns whether that succeeded.
///
/// Activations of a training step are freed and allocated again at every step. By default glibc maps large blocks and
/// unmaps them when they are freed, which costs 3,000 to 5,700 page faults per step, up to a third of its time. The
/// price is that the process never shrinks.
///
/// By default every thread also allocates from a heap of its own, and memory freed there is not available to other
/// threads: no lane could reuse memory that another one has freed, which made processes up to a sixth larger. So glibc
/// is told to make no more heaps, and start_thread() finds a thread that uses the first one. Does nothing if the C
/// library is not glibc, or another library replaces its allocator.
bool keep_memory();

/// Returns free memory of all threads to the system; returns whether there was any.
///
/// Without it, memory that a compile has freed stays in the process, as does memory freed in arenas of other threads.
/// Does nothing if the C library is not glibc.
bool trim_memory();

/// Returns a running thread. After keep_memory() it allocates from the same heap as the process's first thread.
///
/// When a thread first allocates, glibc assigns it one of the existing heaps round-robin, unless a thread that ended
/// has left one. So several threads may have to be tried; after a few tries, any thread is returned.
std::thread start_thread(std::function<void()> work);

}  // namespace apollo
