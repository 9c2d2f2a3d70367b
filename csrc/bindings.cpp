// Python bindings of the runtime: convert arguments and exceptions and manage the GIL, nothing else.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "apollo/cuda_lane.h"
#include "apollo/error.h"
#include "apollo/executor.h"
#include "apollo/lane_set.h"
#include "apollo/machine.h"
#include "apollo/native_body.h"
#include "apollo/program.h"
#include "apollo/ranges.h"
#include "apollo/tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Note [Handles in capsules]
// A tensor crosses as an unnamed PyCapsule that holds its handle: torch makes such lists with
// `torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors` and takes them with `alloc_tensors_by_stealing_from_void_ptrs`.
// The callee owns the handles in a list, even if it fails; a capsule itself frees nothing.

apollo::TensorApi tensor_api(std::uintptr_t clone_address, std::uintptr_t destroy_address) {
  if (clone_address == 0 || destroy_address == 0) {
    throw std::invalid_argument(
        "clone_address and destroy_address must be the addresses of aoti_torch_new_tensor_handle and "
        "aoti_torch_delete_tensor_object; got 0");
  }
  apollo::TensorApi api;
  api.clone = reinterpret_cast<decltype(api.clone)>(clone_address);
  api.destroy = reinterpret_cast<decltype(api.destroy)>(destroy_address);
  return api;
}

/// Takes every handle out of a list of capsules; throws only after it owns all of them.
std::vector<apollo::Tensor> take_handles(apollo::TensorApi api, nb::handle capsules) {
  if (!PyList_Check(capsules.ptr())) {
    throw nb::type_error("tensors must come as a list of capsules");
  }
  std::vector<apollo::Tensor> tensors;
  tensors.reserve(nb::len(capsules));
  bool are_capsules = true;
  for (nb::handle item : nb::borrow<nb::list>(capsules)) {
    void* handle = PyCapsule_CheckExact(item.ptr()) ? PyCapsule_GetPointer(item.ptr(), nullptr) : nullptr;
    if (handle == nullptr) {
      PyErr_Clear();
      are_capsules = false;
    }
    tensors.emplace_back(api, handle);
  }
  if (!are_capsules) {
    throw nb::type_error("tensors must come as unnamed capsules, as unsafe_alloc_void_ptrs_from_tensors makes them");
  }
  return tensors;
}

/// A body that is a Python function; it runs on its lane with the GIL held.
class PythonBody final : public apollo::Body {
 public:
  PythonBody(apollo::TensorApi api, nb::object function) : api_(api), function_(std::move(function)) {}

  ~PythonBody() override {
    if (!nb::is_alive()) {
      function_.release();  // the interpreter has ended, and its objects with it
      return;
    }
    const nb::gil_scoped_acquire gil;
    function_.reset();
  }

  void run(std::span<void*> inputs, std::span<void*> outputs) override {
    const nb::gil_scoped_acquire gil;
    nb::list arguments;
    for (void* input : inputs) {
      arguments.append(nb::capsule(input));
    }
    const nb::object result = function_(arguments);
    std::vector<apollo::Tensor> tensors = take_handles(api_, result);
    if (tensors.size() != outputs.size()) {
      throw std::invalid_argument("a body returned " + std::to_string(tensors.size()) + " tensors instead of " +
                                  std::to_string(outputs.size()));
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      outputs[i] = tensors[i].release();
    }
  }

  PyObject* function() const { return function_.ptr(); }
  void clear() { function_.reset(); }

 private:
  apollo::TensorApi api_;
  nb::object function_;  // touched only with the GIL held
};

struct PyLanes {
  std::shared_ptr<apollo::LaneSet> lanes;

  PyLanes(const std::vector<std::vector<int>>& cores, const std::optional<nb::callable>& on_start, bool park_team) {
    // By reference: the constructor returns only after every thread has called it.
    std::function<void(int)> start;
    if (on_start) {
      start = [&on_start](int lane) {
        const nb::gil_scoped_acquire gil;
        (*on_start)(lane);
      };
    }
    const nb::gil_scoped_release no_gil;
    lanes = std::make_shared<apollo::LaneSet>(cores, start, park_team);
  }
  PyLanes(const PyLanes&) = delete;
  PyLanes& operator=(const PyLanes&) = delete;
  ~PyLanes() {
    const nb::gil_scoped_release no_gil;  // joins threads
    lanes.reset();
  }

  void close() const {
    const nb::gil_scoped_release no_gil;
    lanes->close();
  }
};

apollo::Program make_program(const std::vector<std::vector<std::int64_t>>& instructions, int num_buffers,
                             int num_events, std::vector<int> inputs, std::vector<int> outputs) {
  apollo::Program program;
  for (std::size_t lane = 0; lane < instructions.size(); ++lane) {
    program.lanes.push_back(apollo::decode_instructions(instructions[lane], static_cast<int>(lane)));
  }
  program.num_buffers = num_buffers;
  program.num_events = num_events;
  program.inputs = std::move(inputs);
  program.outputs = std::move(outputs);
  return program;
}

struct PyExecutor {
  std::vector<std::shared_ptr<PythonBody>> python_bodies;  // seen by the garbage collector
  std::unique_ptr<apollo::Executor> executor;

  PyExecutor(const PyLanes& lanes, const std::vector<std::vector<std::int64_t>>& instructions, int num_buffers,
             int num_events, std::vector<int> inputs, std::vector<int> outputs, std::uintptr_t clone_address,
             std::uintptr_t destroy_address, const nb::list& bodies) {
    const apollo::TensorApi api = tensor_api(clone_address, destroy_address);
    std::vector<std::shared_ptr<apollo::Body>> all_bodies;
    for (nb::handle body : bodies) {
      std::shared_ptr<apollo::NativeBody> native;
      if (nb::try_cast(body, native)) {
        all_bodies.push_back(std::move(native));
      } else if (PyCallable_Check(body.ptr()) != 0) {
        python_bodies.push_back(std::make_shared<PythonBody>(api, nb::borrow(body)));
        all_bodies.push_back(python_bodies.back());
      } else {
        throw nb::type_error("a body must be a NativeBody or callable");
      }
    }
    executor = std::make_unique<apollo::Executor>(
        lanes.lanes, api, make_program(instructions, num_buffers, num_events, std::move(inputs), std::move(outputs)),
        std::move(all_bodies));
  }
  PyExecutor(const PyExecutor&) = delete;
  PyExecutor& operator=(const PyExecutor&) = delete;
  ~PyExecutor() {
    const nb::gil_scoped_release no_gil;  // may hold the last reference to the lanes, and then joins threads
    python_bodies.clear();
    executor.reset();
  }

  nb::list run(const nb::list& inputs, const apollo::Ranges* ranges) {
    std::vector<apollo::Tensor> tensors = take_handles(executor->tensor_api(), inputs);
    {
      const nb::gil_scoped_release no_gil;
      tensors = executor->run(std::move(tensors), poll(), ranges);
    }
    nb::list outputs;
    for (apollo::Tensor& tensor : tensors) {
      outputs.append(tensor ? nb::object(nb::capsule(tensor.release())) : nb::none());
    }
    return outputs;
  }

  /// Checks for Ctrl-C; only the main thread runs Python's signal handlers.
  static apollo::Poll poll() {
    if (gettid() != getpid()) {
      return {};
    }
    return [] {
      const nb::gil_scoped_acquire gil;
      if (PyErr_CheckSignals() != 0) {
        throw nb::python_error();
      }
    };
  }

  std::vector<std::tuple<int, int, std::int64_t, std::int64_t, int>> spans() const {
    const nb::gil_scoped_release no_gil;
    std::vector<std::tuple<int, int, std::int64_t, std::int64_t, int>> spans;
    for (const apollo::Span& span : executor->spans()) {
      spans.emplace_back(span.segment, span.lane, span.start_ns, span.end_ns, span.core);
    }
    return spans;
  }

  std::int64_t duration_ns() const {
    const nb::gil_scoped_release no_gil;
    return executor->duration_ns();
  }

  std::optional<int> last_failure() const { return executor->last_failure(); }
};

int traverse_executor(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) {
    for (const auto& body : nb::inst_ptr<PyExecutor>(self)->python_bodies) {
      Py_VISIT(body->function());
    }
  }
  return 0;
}

int clear_executor(PyObject* self) {
  if (nb::inst_ready(self)) {
    for (const auto& body : nb::inst_ptr<PyExecutor>(self)->python_bodies) {
      body->clear();
    }
  }
  return 0;
}

PyType_Slot executor_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_executor)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_executor)},
    {0, nullptr},
};

/// Raises `class_name` of apollo_compile.errors, imported on demand: this module imports nothing at load time.
void raise_error(const char* class_name, const char* message) {
  try {
    PyErr_SetString(nb::module_::import_("apollo_compile.errors").attr(class_name).ptr(), message);
  } catch (nb::python_error& error) {
    error.restore();
  }
}

std::uintptr_t address_of(const void* handle) { return reinterpret_cast<std::uintptr_t>(handle); }

void init_native_body(apollo::NativeBody* self, std::uintptr_t entry_address, const nb::list& constants,
                      std::uintptr_t clone_address, std::uintptr_t destroy_address, std::uintptr_t error_text_address) {
  if (entry_address == 0) {
    throw std::invalid_argument("entry_address must be the address of a C function; got 0");
  }
  const apollo::TensorApi api = tensor_api(clone_address, destroy_address);
  new (self)
      apollo::NativeBody(reinterpret_cast<apollo::NativeBody::Entry>(entry_address), take_handles(api, constants),
                         reinterpret_cast<apollo::NativeBody::ErrorText>(error_text_address));
}

template <typename Function>
void set_function(Function& function, const std::map<std::string, std::uintptr_t>& addresses, const char* name) {
  const auto found = addresses.find(name);
  if (found == addresses.end() || found->second == 0) {
    throw std::invalid_argument("ranges need the address of the function '" + std::string(name) + "'");
  }
  function = reinterpret_cast<Function>(found->second);
}

void init_ranges(apollo::Ranges* self, std::vector<std::string> names,
                 const std::map<std::string, std::uintptr_t>& addresses) {
  apollo::ProfilerApi api;
  set_function(api.has_callbacks, addresses, "has_callbacks");
  set_function(api.callbacks, addresses, "callbacks");
  set_function(api.set_callbacks, addresses, "set_callbacks");
  set_function(api.clear_callbacks, addresses, "clear_callbacks");
  set_function(api.state, addresses, "state");
  set_function(api.set_state, addresses, "set_state");
  set_function(api.begin, addresses, "begin");
  set_function(api.end, addresses, "end");
  new (self) apollo::Ranges{api, std::move(names)};
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Run the segments of a program on lanes of CPU cores, and make lanes of the SMs of a GPU.";

  // torch.compile keeps compiled functions until the process ends, which nanobind would report as leaks.
  nb::set_leak_warnings(false);

  nb::register_exception_translator([](const std::exception_ptr& exception, void*) {
    try {
      std::rethrow_exception(exception);
    } catch (const apollo::ClosedError& error) {
      raise_error("RuntimeClosedError", error.what());
    } catch (const apollo::InvalidProgramError& error) {
      raise_error("InvariantError", error.what());
    } catch (const apollo::CudaError& error) {
      raise_error("CudaError", error.what());
    }
  });

  m.attr("LAUNCH") = static_cast<std::int64_t>(apollo::Opcode::kLaunch);
  m.attr("RECORD") = static_cast<std::int64_t>(apollo::Opcode::kRecord);
  m.attr("WAIT") = static_cast<std::int64_t>(apollo::Opcode::kWait);
  m.attr("RELEASE") = static_cast<std::int64_t>(apollo::Opcode::kRelease);

  m.def("available_cores", &apollo::available_cores, "Return the cores on which the process may run, ascending.");
  m.def("keep_memory", &apollo::keep_memory,
        "Tell the C library to keep freed memory in the process, and return whether it will.\n\n"
        "Freed activations otherwise go back to the system and come back at every step: 3,000 to 5,700 page\n"
        "faults per training step. The process stays as large as it ever was. What one thread frees serves the others\n"
        "too: lanes that are made later have no heap of their own. Works with glibc's allocator only, not with one\n"
        "that was loaded before it, such as jemalloc.");
  m.def("trim_memory", &apollo::trim_memory,
        "Give free memory back to the system, and return whether there was any. Works with glibc only.");

  nb::class_<PyLanes>(m, "Lanes",
                      "Lanes of CPU cores, shared by executors; they run one program at a time.\n\n"
                      "A lane is a thread pinned to its cores. The lane without cores, of which there is at most\n"
                      "one, is the caller lane: it uses the thread that calls `Executor.run`.")
      .def(nb::init<const std::vector<std::vector<int>>&, const std::optional<nb::callable>&, bool>(), "cores"_a,
           "on_start"_a = nb::none(), "park_team"_a = true,
           nb::sig("def __init__(self, cores: collections.abc.Sequence[collections.abc.Sequence[int]], on_start: "
                   "collections.abc.Callable[[int], object] | None = "
                   "None, park_team: bool = True) -> None"),
           "Start one thread per lane that has cores, and call `on_start(lane)` on each.\n\n"
           "`park_team` blocks the OpenMP team of the caller while it waits for the lanes. Raises what\n"
           "`on_start` raises, and ValueError for a core that the process may not use.")
      .def("close", &PyLanes::close,
           "Stop and join the threads, after the run in flight if there is one; may be called again.")
      .def_prop_ro(
          "cores", [](const PyLanes& self) { return self.lanes->cores(); }, "Cores by lane; none for the caller lane.")
      .def_prop_ro(
          "num_threads", [](const PyLanes& self) { return self.lanes->num_threads(); },
          "Number of lanes that have a thread.")
      .def_prop_ro(
          "is_team_found", [](const PyLanes& self) { return self.lanes->is_team_found(); },
          "Whether an OpenMP library was found whose team can be parked.");

  nb::class_<apollo::NativeBody>(
      m, "NativeBody",
      "A body that is a C function `void entry(void** inputs, void** outputs)`.\n\n"
      "It consumes the handles of its inputs, copies of the constants behind them, and writes\n"
      "handles that it gives away. It may throw. Executors may share one.")
      .def("__init__", &init_native_body, "entry_address"_a, "constants"_a, nb::kw_only(), "clone_address"_a,
           "destroy_address"_a, "error_text_address"_a = 0,
           nb::sig("def __init__(self, entry_address: int, constants: list[typing_extensions.CapsuleType], *, "
                   "clone_address: int, destroy_address: int, error_text_address: int = 0) -> None"),
           "Take the function at `entry_address` and the handles in `constants`.\n\n"
           "The library that holds the function must stay loaded. `error_text_address` is that of\n"
           "`torch_exception_get_what_without_backtrace`, or 0 where torch has none: its text replaces\n"
           "exceptions that only name the call that failed.");

  nb::class_<apollo::Ranges>(m, "Ranges", "Names of the ranges that a profile has of the segments of a program.")
      .def("__init__", &init_ranges, "names"_a, "addresses"_a,
           nb::sig("def __init__(self, names: collections.abc.Sequence[str], addresses: "
                   "collections.abc.Mapping[str, int]) -> None"),
           "Take a name per segment, and the addresses of functions of torch, by the name in `ProfilerApi`.");

  nb::class_<PyExecutor>(m, "Executor", nb::type_slots(executor_slots),
                         "Executes one program on lanes, as often as wanted.\n\n"
                         "Tensors cross as unnamed capsules that hold an AtenTensorHandle, as\n"
                         "`torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors` makes them; whoever is given a list\n"
                         "owns the handles in it, also when it fails.")
      .def(nb::init<const PyLanes&, const std::vector<std::vector<std::int64_t>>&, int, int, std::vector<int>,
                    std::vector<int>, std::uintptr_t, std::uintptr_t, const nb::list&>(),
           "lanes"_a, nb::kw_only(), "instructions"_a, "num_buffers"_a, "num_events"_a, "inputs"_a, "outputs"_a,
           "clone_address"_a, "destroy_address"_a, "bodies"_a,
           nb::sig("def __init__(self, lanes: Lanes, *, instructions: "
                   "collections.abc.Sequence[collections.abc.Sequence[int]], num_buffers: int, "
                   "num_events: int, inputs: collections.abc.Sequence[int], outputs: collections.abc.Sequence[int], "
                   "clone_address: int, "
                   "destroy_address: int, bodies: list[NativeBody | "
                   "collections.abc.Callable[[list[typing_extensions.CapsuleType]], "
                   "list[typing_extensions.CapsuleType]]]) -> None"),
           "Check the program and keep it.\n\n"
           "`instructions` holds per lane, one behind the other:\n\n"
           "    LAUNCH segment body num_inputs (buffer takes)* num_outputs (buffer)*\n"
           "    RECORD event\n"
           "    WAIT event\n"
           "    RELEASE buffer\n\n"
           "An output of -1 is None. `clone_address` and `destroy_address` are those of\n"
           "`aoti_torch_new_tensor_handle` and `aoti_torch_delete_tensor_object`. Raises InvariantError for a\n"
           "program that cannot be executed.")
      .def("run", &PyExecutor::run, "inputs"_a, "ranges"_a.none() = nb::none(),
           nb::sig("def run(self, inputs: list[typing_extensions.CapsuleType], ranges: Ranges | None = None) -> "
                   "list[typing_extensions.CapsuleType | None]"),
           "Run the program once, without the GIL, and return its outputs.\n\n"
           "With `ranges`, the profile that torch records has a range per segment, on the thread that runs it.\n"
           "The first exception of a body stops the run and is raised here; so is KeyboardInterrupt on the\n"
           "main thread. Raises RuntimeClosedError on closed lanes and in a forked child.")
      .def("spans", &PyExecutor::spans,
           "Return `(segment, lane, start_ns, end_ns, core)` of the segments that ended in the last run, by start.")
      .def_prop_ro("duration_ns", &PyExecutor::duration_ns, "Nanoseconds that the last run took.")
      .def_prop_ro("last_failure", &PyExecutor::last_failure,
                   "The segment whose body failed in the last run; None if it succeeded or was cancelled.");

  nb::class_<apollo::CudaLane>(m, "CudaLane", "A stream that uses some SMs of a GPU; it lives until the process ends.")
      .def_prop_ro("num_sms", &apollo::CudaLane::num_sms, "The SMs that the driver granted.")
      .def_prop_ro(
          "stream", [](const apollo::CudaLane& self) { return address_of(self.stream()); },
          "The CUstream, for torch.cuda.ExternalStream.");

  nb::class_<apollo::CudaDevice>(m, "CudaDevice",
                                 "A GPU, its SMs cut once into atoms; it lives until the process ends.")
      .def_prop_ro("name", &apollo::CudaDevice::name, "The name that the driver gives it.")
      .def_prop_ro("compute_capability", &apollo::CudaDevice::compute_capability, "Major and minor number.")
      .def_prop_ro(
          "driver_version", [](const apollo::CudaDevice& self) { return self.driver().version(); },
          "The newest CUDA version of the driver: 13000 is 13.0.")
      .def_prop_ro(
          "functions", [](const apollo::CudaDevice& self) { return self.driver().functions(); },
          "Whether the driver has each function that was looked for, by name.")
      .def_prop_ro("num_sms", &apollo::CudaDevice::num_sms, "All SMs.")
      .def_prop_ro("num_atoms", &apollo::CudaDevice::num_atoms, "Groups of SMs that lanes are made of.")
      .def_prop_ro(
          "atom_sizes", &apollo::CudaDevice::atom_sizes,
          "SMs of every atom: all have as many but the last, which has what is left over as well, where the driver "
          "allows that.")
      .def("memory", &apollo::CudaDevice::memory, nb::call_guard<nb::gil_scoped_release>(),
           "Return the free and all bytes of the device.")
      .def("lane", &apollo::CudaDevice::lane, "atoms"_a, nb::rv_policy::reference,
           nb::call_guard<nb::gil_scoped_release>(),
           "Return the lane of these atoms, ascending; the same one at every call.\n\n"
           "Raises ValueError for atoms that the device has not, and CudaError.")
      .def(
          "stream", [](apollo::CudaDevice& self, int number) { return address_of(self.stream(number)); }, "number"_a,
          nb::call_guard<nb::gil_scoped_release>(),
          "Return the CUstream of that number, which may use every SM; the same one at every call.\n\n"
          "It is no stream of torch's pool, so that nobody else uses it. Raises CudaError.");

  m.def("cuda_device", &apollo::CudaDevice::of_process, "ordinal"_a = 0, "library"_a = apollo::CudaDriver::kLibrary,
        nb::rv_policy::reference, nb::call_guard<nb::gil_scoped_release>(),
        "Return the GPU with that number; the same object at every call.\n\n"
        "`library` is the driver to open. Raises CudaError where there is no driver, no such device, or a driver too\n"
        "old for lanes.");
}
