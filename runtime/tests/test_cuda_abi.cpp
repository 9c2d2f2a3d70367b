// Compares what cuda_abi.h declares by hand with NVIDIA's own header; everything happens while it compiles.

#include <cuda.h>
#include <cudaTypedefs.h>

#include <array>
#include <cstddef>

#include "apollo/cuda_driver.h"

namespace {

namespace ours = apollo::cuda;

/// Sizes of what a function returns and takes; both sides name their own types.
template <class Function>
struct Sizes;
template <class Result, class... Arguments>
struct Sizes<Result (*)(Arguments...)> {
  static constexpr std::array<std::size_t, 1 + sizeof...(Arguments)> value = {sizeof(Result), sizeof(Arguments)...};
};

// The form of every function that is asked for is one that NVIDIA has, under that version, with such arguments.
#define APOLLO_CUDA_COMPARE(name, version, signature) \
  static_assert(Sizes<PFN_##name##_v##version>::value == Sizes<ours::Result(*) signature>::value, #name);
namespace cuda = ours;
APOLLO_CUDA_REQUIRED(APOLLO_CUDA_COMPARE)
#undef APOLLO_CUDA_COMPARE
#define APOLLO_CUDA_EXISTS(name, version) static_assert(sizeof(PFN_##name##_v##version) == sizeof(void*));
APOLLO_CUDA_OPTIONAL(APOLLO_CUDA_EXISTS)
#undef APOLLO_CUDA_EXISTS

static_assert(CUDA_VERSION >= 13010, "an older header has not got all that is compared here");

static_assert(sizeof(ours::DevResource) == sizeof(CUdevResource));
static_assert(alignof(ours::DevResource) >= alignof(CUdevResource));
static_assert(offsetof(ours::DevResource, type) == offsetof(CUdevResource, type));
static_assert(offsetof(ours::DevResource, sm) == offsetof(CUdevResource, sm));
static_assert(offsetof(ours::SmResource, sm_count) == offsetof(CUdevSmResource, smCount));
static_assert(offsetof(ours::SmResource, min_partition_size) == offsetof(CUdevSmResource, minSmPartitionSize));
static_assert(offsetof(ours::SmResource, coscheduled_alignment) == offsetof(CUdevSmResource, smCoscheduledAlignment));
static_assert(sizeof(ours::SmResource) <= sizeof(CUdevSmResource));

static_assert(sizeof(ours::Device) == sizeof(CUdevice));
static_assert(ours::kSuccess == CUDA_SUCCESS);
static_assert(ours::kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(ours::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(ours::kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(ours::kDeinitialized == CUDA_ERROR_DEINITIALIZED);
static_assert(ours::kStubLibrary == CUDA_ERROR_STUB_LIBRARY);
static_assert(ours::kNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(ours::kInvalidDevice == CUDA_ERROR_INVALID_DEVICE);
static_assert(ours::kInvalidContext == CUDA_ERROR_INVALID_CONTEXT);
static_assert(ours::kInvalidHandle == CUDA_ERROR_INVALID_HANDLE);
static_assert(ours::kNotFound == CUDA_ERROR_NOT_FOUND);
static_assert(ours::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(ours::kSystemNotReady == CUDA_ERROR_SYSTEM_NOT_READY);
static_assert(ours::kInvalidResourceType == CUDA_ERROR_INVALID_RESOURCE_TYPE);
static_assert(ours::kInvalidResourceConfiguration == CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
static_assert(ours::kResourceTypeSm == CU_DEV_RESOURCE_TYPE_SM);
static_assert(ours::kGreenContextDefaultStream == CU_GREEN_CTX_DEFAULT_STREAM);
static_assert(ours::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(ours::kSplitIgnoreCoscheduling == CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING);
static_assert(ours::kAttributeComputeMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(ours::kAttributeComputeMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);

}  // namespace

int main() { return 0; }
