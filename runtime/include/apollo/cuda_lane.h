#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "apollo/cuda_driver.h"
#include "apollo/green_context.h"
#include "apollo/plain_stream.h"

namespace apollo {

/// A stream that uses the SMs of some atoms of a device.
class CudaLane {
 public:
  CudaLane(const CudaDriver& driver, cuda::Device device, std::span<const cuda::DevResource> resources,
           const std::string& where)
      : context_(driver, device, resources, where), stream_(driver, context_, where) {}

  int num_sms() const { return context_.num_sms(); }
  cuda::Stream stream() const { return stream_.handle(); }

 private:
  const GreenContext context_;
  const GreenStream stream_;  // last: destroyed before its context
};

/// One GPU: its SMs, cut once into atoms, and the lanes made of them.
///
/// Note [one split]: two splits of a device start from the same SMs, so groups of different splits overlap. All lanes
/// of a device are therefore unions of groups of the one split made here: two lanes share SMs if and only if they
/// share atoms. SMs that do not fill a group are left over, 12 of the 132 of an H200. If the driver lets them join a
/// group, as CUDA 13.0 does, they belong to the last atom, where clusters of more than two blocks run on the group's
/// own SMs only; else they are in no lane.
///
/// Any thread may use it.
class CudaDevice {
 public:
  /// Retains the primary context and splits the device. Throws CudaError.
  explicit CudaDevice(int ordinal = 0, const std::string& library = CudaDriver::kLibrary);
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  /// Destroys every lane and stream; no CUDA graph that was captured on one may be launched after that.
  ~CudaDevice();

  /// Returns the device that the process keeps until it ends, made on first use.
  ///
  /// It is never destroyed: a captured CUDA graph or torch's allocator may refer to its streams up to the last moment.
  static CudaDevice& of_process(int ordinal, const std::string& library);

  const CudaDriver& driver() const { return driver_; }
  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }
  std::pair<int, int> compute_capability() const { return compute_capability_; }
  int num_sms() const { return num_sms_; }
  int num_atoms() const { return static_cast<int>(atoms_.size()); }

  /// Returns the number of SMs of every atom; disjoint lanes together have at most their sum.
  std::vector<int> atom_sizes() const;

  /// Returns the lane of these atoms, ascending; the same one at every call.
  ///
  /// Throws std::invalid_argument for atoms that the device does not have, and CudaError.
  const CudaLane& lane(const std::vector<int>& atoms);

  /// Returns the stream of that number, which may use every SM; the same one at every call. Throws CudaError.
  cuda::Stream stream(int number);

  /// Returns the free and the total bytes of device memory. Throws CudaError.
  std::pair<std::size_t, std::size_t> memory() const;

 private:
  void split(const std::string& where);
  bool may_join(const cuda::DevResource& group, const cuda::DevResource& remaining, const std::string& where) const;
  void check_atoms(const std::vector<int>& atoms) const;

  const CudaDriver driver_;
  const int ordinal_;
  cuda::Device device_ = 0;
  std::string name_;
  std::pair<int, int> compute_capability_;
  cuda::Context primary_ = nullptr;
  int num_sms_ = 0;
  std::vector<std::vector<cuda::DevResource>> atoms_;  // each one group; the last also the left-over SMs
  std::mutex mutex_;
  std::map<std::vector<int>, std::unique_ptr<CudaLane>> lanes_;  // by atoms; guarded by mutex_
  std::map<int, std::unique_ptr<PlainStream>> streams_;          // by number; guarded by mutex_
};

}  // namespace apollo
