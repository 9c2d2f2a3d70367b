#pragma once

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "apollo/cuda_lane.h"

namespace apollo {

/// A kernel of a CUDA graph.
struct CapturedKernel {
  std::uintptr_t context;  ///< that of a lane, the primary one, or 0 where the driver does not tell
  std::string name;
};

/// Follows a capture while it goes on, so that every kernel can be laid to what launched it.
///
/// What is captured next on a stream comes after some nodes of the graph. Those, and all that they come after, is what
/// the stream has got; whoever goes back only as far as what was seen before looks at every node and edge once,
/// however often that is asked.
class CaptureWalk {
 public:
  explicit CaptureWalk(const CudaDevice& device);

  /// Returns the kernels that `stream` has got since this was last called for any stream of the capture: its own, those
  /// of streams that it waited for, and those of child graphs; earlier ones first.
  ///
  /// Nothing where the stream is not captured. Throws CudaError.
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
