#pragma once

#include <vector>

namespace apollo {

/// Returns the cores on which the process may run, ascending.
std::vector<int> available_cores();

/// Tells the C library to keep freed memory in the process; returns whether it will.
///
/// Activations of a training step are freed and allocated again at every step. By default glibc maps large blocks and
/// gives them back when they are freed, which costs 3,000 to 5,700 page faults per step, up to a third of its time. The
/// price is that the process stays as large as it ever was. Does nothing where the C library is not glibc.
bool keep_memory();

/// Gives free memory back to the system, that of all threads; returns whether there was any.
///
/// Every thread allocates from an arena of its own. What was freed there is lost to the others, so a process that ran
/// the same work on other threads before is larger than it has to be. Does nothing where the C library is not glibc.
bool trim_memory();

}  // namespace apollo
