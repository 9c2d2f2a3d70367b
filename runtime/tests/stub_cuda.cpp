// A libcuda for machines without a GPU: one device of 132 SMs that are given out in groups of 8.
//
// It follows the documented interface and refuses what the real one refuses: unknown or destroyed handles, resources of
// different splits in one context, splitting the result of a split, destroying a green context before its streams.
// Tests control it through the `stub_` functions, which a real libcuda does not have.

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "apollo/cuda_abi.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace apollo::cuda;

/// What a resource keeps in the bytes that belong to the driver.
struct Internal {
  int split = 0;  // number of the split that made it; 0 for the whole device, or a resource read back
  bool is_raw = false;
  std::vector<bool>* sms = nullptr;
};

struct Desc {
  std::set<int> sms;
};

struct Green {
  std::set<int> sms;
  int num_streams = 0;
};

/// A failure that a call returns once, after a number of other calls of the same function.
struct Failure {
  Result code = kSuccess;
  int skip = 0;
};

struct State {
  int version = 13000;
  int num_sms = 132;
  int num_devices = 1;
  int compute_major = 9;
  int granted_less = 0;                     // SMs that every green context gets fewer than its resources have
  bool unequal = false;                     // whether groups of a split differ in size
  unsigned most_groups = 1000;              // of a split: clusters of SMs may have some that fill no group
  bool leftover_stays_alone = false;        // whether what a split leaves over may join none of its groups
  std::map<std::string, Failure> failures;  // by function
  std::string hidden;                       // a function that the driver lacks, whatever its version
  std::vector<std::string> log;
  int num_splits = 0;
  int retained = 0;
  std::vector<std::unique_ptr<std::vector<bool>>> masks;
  std::map<void*, std::unique_ptr<Desc>> descs;
  std::map<void*, std::unique_ptr<Green>> greens;
  std::map<void*, Green*> streams;  // null for a stream that may use every SM
  std::vector<void*> current;
  std::uintptr_t next_handle = 0x1000;
  std::string text;
};

std::mutex mutex;
State state;  // guarded by mutex

constexpr std::uintptr_t kPrimary = 0x42;

void* new_handle() { return reinterpret_cast<void*>(state.next_handle += 0x10); }

Internal read(const DevResource& resource) {
  Internal internal;
  std::memcpy(&internal, resource.internal, sizeof(internal));
  return internal;
}

DevResource make(const std::set<int>& sms, int split, bool is_raw) {
  auto mask = std::make_unique<std::vector<bool>>(static_cast<std::size_t>(state.num_sms));
  for (const int sm : sms) {
    (*mask)[static_cast<std::size_t>(sm)] = true;
  }
  DevResource resource;
  resource.type = kResourceTypeSm;
  const Internal internal{split, is_raw, mask.get()};
  static_assert(sizeof(internal) <= sizeof(resource.internal));
  std::memcpy(resource.internal, &internal, sizeof(internal));
  resource.sm.sm_count = static_cast<unsigned>(sms.size());
  if (state.version >= 13000) {
    resource.sm.min_partition_size = 8;
    resource.sm.coscheduled_alignment = 8;
  }
  state.masks.push_back(std::move(mask));
  return resource;
}

std::set<int> sms_of(const DevResource& resource) {
  std::set<int> sms;
  const Internal internal = read(resource);
  for (int sm = 0; internal.sms != nullptr && sm < state.num_sms; ++sm) {
    if ((*internal.sms)[static_cast<std::size_t>(sm)]) {
      sms.insert(sm);
    }
  }
  return sms;
}

/// Logs a call; returns the failure that a test ordered for it.
Result enter(const char* function) {
  state.log.emplace_back(function);
  const auto failure = state.failures.find(function);
  return failure != state.failures.end() && failure->second.skip-- == 0 ? failure->second.code : kSuccess;
}

#define ENTER(function)                                               \
  const std::lock_guard lock(mutex);                                  \
  if (const Result failure = enter(#function); failure != kSuccess) { \
    return failure;                                                   \
  }

Result cuInit(unsigned) {
  ENTER(cuInit)
  return state.num_devices == 0 ? kNoDevice : kSuccess;
}

Result cuDriverGetVersion(int* version) {
  ENTER(cuDriverGetVersion)
  *version = state.version;
  return kSuccess;
}

/// Returns the name of a code; null for one that is not known.
const char* name_of(Result result) {
  static const std::map<int, const char*> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
      {kDeinitialized, "CUDA_ERROR_DEINITIALIZED"},
      {kStubLibrary, "CUDA_ERROR_STUB_LIBRARY"},
      {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
      {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
      {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
      {kSystemNotReady, "CUDA_ERROR_SYSTEM_NOT_READY"},
      {kInvalidResourceType, "CUDA_ERROR_INVALID_RESOURCE_TYPE"},
      {kInvalidResourceConfiguration, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"},
  };
  const auto found = names.find(result);
  return found == names.end() ? nullptr : found->second;
}

Result cuGetErrorName(Result result, const char** name) {
  ENTER(cuGetErrorName)
  *name = name_of(result);
  return *name == nullptr ? kInvalidValue : kSuccess;
}

Result cuGetErrorString(Result result, const char** text) {
  ENTER(cuGetErrorString)
  *text = name_of(result) == nullptr ? nullptr : "text of the stub";
  return *text == nullptr ? kInvalidValue : kSuccess;
}

Result cuDeviceGet(Device* device, int ordinal) {
  ENTER(cuDeviceGet)
  *device = ordinal;
  return ordinal >= 0 && ordinal < state.num_devices ? kSuccess : kInvalidDevice;
}

Result cuDeviceGetName(char* name, int length, Device) {
  ENTER(cuDeviceGetName)
  std::strncpy(name, "Stub GPU", static_cast<std::size_t>(length));
  return kSuccess;
}

Result cuDeviceGetAttribute(int* value, int attribute, Device) {
  ENTER(cuDeviceGetAttribute)
  *value = attribute == kAttributeComputeMajor ? state.compute_major : 0;
  return kSuccess;
}

Result cuDevicePrimaryCtxRetain(Context* context, Device) {
  ENTER(cuDevicePrimaryCtxRetain)
  ++state.retained;
  *context = reinterpret_cast<Context>(kPrimary);
  return kSuccess;
}

Result cuDevicePrimaryCtxRelease(Device) {
  ENTER(cuDevicePrimaryCtxRelease)
  return --state.retained < 0 ? kInvalidContext : kSuccess;
}

Result cuCtxPushCurrent(Context context) {
  ENTER(cuCtxPushCurrent)
  state.current.push_back(context);
  return kSuccess;
}

Result cuCtxPopCurrent(Context* context) {
  ENTER(cuCtxPopCurrent)
  if (state.current.empty()) {
    return kInvalidContext;
  }
  *context = static_cast<Context>(state.current.back());
  state.current.pop_back();
  return kSuccess;
}

Result cuMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  ENTER(cuMemGetInfo)
  *free_bytes = std::size_t{100} << 30;
  *total_bytes = std::size_t{140} << 30;
  return state.current.empty() ? kInvalidContext : kSuccess;
}

Result cuDeviceGetDevResource(Device, DevResource* resource, int type) {
  ENTER(cuDeviceGetDevResource)
  if (type != kResourceTypeSm) {
    return kInvalidResourceType;
  }
  std::set<int> sms;
  for (int sm = 0; sm < state.num_sms; ++sm) {
    sms.insert(sm);
  }
  *resource = make(sms, 0, false);
  return kSuccess;
}

Result cuDevSmResourceSplitByCount(DevResource* groups, unsigned* num_groups, const DevResource* input,
                                   DevResource* remaining, unsigned flags, unsigned min_count) {
  ENTER(cuDevSmResourceSplitByCount)
  if (input->type != kResourceTypeSm) {
    return kInvalidResourceType;
  }
  if (read(*input).sms == nullptr || read(*input).is_raw) {
    return kInvalidResourceConfiguration;
  }
  const unsigned step = (flags & kSplitIgnoreCoscheduling) != 0 ? 2 : state.compute_major >= 9 ? 8 : 4;
  const unsigned size = std::max(step, (min_count + step - 1) / step * step);
  std::set<int> left = sms_of(*input);
  const auto possible = std::min(static_cast<unsigned>(left.size()) / size, state.most_groups);
  if (groups == nullptr) {
    *num_groups = possible;
    return kSuccess;
  }
  *num_groups = std::min(*num_groups, possible);
  const int split = ++state.num_splits;
  for (unsigned group = 0; group < *num_groups; ++group) {
    const unsigned taken = size - (state.unequal && group == 1 ? step / 2 : 0);
    const auto end = std::next(left.begin(), taken);
    groups[group] = make(std::set<int>(left.begin(), end), split, true);
    left.erase(left.begin(), end);
  }
  if (remaining != nullptr) {
    *remaining = make(left, state.leftover_stays_alone ? -split : split, true);
  }
  return kSuccess;
}

Result cuDevResourceGenerateDesc(ResourceDesc* desc, DevResource* resources, unsigned count) {
  ENTER(cuDevResourceGenerateDesc)
  auto made = std::make_unique<Desc>();
  for (unsigned index = 0; index < count; ++index) {
    const Internal internal = read(resources[index]);
    const std::set<int> sms = sms_of(resources[index]);
    if (internal.sms == nullptr || internal.split != read(resources[0]).split) {
      return kInvalidResourceConfiguration;
    }
    for (const int sm : sms) {
      if (!made->sms.insert(sm).second) {
        return kInvalidResourceConfiguration;
      }
    }
  }
  if (made->sms.empty()) {
    return kInvalidValue;
  }
  *desc = static_cast<ResourceDesc>(new_handle());
  state.descs[*desc] = std::move(made);
  return kSuccess;
}

Result cuGreenCtxCreate(GreenContextHandle* context, ResourceDesc desc, Device, unsigned flags) {
  ENTER(cuGreenCtxCreate)
  if (flags != kGreenContextDefaultStream || state.descs.count(desc) == 0 || state.retained == 0) {
    return kInvalidValue;
  }
  auto green = std::make_unique<Green>();
  green->sms = state.descs[desc]->sms;
  for (int less = 0; less < state.granted_less; ++less) {
    green->sms.erase(std::prev(green->sms.end()));
  }
  *context = static_cast<GreenContextHandle>(new_handle());
  state.greens[*context] = std::move(green);
  return kSuccess;
}

Result cuGreenCtxDestroy(GreenContextHandle context) {
  ENTER(cuGreenCtxDestroy)
  const auto found = state.greens.find(context);
  if (found == state.greens.end() || found->second->num_streams != 0) {
    return kInvalidContext;
  }
  state.greens.erase(found);
  return kSuccess;
}

Result cuGreenCtxGetDevResource(GreenContextHandle context, DevResource* resource, int) {
  ENTER(cuGreenCtxGetDevResource)
  if (state.greens.count(context) == 0) {
    return kInvalidContext;
  }
  *resource = make(state.greens[context]->sms, 0, false);
  return kSuccess;
}

Result cuGreenCtxStreamCreate(Stream* stream, GreenContextHandle context, unsigned flags, int priority) {
  ENTER(cuGreenCtxStreamCreate)
  if (state.greens.count(context) == 0) {
    return kInvalidContext;
  }
  if (flags != kStreamNonBlocking || priority != 0) {
    return kInvalidValue;
  }
  Green* green = state.greens[context].get();
  ++green->num_streams;
  *stream = static_cast<Stream>(new_handle());
  state.streams[*stream] = green;
  return kSuccess;
}

Result cuStreamCreate(Stream* stream, unsigned flags) {
  ENTER(cuStreamCreate)
  if (state.current.empty()) {
    return kInvalidContext;
  }
  if (flags != kStreamNonBlocking) {
    return kInvalidValue;
  }
  *stream = static_cast<Stream>(new_handle());
  state.streams[*stream] = nullptr;
  return kSuccess;
}

Result cuStreamDestroy(Stream stream) {
  ENTER(cuStreamDestroy)
  const auto found = state.streams.find(stream);
  if (found == state.streams.end()) {
    return kInvalidHandle;
  }
  if (found->second != nullptr) {
    --found->second->num_streams;
  }
  state.streams.erase(found);
  return kSuccess;
}

Result never_called() { return kNotSupported; }

struct Entry {
  void* address;
  int since;
};

const std::map<std::string, Entry>& entries() {
#define ENTRY(name, since)                           \
  {                                                  \
    #name, { reinterpret_cast<void*>(&name), since } \
  }
  static const std::map<std::string, Entry> entries = {
      ENTRY(cuInit, 2000),
      ENTRY(cuDriverGetVersion, 2020),
      ENTRY(cuGetErrorName, 6000),
      ENTRY(cuGetErrorString, 6000),
      ENTRY(cuDeviceGet, 2000),
      ENTRY(cuDeviceGetName, 2000),
      ENTRY(cuDeviceGetAttribute, 2000),
      ENTRY(cuDevicePrimaryCtxRetain, 7000),
      ENTRY(cuDevicePrimaryCtxRelease, 11000),
      ENTRY(cuCtxPushCurrent, 4000),
      ENTRY(cuCtxPopCurrent, 4000),
      ENTRY(cuMemGetInfo, 3020),
      ENTRY(cuStreamCreate, 2000),
      ENTRY(cuStreamDestroy, 4000),
      ENTRY(cuDeviceGetDevResource, 12040),
      ENTRY(cuDevSmResourceSplitByCount, 12040),
      ENTRY(cuDevResourceGenerateDesc, 12040),
      ENTRY(cuGreenCtxCreate, 12040),
      ENTRY(cuGreenCtxDestroy, 12040),
      ENTRY(cuGreenCtxGetDevResource, 12040),
      ENTRY(cuGreenCtxStreamCreate, 12050),
      {"cuGreenCtxGetId", {reinterpret_cast<void*>(&never_called), 12090}},
      {"cuDevSmResourceSplit", {reinterpret_cast<void*>(&never_called), 13010}},
      {"cuStreamGetDevResource", {reinterpret_cast<void*>(&never_called), 13010}},
  };
  return entries;
#undef ENTRY
}

}  // namespace

EXPORT Result cuGetProcAddress_v2(const char* name, void** address, int version, std::uint64_t, int* status) {
  const std::lock_guard lock(mutex);
  const auto found = state.hidden == name ? entries().end() : entries().find(name);
  *address = nullptr;
  *status = found == entries().end() ? 1 : 2;  // not found, or not in this version
  if (found != entries().end() && found->second.since <= state.version && found->second.since <= version) {
    *address = found->second.address;
    *status = 0;
  }
  return kSuccess;
}

/// Forgets everything, and behaves as a driver of `version` from now on.
EXPORT void stub_reset(int version) {
  const std::lock_guard lock(mutex);
  state = State();
  state.version = version;
}

EXPORT void stub_set_device(int num_devices, int num_sms, int compute_major) {
  const std::lock_guard lock(mutex);
  state.num_devices = num_devices;
  state.num_sms = num_sms;
  state.compute_major = compute_major;
}

EXPORT void stub_set_grants(int granted_less, int unequal) {
  const std::lock_guard lock(mutex);
  state.granted_less = granted_less;
  state.unequal = unequal != 0;
}

EXPORT void stub_set_leftover(int most_groups, int stays_alone) {
  const std::lock_guard lock(mutex);
  state.most_groups = static_cast<unsigned>(most_groups);
  state.leftover_stays_alone = stays_alone != 0;
}

/// Makes the call of `function` that follows `skip` others of it return `code`.
EXPORT void stub_fail(const char* function, int code, int skip) {
  const std::lock_guard lock(mutex);
  state.failures[function] = {code, skip};
}

/// Removes `function` from the driver.
EXPORT void stub_hide(const char* function) {
  const std::lock_guard lock(mutex);
  state.hidden = function;
}

/// Returns the calls so far, one a line; valid until the next call of this function.
EXPORT const char* stub_log() {
  const std::lock_guard lock(mutex);
  state.text.clear();
  for (const std::string& call : state.log) {
    state.text += call + "\n";
  }
  return state.text.c_str();
}

/// Returns how many green contexts and streams are alive, how often the primary context is retained, and how many
/// contexts are current one over the other.
EXPORT void stub_count(int* greens, int* streams, int* retained, int* current) {
  const std::lock_guard lock(mutex);
  *greens = static_cast<int>(state.greens.size());
  *streams = static_cast<int>(state.streams.size());
  *retained = state.retained;
  *current = static_cast<int>(state.current.size());
}

/// Writes the SMs that a stream may use, ascending, and returns how many there are; -1 for no stream.
EXPORT int stub_sms_of_stream(void* stream, int* sms) {
  const std::lock_guard lock(mutex);
  const auto found = state.streams.find(stream);
  if (found == state.streams.end()) {
    return -1;
  }
  if (found->second == nullptr) {
    std::iota(sms, sms + state.num_sms, 0);
    return state.num_sms;
  }
  std::copy(found->second->sms.begin(), found->second->sms.end(), sms);
  return static_cast<int>(found->second->sms.size());
}
