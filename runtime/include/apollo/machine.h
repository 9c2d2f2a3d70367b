#pragma once

#include <functional>
#include <thread>
#include <vector>

namespace apollo {

/// Returns the cores on which the process may run, ascending: those of its first thread, for the caller may be a lane.
std::vector<int> available_cores();

/// While it lives, available_cores() returns what it did before, although the calling thread is moved elsewhere.
///
/// Only of the first thread there is anything to keep, and where one lives inside another, the outer one keeps it.
class KeptCores {
 public:
  KeptCores();
  KeptCores(const KeptCores&) = delete;
  KeptCores& operator=(const KeptCores&) = delete;
  ~KeptCores();

 private:
  bool has_kept_ = false;
};

/// Tells the C library to keep freed memory in the process, for all threads; returns whether it will.
///
/// Activations of a training step are freed and allocated again at every step. By default glibc maps large blocks and
/// gives them back when they are freed, which costs 3,000 to 5,700 page faults per step, up to a third of its time. The
/// price is that the process stays as large as it ever was.
///
/// By default every thread also allocates from a heap of its own, and what was freed there is lost to the others: no
/// lane could use what another one has left, which made processes up to a sixth larger. So glibc makes no more heaps,
/// and start_thread() finds a thread that has the first one. Does nothing where the C library is not glibc, or another
/// library allocates in its place.
bool keep_memory();

/// Gives free memory back to the system, that of all threads; returns whether there was any.
///
/// What a compile left behind would stay for good otherwise, and so would what threads that have an arena of their own
/// freed there. Does nothing where the C library is not glibc.
bool trim_memory();

/// Returns a running thread. After keep_memory() it allocates from the same heap as the process's first thread.
///
/// glibc decides by itself which of the heaps that exist a thread gets when it first allocates: in turn, unless a
/// thread has ended and left one. So several threads may have to be tried; after a few it is any thread.
std::thread start_thread(std::function<void()> work);

}  // namespace apollo
