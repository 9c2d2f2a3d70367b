#pragma once

#include <string>

#include "apollo/cuda_driver.h"

namespace apollo {

/// Owns a stream of the current context; its kernels may run on every SM.
///
/// torch gives out its own streams in turn from a pool of 32, so that two users may get the same one. This one is
/// nobody else's.
class PlainStream {
 public:
  /// Throws CudaError.
  PlainStream(const CudaDriver& driver, const std::string& where);
  PlainStream(const PlainStream&) = delete;
  PlainStream& operator=(const PlainStream&) = delete;
  ~PlainStream();

  cuda::Stream handle() const { return handle_; }

 private:
  const CudaDriver& driver_;
  cuda::Stream handle_ = nullptr;
};

}  // namespace apollo
