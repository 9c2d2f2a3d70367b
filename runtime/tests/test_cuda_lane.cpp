#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <thread>

#include "apollo/cuda_lane.h"
#include "stub_cuda.h"

namespace {

apollo::CudaDevice make_device() { return apollo::CudaDevice(0, stub::kLibrary); }

/// Returns the text of the CudaError that `action` throws.
template <class Action>
std::string text_of(const Action& action) {
  try {
    action();
  } catch (const apollo::CudaError& error) {
    return error.what();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::vector<int> range(int first, int last) {
  std::vector<int> numbers;
  for (int number = first; number < last; ++number) {
    numbers.push_back(number);
  }
  return numbers;
}

/// Names of the functions without which there are no lanes.
std::vector<std::string> required_functions() {
#define APOLLO_CUDA_NAME(name, version, signature) #name,
  return {APOLLO_CUDA_REQUIRED(APOLLO_CUDA_NAME)};
#undef APOLLO_CUDA_NAME
}

/// Uses every driver function that lanes use, once, and releases everything.
void use_everything() {
  auto device = make_device();
  static_cast<void>(device.lane({0}));
  static_cast<void>(device.memory());
  static_cast<void>(device.stream(1));
}

/// As many atoms, all of one size but the last.
std::vector<int> sizes(int count, int size, int last) {
  std::vector<int> all(static_cast<std::size_t>(count), size);
  all.back() = last;
  return all;
}

void require(bool is_met, const std::string& function, const char* what) {
  check::require(is_met, (function + ": " + what).c_str(), __FILE__, __LINE__);
}

}  // namespace

TEST(a_device_of_132_sms_has_16_atoms_the_last_with_those_that_fill_none) {
  stub::reset();
  const auto device = make_device();
  CHECK(device.num_sms() == 132);
  CHECK(device.num_atoms() == 16);
  CHECK(device.atom_sizes() == sizes(16, 8, 12));
  CHECK(device.name() == "Stub GPU");
  CHECK(device.compute_capability() == std::make_pair(9, 0));
  CHECK(device.memory().first < device.memory().second);
}

TEST(a_device_has_the_atoms_that_the_driver_grants_not_those_that_would_fit) {
  stub::reset();
  stub::set_leftover(15);
  auto device = make_device();
  CHECK(device.num_sms() == 132);
  CHECK(device.atom_sizes() == sizes(15, 8, 20));
  CHECK(device.lane(range(0, 8)).num_sms() == 64);
  CHECK(device.lane(range(8, 15)).num_sms() == 68);
  CHECK_THROWS(std::invalid_argument, device.lane({15}));
}

TEST(what_may_join_no_group_is_in_no_lane) {
  stub::reset();
  stub::set_leftover(15, true);
  auto device = make_device();
  CHECK(device.num_sms() == 132);
  CHECK(device.atom_sizes() == sizes(15, 8, 8));
  CHECK(device.lane(range(8, 15)).num_sms() == 56);
  stub::reset();
  stub::fail("cuDevResourceGenerateDesc", 2);
  CHECK(has(text_of([] { make_device(); }), "cuDevResourceGenerateDesc failed for device 0: 132 SMs into groups of 8"));
  CHECK(stub::alive() == stub::Alive{});
}

TEST(a_driver_before_13_0_does_not_tell_its_groups_and_gives_the_documented_ones) {
  stub::reset(12080);
  CHECK(make_device().atom_sizes() == sizes(16, 8, 12));
  stub::reset(12080);
  stub::set_device(1, 108, 8);
  const auto ampere = make_device();
  CHECK(ampere.atom_sizes() == sizes(27, 4, 4));
}

TEST(lanes_of_disjoint_atoms_share_no_sm) {
  stub::reset();
  auto device = make_device();
  std::vector<int> all;
  for (const auto& atoms : {range(0, 3), range(3, 8), range(8, 16)}) {
    const apollo::CudaLane& lane = device.lane(atoms);
    const std::vector<int> sms = stub::sms_of(lane.stream());
    CHECK(lane.num_sms() == 8 * static_cast<int>(atoms.size()) + (atoms.back() == 15 ? 4 : 0));
    CHECK(static_cast<int>(sms.size()) == lane.num_sms());
    all.insert(all.end(), sms.begin(), sms.end());
  }
  std::sort(all.begin(), all.end());
  CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
  CHECK(all.size() == 132);
}

TEST(lanes_that_share_atoms_share_exactly_their_sms) {
  stub::reset();
  auto device = make_device();
  const std::vector<int> one = stub::sms_of(device.lane(range(0, 10)).stream());
  const std::vector<int> other = stub::sms_of(device.lane(range(6, 16)).stream());
  std::vector<int> both;
  std::set_intersection(one.begin(), one.end(), other.begin(), other.end(), std::back_inserter(both));
  CHECK(both.size() == 4 * 8);
}

TEST(atoms_need_not_be_neighbours) {
  stub::reset();
  auto device = make_device();
  CHECK(stub::sms_of(device.lane({0, 5, 15}).stream()).size() == 28);
}

TEST(the_device_is_split_once_whatever_lanes_it_has) {
  stub::reset();
  auto device = make_device();
  for (int atom = 0; atom < device.num_atoms(); ++atom) {
    device.lane({atom});
  }
  CHECK(stub::num_calls("cuDevSmResourceSplitByCount") == 1);
}

TEST(the_same_atoms_are_the_same_lane) {
  stub::reset();
  auto device = make_device();
  const apollo::CudaLane& lane = device.lane(range(0, 4));
  CHECK(&device.lane(range(0, 4)) == &lane);
  CHECK(&device.lane(range(0, 5)) != &lane);
  CHECK(stub::alive() == (stub::Alive{.greens = 2, .streams = 2, .retained = 1}));
}

TEST(granted_sms_are_read_back_not_assumed) {
  stub::reset();
  stub::set_grants(2, false);
  auto device = make_device();
  CHECK(device.lane(range(0, 2)).num_sms() == 14);
}

TEST(streams_go_before_their_contexts_and_the_primary_context_last) {
  stub::reset();
  {
    auto device = make_device();
    device.stream(0);
    device.lane({0});
    device.lane({1});
  }
  const std::vector<std::string> calls = stub::log();
  const std::vector<std::string> end(calls.end() - 6, calls.end());
  CHECK(end == (std::vector<std::string>{"cuStreamDestroy", "cuGreenCtxDestroy", "cuStreamDestroy", "cuGreenCtxDestroy",
                                         "cuStreamDestroy", "cuDevicePrimaryCtxRelease"}));
  CHECK(stub::alive() == stub::Alive{});
}

TEST(a_lane_that_fails_halfway_leaves_nothing_and_can_be_asked_for_again) {
  for (const char* function :
       {"cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxGetDevResource", "cuGreenCtxStreamCreate"}) {
    stub::reset();
    auto device = make_device();
    stub::fail(function, apollo::cuda::kOutOfMemory);
    const std::string text = text_of([&] { device.lane(range(2, 4)); });
    CHECK(has(text, std::string(function) + " failed for a lane of 16 SMs (atoms 2, 3) on device 0"));
    CHECK(has(text, "CUDA_ERROR_OUT_OF_MEMORY (2, text of the stub), expected success"));
    CHECK(has(text, "free memory on the device, or use fewer lanes"));
    CHECK(stub::alive() == (stub::Alive{.greens = 0, .streams = 0, .retained = 1}));
    CHECK(device.lane(range(2, 4)).num_sms() == 16);
  }
}

TEST(a_plain_stream_may_use_every_sm_and_is_nobody_elses) {
  stub::reset();
  {
    auto device = make_device();
    apollo::cuda::Stream stream = device.stream(1);
    CHECK(stub::sms_of(stream) == range(0, 132));
    CHECK(device.stream(1) == stream && device.stream(2) != stream);
    CHECK(device.lane({0}).stream() != stream);
    CHECK(stub::num_calls("cuStreamCreate") == 2);
    CHECK(stub::alive() == (stub::Alive{.greens = 1, .streams = 3, .retained = 1}));
  }
  CHECK(stub::alive() == stub::Alive{});
}

TEST(a_plain_stream_that_fails_leaves_nothing_and_can_be_asked_for_again) {
  stub::reset();
  auto device = make_device();
  stub::fail("cuStreamCreate", apollo::cuda::kOutOfMemory);
  CHECK(has(text_of([&] { device.stream(3); }),
            "cuStreamCreate failed for stream 3 on device 0: CUDA_ERROR_OUT_OF_MEMORY"));
  CHECK(stub::alive() == (stub::Alive{.retained = 1}));
  CHECK(stub::sms_of(device.stream(3)).size() == 132);
}

TEST(every_code_that_people_meet_has_advice) {
  using namespace apollo::cuda;
  const std::vector<std::pair<int, const char*>> advice = {
      {kDeinitialized, "the process is ending"},     {kStubLibrary, "take the directory with 'stubs' out"},
      {kNoDevice, "CUDA_VISIBLE_DEVICES"},           {kNotInitialized, "start processes with 'spawn'"},
      {kSystemNotReady, "services are not running"}, {kInvalidResourceType, "'apollo doctor' shows the groups"},
  };
  for (const auto& [code, text] : advice) {
    stub::reset();
    stub::fail("cuInit", code);
    CHECK(has(text_of([] { make_device(); }), text));
  }
}

TEST(a_machine_without_a_device_or_driver_gets_told) {
  stub::reset();
  stub::set_device(0, 132, 9);
  CHECK(has(text_of([] { make_device(); }), "CUDA_ERROR_NO_DEVICE"));
  const std::string text = text_of([] { apollo::CudaDevice(0, "libcuda-that-is-nowhere.so"); });
  CHECK(has(text, "cannot open the CUDA driver libcuda-that-is-nowhere.so"));
  CHECK(has(text, "lanes on a GPU need an NVIDIA driver on this machine"));
  stub::reset();
  CHECK(has(text_of([] { apollo::CudaDevice(3, stub::kLibrary); }), "cuDeviceGet failed for device 3"));
}

TEST(a_library_that_is_no_driver_gets_told) {
  const std::string text = text_of([] { apollo::CudaDevice(0, "libm.so.6"); });
  CHECK(has(text, "it has no cuGetProcAddress_v2"));
  CHECK(has(text, "lanes need a driver of CUDA 12.5 on: update it"));
}

TEST(an_old_driver_is_refused_with_what_it_lacks) {
  stub::reset(12040);
  const std::string one = text_of([] { make_device(); });
  CHECK(has(one, "of CUDA 12.4: it has no cuGreenCtxStreamCreate;"));
  stub::reset(12020);
  const std::string many = text_of([] { make_device(); });
  CHECK(has(many, "of CUDA 12.2: it has no cuDeviceGetDevResource and lacks"));
  CHECK(has(many, "lanes need a driver of CUDA 12.5 on: update it"));
}

TEST(what_a_driver_can_do_beyond_the_least_is_known_and_not_needed) {
  struct Case {
    int version;
    bool has_id;
    bool has_split;
  };
  for (const Case& each : {Case{12050, false, false}, Case{13000, true, false}, Case{13010, true, true}}) {
    stub::reset(each.version);
    const auto device = make_device();
    CHECK(device.driver().version() == each.version);
    CHECK(device.driver().functions().at("cuGreenCtxGetId") == each.has_id);
    CHECK(device.driver().functions().at("cuDevSmResourceSplit") == each.has_split);
    CHECK(device.driver().functions().at("cuGreenCtxStreamCreate"));
  }
}

TEST(lanes_that_the_device_cannot_have_are_refused) {
  stub::reset();
  auto device = make_device();
  for (const std::vector<int>& atoms : {std::vector<int>{}, {16}, {-1}, {1, 1}, {2, 1}}) {
    CHECK_THROWS(std::invalid_argument, device.lane(atoms));
  }
  CHECK(has(
      text_of([&] { device.lane({16}); }),
      "cannot make a lane of atoms [16]: expected some of 0 to 15, ascending, on device 0 (Stub GPU, atoms of 8, 8, "));
}

TEST(a_split_into_unequal_or_no_groups_is_refused) {
  stub::reset();
  stub::set_grants(0, true);
  CHECK(has(text_of([] { make_device(); }), "made no equal groups of device 0: 132 SMs into groups of 8"));
  stub::reset();
  stub::set_device(1, 6, 9);
  CHECK(has(text_of([] { make_device(); }), "cannot split device 0: 6 SMs into groups of 8"));
  CHECK(stub::alive() == stub::Alive{});
}

TEST(every_call_of_the_driver_that_fails_is_told_or_made_good) {
  // A function is of one of two kinds. A failure of what undoes something is no exception; here is what is left behind
  // then, by call: a lane goes before a plain stream. Any other failure is a CudaError, and leaves nothing.
  const std::map<std::string, std::vector<stub::Alive>> quiet = {
      {"cuStreamDestroy", {{.greens = 1, .streams = 1}, {.streams = 1}}},
      {"cuGreenCtxDestroy", {{.greens = 1}}},
      {"cuDevicePrimaryCtxRelease", {{.retained = 1}}},
      {"cuCtxPopCurrent", {{.current = 1}, {.current = 1}}},
  };
  stub::reset();
  use_everything();
  CHECK(stub::alive() == stub::Alive{});
  const std::vector<std::string> calls = stub::log();
  for (const std::string& name : required_functions()) {
    if (name == "cuGetErrorName" || name == "cuGetErrorString") {
      continue;  // called where another one failed: see the next test
    }
    const auto count = static_cast<int>(std::count(calls.begin(), calls.end(), name));
    require(count > 0, name, "use_everything calls it, or nobody needs it");
    for (int skip = 0; skip < count; ++skip) {
      stub::reset();
      stub::fail(name, apollo::cuda::kOutOfMemory, skip);
      const std::string text = text_of(use_everything);
      if (const auto found = quiet.find(name); found != quiet.end()) {
        require(text.empty(), name, "no exception");
        require(stub::alive() == found->second.at(static_cast<std::size_t>(skip)), name, "nothing else is left");
      } else {
        require(has(text, name + " failed for "), name, "the error names the call");
        require(has(text, "CUDA_ERROR_OUT_OF_MEMORY (2, text of the stub), expected success; "), name, "and the code");
        require(has(text, "free memory on the device, or use fewer lanes"), name, "and what to do");
        require(stub::alive() == stub::Alive{}, name, "nothing is left");
      }
      require(text_of(use_everything).empty(), name, "all is well afterwards");
    }
  }
}

TEST(an_error_that_the_driver_cannot_explain_is_told_by_its_number) {
  for (const auto& [name, expected] :
       {std::pair("cuGetErrorName", "an unknown error (2, text of the stub), expected"),
        std::pair("cuGetErrorString", "CUDA_ERROR_OUT_OF_MEMORY (2, no text), expected")}) {
    stub::reset();
    stub::fail("cuInit", apollo::cuda::kOutOfMemory);
    stub::fail(name, apollo::cuda::kInvalidValue);
    CHECK(has(text_of([] { make_device(); }), expected));
  }
  stub::reset();
  stub::fail("cuInit", 4711);
  CHECK(has(text_of([] { make_device(); }),
            "an unknown error (4711, no text), expected success; set CUDA_LOG_FILE=stde"));
}

TEST(every_function_that_a_driver_lacks_is_named_before_anything_is_called) {
  for (const std::string& name : required_functions()) {
    stub::reset();
    stub::hide(name);
    const std::string text = text_of([] { make_device(); });
    require(has(text, ": it has no " + name + "; lanes need a driver of CUDA 12.5 on: update it"), name, "is named");
    require(has(text, name == "cuDriverGetVersion" ? "of an unknown version:" : "of CUDA 13.0:"), name, "with version");
    require(stub::num_calls("cuInit") == 0 && stub::alive() == stub::Alive{}, name, "nothing is called");
  }
}

TEST(threads_that_ask_for_the_same_lane_get_the_same) {
  stub::reset();
  auto device = make_device();
  std::vector<const apollo::CudaLane*> lanes(8);
  std::vector<std::thread> threads;
  for (const apollo::CudaLane*& lane : lanes) {
    threads.emplace_back([&device, &lane] { lane = &device.lane(range(0, 4)); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(std::all_of(lanes.begin(), lanes.end(), [&](const apollo::CudaLane* lane) { return lane == lanes[0]; }));
  CHECK(stub::alive().greens == 1);
}

TEST(the_device_of_the_process_is_made_once_and_stays) {
  stub::reset();
  apollo::CudaDevice& device = apollo::CudaDevice::of_process(0, stub::kLibrary);
  CHECK(&apollo::CudaDevice::of_process(0, stub::kLibrary) == &device);
  CHECK_THROWS(apollo::CudaError, apollo::CudaDevice::of_process(1, stub::kLibrary));
  CHECK(stub::alive().retained == 1);
}

int main() { return check::run_all(); }
