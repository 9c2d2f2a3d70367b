#pragma once

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "apollo/cuda_lane.h"

namespace apollo {

/// A kernel of a CUDA graph.
struct CapturedKernel {
  std::uintptr_t context;  ///< that of a lane, the primary one, or 0 if the driver does not report it
  std::string name;
};

/// Follows a stream capture in progress, so that every captured kernel can be attributed to the call that launched it.
///
/// The next node captured on a stream depends on some nodes of the graph. Those and all their predecessors are the
/// nodes captured on the stream so far. A walk goes back only to nodes that it has seen before, so that it visits every
/// node and edge once, however often `new_kernels` is called.
class CaptureWalk {
 public:
  explicit CaptureWalk(const CudaDevice& device);

  /// Returns the kernels captured on `stream` since the last call for any stream of the capture: its own, those of
  /// streams that it waited for, and those of child graphs; earlier ones first.
  ///
  /// Returns nothing if the stream is not captured. Throws CudaError.
  std::vector<CapturedKernel> new_kernels(cuda::Stream stream);

 private:
  std::vector<cuda::GraphNode> last_nodes(cuda::Stream stream) const;
  std::vector<cuda::GraphNode> nodes_before(cuda::GraphNode node) const;
  void add_kernels(cuda::GraphNode node, std::vector<CapturedKernel>& kernels) const;

  const CudaDriver& driver_;
  const std::string where_;
  std::unordered_set<cuda::GraphNode> seen_;
};

}  // namespace apollo
