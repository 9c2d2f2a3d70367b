#include "apollo/cuda_driver.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace apollo {

namespace {

using GetProcAddress = cuda::Result (*)(const char* name, void** address, int version, std::uint64_t flags,
                                        int* status);

const char* advice_for(cuda::Result code) {
  switch (code) {
    case cuda::kOutOfMemory:
      return "free memory on the device, or use fewer lanes";
    case cuda::kDeinitialized:
      return "the process is ending; make lanes earlier";
    case cuda::kStubLibrary:
      return "this libcuda is the one for linking only; take the directory with 'stubs' out of LD_LIBRARY_PATH";
    case cuda::kNoDevice:
    case cuda::kInvalidDevice:
      return "see 'nvidia-smi' for the devices and CUDA_VISIBLE_DEVICES for those that this process may use";
    case cuda::kNotInitialized:
      return "CUDA cannot be used in a process forked from one that uses it: start processes with 'spawn'";
    case cuda::kSystemNotReady:
      return "the driver's services are not running; see 'nvidia-smi'";
    case cuda::kInvalidResourceConfiguration:
    case cuda::kInvalidResourceType:
      return "the driver refuses this set of SMs; 'apollo doctor' shows the groups that it gives";
    default:
      return "set CUDA_LOG_FILE=stderr, and the driver says why";
  }
}

GetProcAddress open_library(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: see CudaDriver
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw CudaError(0, "cannot open the CUDA driver " + library + ": " + (reason == nullptr ? "no reason" : reason) +
                           "; lanes on a GPU need an NVIDIA driver on this machine");
  }
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(handle, "cuGetProcAddress_v2"));
  if (get == nullptr) {
    throw CudaError(0, "cannot use the CUDA driver " + library +
                           ": it has no cuGetProcAddress_v2, which came with CUDA 12.0; lanes need a driver of CUDA " +
                           format_cuda_version(CudaDriver::kLeastVersion) + " on: update it");
  }
  return get;
}

/// Returns the function, or null where the driver is older than `version`.
void* find(GetProcAddress get, const char* name, int version) {
  void* address = nullptr;
  int status = 0;
  const cuda::Result result = get(name, &address, version, 0, &status);
  return result == cuda::kSuccess && status == 0 ? address : nullptr;
}

}  // namespace

std::string format_cuda_version(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

CudaDriver::CudaDriver(const std::string& library) {
  const GetProcAddress get = open_library(library);
  std::vector<std::string> missing;
#define APOLLO_CUDA_FIND(name, version, signature)                    \
  name = reinterpret_cast<decltype(name)>(find(get, #name, version)); \
  found_[#name] = name != nullptr;                                    \
  if (name == nullptr) {                                              \
    missing.emplace_back(#name);                                      \
  }
  APOLLO_CUDA_REQUIRED(APOLLO_CUDA_FIND)
#undef APOLLO_CUDA_FIND
#define APOLLO_CUDA_LOOK(name, version) found_[#name] = find(get, #name, version) != nullptr;
  APOLLO_CUDA_OPTIONAL(APOLLO_CUDA_LOOK)
#undef APOLLO_CUDA_LOOK

  if (cuDriverGetVersion != nullptr) {
    check(cuDriverGetVersion(&version_), "cuDriverGetVersion", "library " + library);
  }
  if (!missing.empty()) {
    const std::string version = version_ == 0 ? "an unknown version" : "CUDA " + format_cuda_version(version_);
    throw CudaError(0, "cannot make lanes with the CUDA driver " + library + " of " + version + ": it has no " +
                           missing.front() +
                           (missing.size() > 1 ? " and lacks " + std::to_string(missing.size() - 1) + " more" : "") +
                           "; lanes need a driver of CUDA " + format_cuda_version(kLeastVersion) + " on: update it");
  }
  check(cuInit(0), "cuInit", "library " + library);
}

void CudaDriver::check(cuda::Result result, const char* function, const std::string& where) const {
  if (result == cuda::kSuccess) {
    return;
  }
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName == nullptr || cuGetErrorName(result, &name) != cuda::kSuccess || name == nullptr) {
    name = "an unknown error";
  }
  if (cuGetErrorString == nullptr || cuGetErrorString(result, &text) != cuda::kSuccess || text == nullptr) {
    text = "no text";
  }
  throw CudaError(result, std::string(function) + " failed for " + where + ": " + name + " (" + std::to_string(result) +
                              ", " + text + "), expected success; " + advice_for(result));
}

}  // namespace apollo
