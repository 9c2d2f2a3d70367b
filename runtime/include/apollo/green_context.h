#pragma once

#include <span>
#include <string>

#include "apollo/cuda_driver.h"

namespace apollo {

/// Owns a green context: a context of the driver whose streams use only some SMs of the device.
///
/// It is never made current. Its owner must destroy its streams first.
class GreenContext {
 public:
  /// `resources` come from one split; `where` names the lane in messages. Throws CudaError.
  GreenContext(const CudaDriver& driver, cuda::Device device, std::span<const cuda::DevResource> resources,
               const std::string& where);
  GreenContext(const GreenContext&) = delete;
  GreenContext& operator=(const GreenContext&) = delete;
  ~GreenContext();

  cuda::GreenContextHandle handle() const { return handle_; }

  /// Returns the number of SMs that the driver granted, which may differ from the request.
  int num_sms() const { return num_sms_; }

 private:
  void read_back(const std::string& where);

  const CudaDriver& driver_;
  cuda::GreenContextHandle handle_ = nullptr;
  int num_sms_ = 0;
};

/// Owns a stream of a green context; its kernels run on the SMs of that context.
class GreenStream {
 public:
  /// Throws CudaError.
  GreenStream(const CudaDriver& driver, const GreenContext& context, const std::string& where);
  GreenStream(const GreenStream&) = delete;
  GreenStream& operator=(const GreenStream&) = delete;
  ~GreenStream();

  cuda::Stream handle() const { return handle_; }

 private:
  const CudaDriver& driver_;
  cuda::Stream handle_ = nullptr;
};

}  // namespace apollo
