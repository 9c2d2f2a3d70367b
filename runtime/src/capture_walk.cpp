#include "apollo/capture_walk.h"

#include <algorithm>

namespace apollo {

CaptureWalk::CaptureWalk(const CudaDevice& device)
    : driver_(device.driver()), where_("a CUDA graph in capture on device " + std::to_string(device.ordinal())) {}

std::vector<CapturedKernel> CaptureWalk::new_kernels(cuda::Stream stream) {
  std::vector<cuda::GraphNode> to_see = last_nodes(stream);
  std::vector<CapturedKernel> kernels;
  while (!to_see.empty()) {
    cuda::GraphNode node = to_see.back();
    to_see.pop_back();
    if (!seen_.insert(node).second) {
      continue;
    }
    add_kernels(node, kernels);
    for (cuda::GraphNode before : nodes_before(node)) {
      to_see.push_back(before);
    }
  }
  std::reverse(kernels.begin(), kernels.end());
  return kernels;
}

std::vector<cuda::GraphNode> CaptureWalk::last_nodes(cuda::Stream stream) const {
  int status = 0;
  cuda::Graph graph = nullptr;
  const cuda::GraphNode* nodes = nullptr;
  const cuda::GraphEdgeData* edges = nullptr;
  std::size_t count = 0;
  driver_.check(driver_.cuStreamGetCaptureInfo(stream, &status, nullptr, &graph, &nodes, &edges, &count),
                "cuStreamGetCaptureInfo", where_);
  if (status != cuda::kCaptureActive) {
    return {};
  }
  return {nodes, nodes + count};  // the driver's array is good only until the next call
}

std::vector<cuda::GraphNode> CaptureWalk::nodes_before(cuda::GraphNode node) const {
  std::size_t count = 0;
  driver_.check(driver_.cuGraphNodeGetDependencies(node, nullptr, nullptr, &count), "cuGraphNodeGetDependencies",
                where_);
  std::vector<cuda::GraphNode> nodes(count);
  std::vector<cuda::GraphEdgeData> edges(count);
  if (count != 0) {
    driver_.check(driver_.cuGraphNodeGetDependencies(node, nodes.data(), edges.data(), &count),
                  "cuGraphNodeGetDependencies", where_);
  }
  return nodes;
}

void CaptureWalk::add_kernels(cuda::GraphNode node, std::vector<CapturedKernel>& kernels) const {
  int type = 0;
  driver_.check(driver_.cuGraphNodeGetType(node, &type), "cuGraphNodeGetType", where_);
  if (type == cuda::kNodeTypeGraph) {
    cuda::Graph child = nullptr;
    driver_.check(driver_.cuGraphChildGraphNodeGetGraph(node, &child), "cuGraphChildGraphNodeGetGraph", where_);
    std::size_t count = 0;
    driver_.check(driver_.cuGraphGetNodes(child, nullptr, &count), "cuGraphGetNodes", where_);
    std::vector<cuda::GraphNode> nodes(count);
    driver_.check(driver_.cuGraphGetNodes(child, nodes.data(), &count), "cuGraphGetNodes", where_);
    for (cuda::GraphNode each : nodes) {
      add_kernels(each, kernels);
    }
  } else if (type == cuda::kNodeTypeKernel) {
    cuda::KernelNodeParams params;
    driver_.check(driver_.cuGraphKernelNodeGetParams(node, &params), "cuGraphKernelNodeGetParams", where_);
    const char* name = nullptr;
    if (params.function != nullptr) {
      driver_.check(driver_.cuFuncGetName(&name, params.function), "cuFuncGetName", where_);
    } else if (params.kernel != nullptr) {
      driver_.check(driver_.cuKernelGetName(&name, params.kernel), "cuKernelGetName", where_);
    }
    kernels.push_back({reinterpret_cast<std::uintptr_t>(params.context), name == nullptr ? "" : name});
  }
}

}  // namespace apollo
