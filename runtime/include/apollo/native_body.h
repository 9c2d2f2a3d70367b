#pragma once

#include <vector>

#include "apollo/body.h"
#include "apollo/tensor.h"

namespace apollo {

/// A body that is a C function, which takes constants after its inputs.
class NativeBody final : public Body {
 public:
  /// Consumes all inputs, writes outputs that the caller owns, and may throw any C++ exception.
  using Entry = void (*)(void** inputs, void** outputs);

  /// Returns the message of the last error of the tensor library on this thread.
  using ErrorText = const char* (*)();

  /// `error_text` may be null; with it, the library's message replaces exceptions that only name the failed call.
  NativeBody(Entry entry, std::vector<Tensor> constants, ErrorText error_text = nullptr)
      : entry_(entry), constants_(std::move(constants)), error_text_(error_text) {}

  void run(std::span<void*> inputs, std::span<void*> outputs) override;

 private:
  void call(void** inputs, void** outputs) const;

  Entry entry_;
  std::vector<Tensor> constants_;  // read only, so that lanes may clone from it at the same time
  ErrorText error_text_;
};

}  // namespace apollo
