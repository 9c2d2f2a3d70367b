#pragma once

// What tests do with the stub of libcuda besides calling the driver: see stub_cuda.cpp.

#include <dlfcn.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace stub {

inline const std::string kLibrary = APOLLO_STUB_CUDA;

template <class Signature>
Signature* function(const char* name) {
  static void* const handle = dlopen(kLibrary.c_str(), RTLD_NOW | RTLD_LOCAL);
  CHECK(handle != nullptr);
  auto* const found = reinterpret_cast<Signature*>(dlsym(handle, name));
  CHECK(found != nullptr);
  return found;
}

inline void reset(int version = 13000) { function<void(int)>("stub_reset")(version); }

inline void set_device(int num_devices, int num_sms, int compute_major) {
  function<void(int, int, int)>("stub_set_device")(num_devices, num_sms, compute_major);
}

inline void set_grants(int granted_less, bool unequal) {
  function<void(int, int)>("stub_set_grants")(granted_less, unequal ? 1 : 0);
}

inline void set_leftover(int most_groups, bool stays_alone = false) {
  function<void(int, int)>("stub_set_leftover")(most_groups, stays_alone ? 1 : 0);
}

inline void fail(const std::string& name, int code, int skip = 0) {
  function<void(const char*, int, int)>("stub_fail")(name.c_str(), code, skip);
}

inline void hide(const std::string& name) { function<void(const char*)>("stub_hide")(name.c_str()); }

inline std::vector<std::string> log() {
  std::istringstream text(function<const char*()>("stub_log")());
  std::vector<std::string> calls;
  for (std::string line; std::getline(text, line);) {
    calls.push_back(line);
  }
  return calls;
}

inline int num_calls(const std::string& name) {
  const std::vector<std::string> calls = log();
  return static_cast<int>(std::count(calls.begin(), calls.end(), name));
}

/// Objects that have not been released.
struct Alive {
  int greens = 0;
  int streams = 0;
  int retained = 0;
  int current = 0;
  bool operator==(const Alive&) const = default;
};

inline Alive alive() {
  Alive alive;
  function<void(int*, int*, int*, int*)>("stub_count")(&alive.greens, &alive.streams, &alive.retained, &alive.current);
  return alive;
}

inline std::vector<int> sms_of(void* stream) {
  std::vector<int> sms(1024);
  const int count = function<int(void*, int*)>("stub_sms_of_stream")(stream, sms.data());
  CHECK(count >= 0);
  sms.resize(static_cast<std::size_t>(count));
  return sms;
}

}  // namespace stub
