#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "apollo/error.h"

namespace apollo {

/// How to copy and drop a handle of a tensor; both functions return nonzero when they fail.
///
/// A handle is a cheap reference to a tensor with a reference count, so any thread may copy a handle that no other
/// thread modifies at that moment. In a process with torch these are `aoti_torch_new_tensor_handle` and
/// `aoti_torch_delete_tensor_object`, given as addresses so that the runtime is not linked with torch.
struct TensorApi {
  std::int32_t (*clone)(void* original, void** copy) = nullptr;
  std::int32_t (*destroy)(void* handle) = nullptr;
};

/// Owns one handle of a tensor, or nothing.
class Tensor {
 public:
  Tensor() = default;
  Tensor(TensorApi api, void* handle) noexcept : api_(api), handle_(handle) {}
  Tensor(Tensor&& other) noexcept : api_(other.api_), handle_(other.release()) {}
  Tensor& operator=(Tensor&& other) noexcept {
    if (this != &other) {
      reset();
      api_ = other.api_;
      handle_ = other.release();
    }
    return *this;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() { reset(); }

  explicit operator bool() const noexcept { return handle_ != nullptr; }
  void* get() const noexcept { return handle_; }
  TensorApi api() const noexcept { return api_; }

  /// Returns the handle and gives up its ownership.
  void* release() noexcept { return std::exchange(handle_, nullptr); }

  void reset() noexcept {
    if (handle_ != nullptr) {
      api_.destroy(release());
    }
  }

  /// Returns a second handle of the same tensor.
  Tensor clone() const {
    void* copy = nullptr;
    if (const std::int32_t code = api_.clone(handle_, &copy); code != 0) {
      throw Error("cannot copy the handle of a tensor: the tensor library returned error " + std::to_string(code));
    }
    return Tensor(api_, copy);
  }

 private:
  TensorApi api_;
  void* handle_ = nullptr;
};

}  // namespace apollo
