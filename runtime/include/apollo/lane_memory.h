#pragma once

#include <sys/types.h>

#include <cstddef>

#include "apollo/cuda_driver.h"

namespace apollo {

/// Device memory of one lane that may take only so much.
struct LaneMemory {
  std::size_t allowed_bytes = 0;
  std::size_t taken_bytes = 0;
  std::size_t refused_bytes = 0;  ///< what was asked for when the lane last got none; 0 where that never happened
};

/// Allows a lane so many bytes from now on; what it has taken stays taken. `driver` has to outlive the process's lanes.
void limit_lane_memory(const CudaDriver& driver, cuda::Stream stream, std::size_t allowed_bytes);

/// Returns what a lane took; nothing of a stream that was never limited.
LaneMemory lane_memory(cuda::Stream stream);

}  // namespace apollo

// What torch calls for a pool of its allocator: `torch.cuda.memory.CUDAPluggableAllocator`. The pool of a lane is made
// with these two, so that every byte beyond what the lane is allowed is refused before it is taken.
//
// Note [refusal]: torch holds the lock of its allocator and may be in a capture, where the driver refuses to allocate.
// So nothing here calls torch, and the driver is told that this allocation is no part of what is captured. A null
// pointer is `torch.OutOfMemoryError` for the caller.
extern "C" {
__attribute__((visibility("default"))) void* apollo_allocate(ssize_t num_bytes, int device,
                                                             apollo::cuda::Stream stream);
__attribute__((visibility("default"))) void apollo_free(void* pointer, ssize_t num_bytes, int device,
                                                        apollo::cuda::Stream stream);
}
