#pragma once

// The part of the CUDA driver's binary interface that lanes use, declared by hand, so that the wheel builds on any
// machine without a toolkit. `runtime/tests/test_cuda_abi.cpp` compares every size, offset and number here with
// NVIDIA's cuda.h if there is one.

#include <cstddef>
#include <cstdint>

namespace apollo::cuda {

using Result = int;
using Device = int;
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using GreenContextHandle = struct GreenContextTag*;
using ResourceDesc = struct ResourceDescTag*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kDeinitialized = 4;
inline constexpr Result kStubLibrary = 34;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotFound = 500;
inline constexpr Result kNotSupported = 801;
inline constexpr Result kSystemNotReady = 802;
inline constexpr Result kInvalidResourceType = 914;
inline constexpr Result kInvalidResourceConfiguration = 915;

inline constexpr int kResourceTypeSm = 1;
inline constexpr unsigned kGreenContextDefaultStream = 1;  // required up to 13.0, allowed after
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kSplitIgnoreCoscheduling = 1;
inline constexpr int kAttributeComputeMajor = 75;
inline constexpr int kAttributeComputeMinor = 76;

/// `CUdevSmResource`; fields after `sm_count` are zero before driver 13.0.
struct SmResource {
  unsigned sm_count;
  unsigned min_partition_size;
  unsigned coscheduled_alignment;
};

/// `CUdevResource`: the same size from 12.4 on. The bytes before `sm` are private to the driver; copies must keep them.
struct alignas(8) DevResource {
  int type = 0;
  unsigned char internal[92] = {};
  union {
    SmResource sm;
    unsigned char room[48] = {};
  };
};

}  // namespace apollo::cuda
