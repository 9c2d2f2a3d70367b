#include "apollo/cuda_lane.h"

#include <algorithm>
#include <array>

namespace apollo {

namespace {

/// Makes a context current for as long as it lives.
class Current {
 public:
  Current(const CudaDriver& driver, cuda::Context context, const std::string& where) : driver_(driver) {
    driver.check(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent", where);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current() {
    cuda::Context popped = nullptr;
    driver_.cuCtxPopCurrent(&popped);
  }

 private:
  const CudaDriver& driver_;
};

std::string join(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) {
    text += (text.empty() ? "" : ", ") + std::to_string(number);
  }
  return text;
}

/// The smallest group of SMs: reported by the driver from 13.0 on, from the documented table before.
unsigned atom_size(const cuda::SmResource& sms, int compute_major) {
  if (sms.min_partition_size != 0) {
    return std::max(sms.min_partition_size, sms.coscheduled_alignment);
  }
  return compute_major >= 9 ? 8 : compute_major == 8 ? 4 : 2;
}

}  // namespace

CudaDevice::CudaDevice(int ordinal, const std::string& library) : driver_(library), ordinal_(ordinal) {
  const std::string where = "device " + std::to_string(ordinal);
  driver_.check(driver_.cuDeviceGet(&device_, ordinal), "cuDeviceGet", where);
  std::array<char, 256> name{};
  driver_.check(driver_.cuDeviceGetName(name.data(), static_cast<int>(name.size()), device_), "cuDeviceGetName", where);
  name_ = name.data();
  driver_.check(driver_.cuDeviceGetAttribute(&compute_capability_.first, cuda::kAttributeComputeMajor, device_),
                "cuDeviceGetAttribute", where);
  driver_.check(driver_.cuDeviceGetAttribute(&compute_capability_.second, cuda::kAttributeComputeMinor, device_),
                "cuDeviceGetAttribute", where);
  driver_.check(driver_.cuDevicePrimaryCtxRetain(&primary_, device_), "cuDevicePrimaryCtxRetain", where);
  try {
    split(where);
  } catch (...) {
    driver_.cuDevicePrimaryCtxRelease(device_);
    throw;
  }
}

CudaDevice::~CudaDevice() {
  lanes_.clear();
  streams_.clear();
  driver_.cuDevicePrimaryCtxRelease(device_);
}

CudaDevice& CudaDevice::of_process(int ordinal, const std::string& library) {
  static auto* const mutex = new std::mutex;
  static auto* const devices = new std::map<std::pair<int, std::string>, CudaDevice*>;  // guarded by mutex
  const std::lock_guard lock(*mutex);
  CudaDevice*& device = (*devices)[{ordinal, library}];
  if (device == nullptr) {
    device = new CudaDevice(ordinal, library);
  }
  return *device;
}

void CudaDevice::split(const std::string& where) {
  cuda::DevResource all;
  driver_.check(driver_.cuDeviceGetDevResource(device_, &all, cuda::kResourceTypeSm), "cuDeviceGetDevResource", where);
  num_sms_ = static_cast<int>(all.sm.sm_count);
  const unsigned size = atom_size(all.sm, compute_capability_.first);
  auto count = static_cast<unsigned>(num_sms_) / size;
  cuda::DevResource remaining;
  std::vector<cuda::DevResource> groups(count);
  const std::string asked = where + ": " + std::to_string(num_sms_) + " SMs into groups of " + std::to_string(size);
  if (count == 0) {
    throw CudaError(0, "cannot split " + asked +
                           ": expected at least one group; lanes need a larger device, or one that is not cut by MIG");
  }
  driver_.check(driver_.cuDevSmResourceSplitByCount(groups.data(), &count, &all, &remaining, 0, size),
                "cuDevSmResourceSplitByCount", asked);
  groups.resize(count);  // the driver may make fewer than asked for
  const bool are_equal = std::all_of(groups.begin(), groups.end(), [&groups](const cuda::DevResource& group) {
    return group.sm.sm_count == groups.front().sm.sm_count;
  });
  if (groups.empty() || !are_equal || groups.front().sm.sm_count == 0) {
    throw CudaError(0, "cuDevSmResourceSplitByCount made no equal groups of " + asked + ": expected " +
                           std::to_string(size) + " each, got " + std::to_string(count) +
                           " groups; report this with the output of 'apollo doctor'");
  }
  for (const cuda::DevResource& group : groups) {
    atoms_.push_back({group});
  }
  if (remaining.sm.sm_count > 0 && may_join(groups.back(), remaining, asked)) {
    atoms_.back().push_back(remaining);
  }
}

bool CudaDevice::may_join(const cuda::DevResource& group, const cuda::DevResource& remaining,
                          const std::string& where) const {
  std::array<cuda::DevResource, 2> both{group, remaining};
  cuda::ResourceDesc desc = nullptr;
  const cuda::Result result = driver_.cuDevResourceGenerateDesc(&desc, both.data(), static_cast<unsigned>(both.size()));
  if (result == cuda::kInvalidResourceConfiguration) {
    return false;
  }
  driver_.check(result, "cuDevResourceGenerateDesc", where);
  return true;
}

std::vector<int> CudaDevice::atom_sizes() const {
  std::vector<int> sizes;
  for (const std::vector<cuda::DevResource>& atom : atoms_) {
    sizes.push_back(0);
    for (const cuda::DevResource& part : atom) {
      sizes.back() += static_cast<int>(part.sm.sm_count);
    }
  }
  return sizes;
}

void CudaDevice::check_atoms(const std::vector<int>& atoms) const {
  const bool is_ascending =
      std::is_sorted(atoms.begin(), atoms.end()) && std::adjacent_find(atoms.begin(), atoms.end()) == atoms.end();
  if (atoms.empty() || !is_ascending || atoms.front() < 0 || atoms.back() >= num_atoms()) {
    throw std::invalid_argument("cannot make a lane of atoms [" + join(atoms) + "]: expected some of 0 to " +
                                std::to_string(num_atoms() - 1) + ", ascending, on device " + std::to_string(ordinal_) +
                                " (" + name_ + ", atoms of " + join(atom_sizes()) + " SMs)");
  }
}

const CudaLane& CudaDevice::lane(const std::vector<int>& atoms) {
  check_atoms(atoms);
  const std::lock_guard lock(mutex_);
  std::unique_ptr<CudaLane>& lane = lanes_[atoms];
  if (lane == nullptr) {
    std::vector<cuda::DevResource> resources;
    unsigned num_sms = 0;
    for (const int atom : atoms) {
      for (const cuda::DevResource& part : atoms_[static_cast<std::size_t>(atom)]) {
        resources.push_back(part);
        num_sms += part.sm.sm_count;
      }
    }
    const std::string where = "a lane of " + std::to_string(num_sms) + " SMs (atoms " + join(atoms) + ") on device " +
                              std::to_string(ordinal_);
    lane = std::make_unique<CudaLane>(driver_, device_, resources, where);
  }
  return *lane;
}

cuda::Stream CudaDevice::stream(int number) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<PlainStream>& stream = streams_[number];
  if (stream == nullptr) {
    const std::string where = "stream " + std::to_string(number) + " on device " + std::to_string(ordinal_);
    const Current current(driver_, primary_, where);
    stream = std::make_unique<PlainStream>(driver_, where);
  }
  return stream->handle();
}

std::pair<std::size_t, std::size_t> CudaDevice::memory() const {
  const std::string where = "device " + std::to_string(ordinal_);
  const Current current(driver_, primary_, where);
  std::pair<std::size_t, std::size_t> bytes;
  driver_.check(driver_.cuMemGetInfo(&bytes.first, &bytes.second), "cuMemGetInfo", where);
  return bytes;
}

}  // namespace apollo
