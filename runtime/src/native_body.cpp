#include "apollo/native_body.h"

#include <utility>

namespace apollo {

void NativeBody::run(std::span<void*> inputs, std::span<void*> outputs) {
  if (constants_.empty()) {
    entry_(inputs.data(), outputs.data());
    return;
  }
  // Kept between calls, since a body is called thousands of times per second; per thread, since lanes share bodies.
  thread_local std::vector<void*> arguments;
  arguments.assign(inputs.begin(), inputs.end());
  std::vector<Tensor> clones;
  try {
    clones.reserve(constants_.size());
    for (const Tensor& constant : constants_) {
      clones.push_back(constant.clone());
    }
    arguments.reserve(inputs.size() + clones.size());
  } catch (...) {
    // The constants know how to drop a handle; the inputs are as good as consumed.
    for (void* input : inputs) {
      Tensor(constants_.front().api(), input).reset();
    }
    throw;
  }
  for (Tensor& clone : clones) {
    arguments.push_back(clone.release());
  }
  entry_(arguments.data(), outputs.data());
}

}  // namespace apollo
