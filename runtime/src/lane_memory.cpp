#include "apollo/lane_memory.h"

#include <map>
#include <mutex>

namespace apollo {

namespace {

struct Account {
  const CudaDriver* driver;
  LaneMemory memory;
};

struct Accounts {
  std::mutex mutex;
  std::map<cuda::Stream, Account> by_stream;        // guarded by mutex
  std::map<void*, cuda::Stream> stream_by_pointer;  // guarded by mutex
};

/// Never destroyed: torch frees pools while the process ends.
Accounts& accounts() {
  static auto* const accounts = new Accounts;
  return *accounts;
}

/// Returns memory, or null where the driver has none; see Note [refusal].
void* allocate(const CudaDriver& driver, std::size_t num_bytes) {
  int mode = cuda::kCaptureModeRelaxed;
  if (driver.cuThreadExchangeStreamCaptureMode(&mode) != cuda::kSuccess) {
    return nullptr;
  }
  cuda::DevicePointer pointer = 0;
  const cuda::Result result = driver.cuMemAlloc(&pointer, num_bytes);
  driver.cuThreadExchangeStreamCaptureMode(&mode);
  return result == cuda::kSuccess ? reinterpret_cast<void*>(pointer) : nullptr;
}

}  // namespace

void limit_lane_memory(const CudaDriver& driver, cuda::Stream stream, std::size_t allowed_bytes) {
  const std::lock_guard lock(accounts().mutex);
  Account& account = accounts().by_stream[stream];
  account.driver = &driver;
  account.memory.allowed_bytes = allowed_bytes;
  account.memory.refused_bytes = 0;
}

LaneMemory lane_memory(cuda::Stream stream) {
  const std::lock_guard lock(accounts().mutex);
  const auto found = accounts().by_stream.find(stream);
  return found == accounts().by_stream.end() ? LaneMemory{} : found->second.memory;
}

}  // namespace apollo

void* apollo_allocate(ssize_t num_bytes, int, apollo::cuda::Stream stream) {
  apollo::Accounts& accounts = apollo::accounts();
  const std::lock_guard lock(accounts.mutex);
  const auto found = accounts.by_stream.find(stream);
  if (found == accounts.by_stream.end() || num_bytes < 0) {
    return nullptr;  // nobody said what this stream may take
  }
  apollo::LaneMemory& memory = found->second.memory;
  const auto asked = static_cast<std::size_t>(num_bytes);
  const bool is_allowed =
      memory.taken_bytes <= memory.allowed_bytes && asked <= memory.allowed_bytes - memory.taken_bytes;
  void* pointer = is_allowed ? apollo::allocate(*found->second.driver, asked) : nullptr;
  if (pointer == nullptr) {
    memory.refused_bytes = asked;
    return nullptr;
  }
  memory.taken_bytes += asked;
  accounts.stream_by_pointer[pointer] = stream;
  return pointer;
}

void apollo_free(void* pointer, ssize_t num_bytes, int, apollo::cuda::Stream) {
  apollo::Accounts& accounts = apollo::accounts();
  const std::lock_guard lock(accounts.mutex);
  const auto found = accounts.stream_by_pointer.find(pointer);  // torch may free from another stream
  if (found == accounts.stream_by_pointer.end()) {
    return;
  }
  apollo::Account& account = accounts.by_stream[found->second];
  int mode = apollo::cuda::kCaptureModeRelaxed;  // collecting garbage may free a pool while something is captured
  account.driver->cuThreadExchangeStreamCaptureMode(&mode);
  account.driver->cuMemFree(reinterpret_cast<apollo::cuda::DevicePointer>(pointer));  // no caller could do anything
  account.driver->cuThreadExchangeStreamCaptureMode(&mode);
  account.memory.taken_bytes -= static_cast<std::size_t>(num_bytes);
  accounts.stream_by_pointer.erase(found);
}
