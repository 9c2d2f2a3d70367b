#include <cstdint>
#include <iterator>
#include <memory>
#include <thread>

#include "apollo/cuda_lane.h"
#include "apollo/lane_memory.h"
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

}  // namespace

TEST(a_device_of_132_sms_has_16_atoms_and_4_sms_left) {
  stub::reset();
  const auto device = make_device();
  CHECK(device.num_sms() == 132);
  CHECK(device.num_atoms() == 16);
  CHECK(device.atom_sms() == 8);
  CHECK(device.remaining_sms() == 4);
  CHECK(device.name() == "Stub GPU");
  CHECK(device.compute_capability() == std::make_pair(9, 0));
  CHECK(device.priorities() == std::make_pair(0, -5));
  CHECK(device.memory().first < device.memory().second);
}

TEST(a_driver_before_13_0_does_not_tell_its_groups_and_gives_the_documented_ones) {
  stub::reset(12080);
  CHECK(make_device().atom_sms() == 8);
  stub::reset(12080);
  stub::set_device(1, 108, 8);
  const auto ampere = make_device();
  CHECK(ampere.atom_sms() == 4);
  CHECK(ampere.num_atoms() == 27);
  CHECK(ampere.remaining_sms() == 0);
}

TEST(lanes_of_disjoint_atoms_share_no_sm) {
  stub::reset();
  auto device = make_device();
  std::vector<int> all;
  for (const auto& atoms : {range(0, 3), range(3, 8), range(8, 16)}) {
    const apollo::CudaLane& lane = device.lane(atoms);
    const std::vector<int> sms = stub::sms_of(lane.stream());
    CHECK(lane.num_sms() == 8 * static_cast<int>(atoms.size()));
    CHECK(static_cast<int>(sms.size()) == lane.num_sms());
    all.insert(all.end(), sms.begin(), sms.end());
  }
  std::sort(all.begin(), all.end());
  CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
  CHECK(all.size() == 128);
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
  CHECK(stub::sms_of(device.lane({0, 5, 15}).stream()).size() == 24);
}

TEST(the_device_is_split_once_whatever_lanes_it_has) {
  stub::reset();
  auto device = make_device();
  for (int atom = 0; atom < device.num_atoms(); ++atom) {
    device.lane({atom});
  }
  CHECK(stub::num_calls("cuDevSmResourceSplitByCount") == 1);
}

TEST(the_same_atoms_and_priority_are_the_same_lane) {
  stub::reset();
  auto device = make_device();
  const apollo::CudaLane& lane = device.lane(range(0, 4));
  CHECK(&device.lane(range(0, 4)) == &lane);
  CHECK(&device.lane(range(0, 4), -1) != &lane);
  CHECK(device.lane(range(0, 4), -1).priority() == -1);
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
    device.lane({0});
    device.lane({1});
  }
  const std::vector<std::string> calls = stub::log();
  const std::vector<std::string> end(calls.end() - 5, calls.end());
  CHECK(end == (std::vector<std::string>{"cuStreamDestroy", "cuGreenCtxDestroy", "cuStreamDestroy", "cuGreenCtxDestroy",
                                         "cuDevicePrimaryCtxRelease"}));
  CHECK(stub::alive() == stub::Alive{});
}

TEST(a_lane_that_fails_halfway_leaves_nothing_and_can_be_asked_for_again) {
  for (const char* function : {"cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxGetDevResource",
                               "cuCtxFromGreenCtx", "cuGreenCtxStreamCreate"}) {
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

TEST(a_device_that_fails_halfway_releases_the_primary_context) {
  for (const char* function :
       {"cuCtxPushCurrent", "cuCtxGetStreamPriorityRange", "cuDeviceGetDevResource", "cuDevSmResourceSplitByCount"}) {
    stub::reset();
    stub::fail(function, apollo::cuda::kInvalidResourceConfiguration);
    const std::string text = text_of([] { make_device(); });
    CHECK(has(text, std::string(function) + " failed for device 0"));
    CHECK(has(text, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"));
    CHECK(has(text, "the driver refuses this set of SMs"));
    CHECK(stub::alive() == stub::Alive{});
  }
}

TEST(every_call_before_the_context_names_itself_when_it_fails) {
  for (const char* function : {"cuDriverGetVersion", "cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute",
                               "cuDevicePrimaryCtxRetain"}) {
    stub::reset();
    stub::fail(function, 4711);
    const std::string text = text_of([] { make_device(); });
    CHECK(has(text, std::string(function) + " failed for "));
    CHECK(has(text, "an unknown error (4711, no text), expected success; set CUDA_LOG_FILE=stderr"));
  }
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
  CHECK(
      has(text_of([&] { device.lane({16}); }),
          "cannot make a lane of atoms [16]: expected some of 0 to 15, ascending, on device 0 (Stub GPU, groups of 8"));
  CHECK(has(text_of([&] { device.lane({0}, 1); }), "has priorities from 0, last, to -5, first"));
  CHECK_THROWS(std::invalid_argument, device.lane({0}, -6));
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

TEST(kernels_of_a_graph_and_its_children_are_found_with_their_contexts) {
  stub::reset();
  auto device = make_device();
  const auto make_graph = stub::function<void*()>("stub_make_graph");
  const auto add = stub::function<void(void*, void*, const char*, int)>("stub_add_kernel");
  void* graph = make_graph();
  void* child = make_graph();
  add(graph, device.lane({0}).context(), "first", 0);
  add(graph, nullptr, "a copy", 3);
  stub::function<void(void*, void*)>("stub_add_child")(graph, child);
  add(child, device.primary_context(), "second", 1);
  add(child, nullptr, "nameless", 2);
  const auto kernels = device.kernel_nodes(static_cast<apollo::cuda::Graph>(graph));
  CHECK(kernels.size() == 3);
  CHECK(kernels[0].name == "first");
  CHECK(kernels[0].context == reinterpret_cast<std::uintptr_t>(device.lane({0}).context()));
  CHECK(kernels[1].name == "second");
  CHECK(kernels[1].context == reinterpret_cast<std::uintptr_t>(device.primary_context()));
  CHECK(kernels[2].name.empty() && kernels[2].context == 0);
  CHECK(kernels[0].node != kernels[1].node && kernels[1].node != kernels[2].node);
  for (const char* function : {"cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphKernelNodeGetParams",
                               "cuGraphChildGraphNodeGetGraph", "cuFuncGetName", "cuKernelGetName"}) {
    stub::fail(function, apollo::cuda::kInvalidValue);
    CHECK(has(text_of([&] { device.kernel_nodes(static_cast<apollo::cuda::Graph>(graph)); }),
              std::string(function) + " failed for a captured CUDA graph on device 0"));
  }
  stub::fail("cuMemGetInfo", apollo::cuda::kInvalidValue);
  CHECK(has(text_of([&] { static_cast<void>(device.memory()); }), "cuMemGetInfo failed for device 0"));
}

TEST(the_graph_of_a_capture_is_known_while_it_lasts) {
  stub::reset();
  auto device = make_device();
  const apollo::cuda::Stream stream = device.lane({0}).stream();
  CHECK(device.graph_in_capture(stream) == nullptr);
  void* graph = stub::function<void*()>("stub_make_graph")();
  stub::function<void(void*, void*)>("stub_capture")(stream, graph);
  CHECK(device.graph_in_capture(stream) == graph);
  CHECK(device.graph_in_capture(device.lane({1}).stream()) == nullptr);
  stub::fail("cuStreamGetCaptureInfo", apollo::cuda::kInvalidHandle);
  CHECK(
      has(text_of([&] { device.graph_in_capture(stream); }), "cuStreamGetCaptureInfo failed for a stream on device 0"));
}

TEST(a_lane_takes_what_it_is_allowed_and_not_a_byte_more) {
  stub::reset();
  auto device = make_device();
  const apollo::cuda::Stream stream = device.lane({0}).stream();
  const auto allocated = [] { return stub::function<std::size_t()>("stub_allocated")(); };
  CHECK(apollo_allocate(1, 0, stream) == nullptr);  // nobody allowed it anything
  apollo::limit_lane_memory(device.driver(), stream, 100);
  void* first = apollo_allocate(60, 0, stream);
  CHECK(first != nullptr && allocated() == 60);
  CHECK(apollo_allocate(41, 0, stream) == nullptr);
  CHECK(apollo::lane_memory(stream).taken_bytes == 60 && apollo::lane_memory(stream).refused_bytes == 41);
  void* second = apollo_allocate(40, 0, stream);
  CHECK(second != nullptr && allocated() == 100);
  CHECK(apollo_allocate(-1, 0, stream) == nullptr);
  apollo::limit_lane_memory(device.driver(), stream, 50);  // less than it has: nothing more
  CHECK(apollo::lane_memory(stream).refused_bytes == 0);
  CHECK(apollo_allocate(1, 0, stream) == nullptr);
  apollo_free(first, 60, 0, nullptr);
  apollo_free(first, 60, 0, stream);  // not twice
  CHECK(apollo::lane_memory(stream).taken_bytes == 40 && allocated() == 40);
  apollo_free(second, 40, 0, stream);
  CHECK(apollo::lane_memory(stream).allowed_bytes == 50 && apollo::lane_memory(stream).taken_bytes == 0);
  CHECK(apollo::lane_memory(device.lane({1}).stream()).allowed_bytes == 0);
}

TEST(memory_is_taken_in_the_midst_of_a_capture_too_and_what_fails_is_not_counted) {
  stub::reset();
  auto device = make_device();
  const apollo::cuda::Stream stream = device.lane({2}).stream();
  stub::function<void(void*, void*)>("stub_capture")(stream, stub::function<void*()>("stub_make_graph")());
  apollo::limit_lane_memory(device.driver(), stream, 100);
  for (const char* function : {"cuThreadExchangeStreamCaptureMode", "cuMemAlloc"}) {
    stub::fail(function, apollo::cuda::kOutOfMemory);
    CHECK(apollo_allocate(10, 0, stream) == nullptr);
    CHECK(apollo::lane_memory(stream).taken_bytes == 0 && apollo::lane_memory(stream).refused_bytes == 10);
  }
  void* pointer = apollo_allocate(10, 0, stream);
  CHECK(pointer != nullptr);
  int mode = 0;
  device.driver().cuThreadExchangeStreamCaptureMode(&mode);
  CHECK(mode == 1);  // as torch had set it
  stub::fail("cuMemFree", apollo::cuda::kInvalidValue);
  apollo_free(pointer, 10, 0, stream);
  CHECK(apollo::lane_memory(stream).taken_bytes == 0);
}

TEST(what_fails_while_things_are_destroyed_does_not_throw) {
  for (const char* function :
       {"cuStreamDestroy", "cuGreenCtxDestroy", "cuDevicePrimaryCtxRelease", "cuCtxPopCurrent"}) {
    stub::reset();
    {
      auto device = make_device();
      device.lane({0});
      stub::fail(function, apollo::cuda::kDeinitialized);
      static_cast<void>(device.memory());
    }
    CHECK(stub::num_calls(function) > 0);
  }
}

TEST(every_function_that_lanes_need_is_called_by_a_test) {
  // What fails, and how that is told, is tested above by name; a function that nobody calls needs no declaration.
  stub::reset();
  std::vector<std::string> called = {"cuGetErrorName",
                                     "cuGetErrorString"};  // the stub does not log what is asked of errors
  {
    auto device = make_device();
    const apollo::CudaLane& lane = device.lane({0});
    static_cast<void>(device.memory());
    static_cast<void>(device.graph_in_capture(lane.stream()));
    void* graph = stub::function<void*()>("stub_make_graph")();
    const auto add = stub::function<void(void*, void*, const char*, int)>("stub_add_kernel");
    add(graph, lane.context(), "a", 0);
    add(graph, lane.context(), "b", 1);
    stub::function<void(void*, void*)>("stub_add_child")(graph, stub::function<void*()>("stub_make_graph")());
    CHECK(device.kernel_nodes(static_cast<apollo::cuda::Graph>(graph)).size() == 2);
    apollo::limit_lane_memory(device.driver(), lane.stream(), 100);
    apollo_free(apollo_allocate(1, 0, lane.stream()), 1, 0, lane.stream());
  }
  const std::vector<std::string> calls = stub::log();
  called.insert(called.end(), calls.begin(), calls.end());
  const std::vector<std::string> optional = {"cuGreenCtxGetId", "cuDevSmResourceSplit", "cuStreamGetDevResource"};
  const apollo::CudaDriver driver(stub::kLibrary);
  for (const auto& [name, is_there] : driver.functions()) {
    const bool is_optional = std::find(optional.begin(), optional.end(), name) != optional.end();
    CHECK(is_optional != (std::find(called.begin(), called.end(), name) != called.end()));
    CHECK(is_optional || is_there);
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
