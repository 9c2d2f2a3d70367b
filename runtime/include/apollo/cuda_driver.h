#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

#include "apollo/cuda_abi.h"

namespace apollo {

/// A call of the CUDA driver failed, or there is no driver with the functions that lanes need.
class CudaError : public std::runtime_error {
 public:
  CudaError(cuda::Result code, const std::string& message) : std::runtime_error(message), code_(code) {}

  /// Result of the driver call; 0 if no driver call failed.
  cuda::Result code() const { return code_; }

 private:
  cuda::Result code_;
};

// Name, the CUDA version of the function (major * 1000 + minor * 10), and its signature. Every version here is the one
// that introduced this signature, so older drivers do not have it.
#define APOLLO_CUDA_REQUIRED(X)                                                                                      \
  X(cuInit, 2000, (unsigned flags))                                                                                  \
  X(cuDriverGetVersion, 2020, (int* version))                                                                        \
  X(cuGetErrorName, 6000, (cuda::Result result, const char** name))                                                  \
  X(cuGetErrorString, 6000, (cuda::Result result, const char** text))                                                \
  X(cuDeviceGet, 2000, (cuda::Device * device, int ordinal))                                                         \
  X(cuDeviceGetName, 2000, (char* name, int length, cuda::Device device))                                            \
  X(cuDeviceGetAttribute, 2000, (int* value, int attribute, cuda::Device device))                                    \
  X(cuDevicePrimaryCtxRetain, 7000, (cuda::Context * context, cuda::Device device))                                  \
  X(cuDevicePrimaryCtxRelease, 11000, (cuda::Device device))                                                         \
  X(cuCtxPushCurrent, 4000, (cuda::Context context))                                                                 \
  X(cuCtxPopCurrent, 4000, (cuda::Context * context))                                                                \
  X(cuMemGetInfo, 3020, (std::size_t* free_bytes, std::size_t* total_bytes))                                         \
  X(cuStreamCreate, 2000, (cuda::Stream * stream, unsigned flags))                                                   \
  X(cuStreamDestroy, 4000, (cuda::Stream stream))                                                                    \
  X(cuDeviceGetDevResource, 12040, (cuda::Device device, cuda::DevResource * resource, int type))                    \
  X(cuDevSmResourceSplitByCount, 12040,                                                                              \
    (cuda::DevResource * groups, unsigned* num_groups, const cuda::DevResource* input, cuda::DevResource* remaining, \
     unsigned flags, unsigned min_count))                                                                            \
  X(cuDevResourceGenerateDesc, 12040, (cuda::ResourceDesc * desc, cuda::DevResource * resources, unsigned count))    \
  X(cuGreenCtxCreate, 12040,                                                                                         \
    (cuda::GreenContextHandle * context, cuda::ResourceDesc desc, cuda::Device device, unsigned flags))              \
  X(cuGreenCtxDestroy, 12040, (cuda::GreenContextHandle context))                                                    \
  X(cuGreenCtxGetDevResource, 12040, (cuda::GreenContextHandle context, cuda::DevResource * resource, int type))     \
  X(cuGreenCtxStreamCreate, 12050,                                                                                   \
    (cuda::Stream * stream, cuda::GreenContextHandle context, unsigned flags, int priority))

// Looked up, so that a report can list the driver's abilities, but not called: lanes are unions of atoms of one split,
// which every driver from 12.5 on supports.
#define APOLLO_CUDA_OPTIONAL(X)  \
  X(cuGreenCtxGetId, 12090)      \
  X(cuDevSmResourceSplit, 13010) \
  X(cuStreamGetDevResource, 13010)

/// libcuda, opened at run time, and its functions.
///
/// Functions are found through cuGetProcAddress, which returns the requested version of a function, not the newest.
class CudaDriver {
 public:
  static constexpr const char* kLibrary = "libcuda.so.1";
  static constexpr int kLeastVersion = 12050;

  /// Opens the library and initializes the driver.
  ///
  /// Throws CudaError if there is no library, no device, or a driver too old for lanes. The library stays loaded.
  explicit CudaDriver(const std::string& library = kLibrary);
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  /// Returns the newest CUDA version that the driver supports, as 13000 for 13.0.
  int version() const { return version_; }

  /// Returns whether each function is there, by name.
  const std::map<std::string, bool>& functions() const { return found_; }

  /// Throws CudaError unless `result` is success; `where` names the object of the call.
  void check(cuda::Result result, const char* function, const std::string& where) const;

#define APOLLO_CUDA_MEMBER(name, version, signature) cuda::Result(*name) signature = nullptr;
  APOLLO_CUDA_REQUIRED(APOLLO_CUDA_MEMBER)
#undef APOLLO_CUDA_MEMBER

 private:
  int version_ = 0;
  std::map<std::string, bool> found_;
};

/// Returns a version as people write it: 13000 is 13.0.
std::string format_cuda_version(int version);

}  // namespace apollo
