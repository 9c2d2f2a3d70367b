#pragma once

#include <vector>

#include "apollo/body.h"
#include "apollo/tensor.h"

namespace apollo {

/// A body that is a C function with constants behind its inputs.
class NativeBody final : public Body {
 public:
  /// Consumes all inputs, writes outputs that the caller owns, and may throw any C++ exception.
  using Entry = void (*)(void** inputs, void** outputs);

  NativeBody(Entry entry, std::vector<Tensor> constants) : entry_(entry), constants_(std::move(constants)) {}

  void run(std::span<void*> inputs, std::span<void*> outputs) override;

 private:
  Entry entry_;
  std::vector<Tensor> constants_;  // read only, so that lanes may clone from it at the same time
};

}  // namespace apollo
