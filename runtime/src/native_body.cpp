#include "apollo/native_body.h"

#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "apollo/error.h"

namespace apollo {

void NativeBody::run(std::span<void*> inputs, std::span<void*> outputs) {
  if (constants_.empty()) {
    call(inputs.data(), outputs.data());
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
    // Drop the inputs, which count as consumed, with the API of a constant.
    for (void* input : inputs) {
      Tensor(constants_.front().api(), input).reset();
    }
    throw;
  }
  for (Tensor& clone : clones) {
    arguments.push_back(clone.release());
  }
  call(arguments.data(), outputs.data());
}

void NativeBody::call(void** inputs, void** outputs) const {
  try {
    entry_(inputs, outputs);
  } catch (const std::exception& error) {
    // The exception of generated code names only the function that failed; the library keeps the reason.
    const bool is_library_error = std::string_view(error.what()).find("API call failed") != std::string_view::npos;
    const std::string_view reason = error_text_ != nullptr && is_library_error ? error_text_() : "";
    if (reason.empty()) {  // not every failure has one: oneDNN's first does not
      throw;
    }
    throw Error(std::string(reason));
  }
}

}  // namespace apollo
