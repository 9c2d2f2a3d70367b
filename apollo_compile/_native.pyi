"""
Run the segments of a program on lanes of CPU cores, and make lanes of the SMs of a GPU.
"""

from collections.abc import Callable, Mapping, Sequence

from typing_extensions import CapsuleType


LAUNCH: int = 0

RECORD: int = 1

WAIT: int = 2

RELEASE: int = 3

def available_cores() -> list[int]:
    """Return the cores on which the process may run, ascending."""

def keep_memory() -> bool:
    """
    Tell the C library to keep freed memory in the process, and return whether it will.

    Freed activations otherwise go back to the system and come back at every step: 3,000 to 5,700 page
    faults per training step. The process stays as large as it ever was. What one thread frees serves the others
    too: lanes that are made later have no heap of their own. Works with glibc's allocator only, not with one
    that was loaded before it, such as jemalloc.
    """

def trim_memory() -> bool:
    """
    Give free memory back to the system, and return whether there was any. Works with glibc only.
    """

class Lanes:
    """
    Lanes of CPU cores, shared by executors; they run one program at a time.

    A lane is a thread pinned to its cores. The lane without cores, of which there is at most
    one, is the caller lane: it uses the thread that calls `Executor.run`.
    """

    def __init__(self, cores: Sequence[Sequence[int]], on_start: Callable[[int], object] | None = None, park_team: bool = True) -> None:
        """
        Start one thread per lane that has cores, and call `on_start(lane)` on each.

        `park_team` blocks the OpenMP team of the caller while it waits for the lanes. Raises what
        `on_start` raises, and ValueError for a core that the process may not use.
        """

    def close(self) -> None:
        """
        Stop and join the threads, after the run in flight if there is one; may be called again.
        """

    @property
    def cores(self) -> list[list[int]]:
        """Cores by lane; none for the caller lane."""

    @property
    def num_threads(self) -> int:
        """Number of lanes that have a thread."""

    @property
    def is_team_found(self) -> bool:
        """Whether an OpenMP library was found whose team can be parked."""

class NativeBody:
    """
    A body that is a C function `void entry(void** inputs, void** outputs)`.

    It consumes the handles of its inputs, copies of the constants behind them, and writes
    handles that it gives away. It may throw. Executors may share one.
    """

    def __init__(self, entry_address: int, constants: list[CapsuleType], *, clone_address: int, destroy_address: int, error_text_address: int = 0) -> None:
        """
        Take the function at `entry_address` and the handles in `constants`.

        The library that holds the function must stay loaded. `error_text_address` is that of
        `torch_exception_get_what_without_backtrace`, or 0 where torch has none: its text replaces
        exceptions that only name the call that failed.
        """

class Ranges:
    """Names of the ranges that a profile has of the segments of a program."""

    def __init__(self, names: Sequence[str], addresses: Mapping[str, int]) -> None:
        """
        Take a name per segment, and the addresses of functions of torch, by the name in `ProfilerApi`.
        """

class Executor:
    """
    Executes one program on lanes, as often as wanted.

    Tensors cross as unnamed capsules that hold an AtenTensorHandle, as
    `torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors` makes them; whoever is given a list
    owns the handles in it, also when it fails.
    """

    def __init__(self, lanes: Lanes, *, instructions: Sequence[Sequence[int]], num_buffers: int, num_events: int, inputs: Sequence[int], outputs: Sequence[int], clone_address: int, destroy_address: int, bodies: list[NativeBody | Callable[[list[CapsuleType]], list[CapsuleType]]]) -> None:
        """
        Check the program and keep it.

        `instructions` holds per lane, one behind the other:

            LAUNCH segment body num_inputs (buffer takes)* num_outputs (buffer)*
            RECORD event
            WAIT event
            RELEASE buffer

        An output of -1 is None. `clone_address` and `destroy_address` are those of
        `aoti_torch_new_tensor_handle` and `aoti_torch_delete_tensor_object`. Raises InvariantError for a
        program that cannot be executed.
        """

    def run(self, inputs: list[CapsuleType], ranges: Ranges | None = None) -> list[CapsuleType | None]:
        """
        Run the program once, without the GIL, and return its outputs.

        With `ranges`, the profile that torch records has a range per segment, on the thread that runs it.
        The first exception of a body stops the run and is raised here; so is KeyboardInterrupt on the
        main thread. Raises RuntimeClosedError on closed lanes and in a forked child.
        """

    def spans(self) -> list[tuple[int, int, int, int, int]]:
        """
        Return `(segment, lane, start_ns, end_ns, core)` of the segments that ended in the last run, by start.
        """

    @property
    def duration_ns(self) -> int:
        """Nanoseconds that the last run took."""

    @property
    def last_failure(self) -> int | None:
        """
        The segment whose body failed in the last run; None if it succeeded or was cancelled.
        """

class CudaLane:
    """A stream that uses some SMs of a GPU; it lives until the process ends."""

    @property
    def num_sms(self) -> int:
        """The SMs that the driver granted."""

    @property
    def stream(self) -> int:
        """The CUstream, for torch.cuda.ExternalStream."""

class CudaDevice:
    """A GPU, its SMs cut once into atoms; it lives until the process ends."""

    @property
    def name(self) -> str:
        """The name that the driver gives it."""

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor number."""

    @property
    def driver_version(self) -> int:
        """The newest CUDA version of the driver: 13000 is 13.0."""

    @property
    def functions(self) -> dict[str, bool]:
        """Whether the driver has each function that was looked for, by name."""

    @property
    def num_sms(self) -> int:
        """All SMs."""

    @property
    def num_atoms(self) -> int:
        """Groups of SMs that lanes are made of."""

    @property
    def atom_sizes(self) -> list[int]:
        """
        SMs of every atom: all have as many but the last, which has what is left over as well, where the driver allows that.
        """

    def memory(self) -> tuple[int, int]:
        """Return the free and all bytes of the device."""

    def lane(self, atoms: Sequence[int]) -> CudaLane:
        """
        Return the lane of these atoms, ascending; the same one at every call.

        Raises ValueError for atoms that the device has not, and CudaError.
        """

    def stream(self, number: int) -> int:
        """
        Return the CUstream of that number, which may use every SM; the same one at every call.

        It is no stream of torch's pool, so that nobody else uses it. Raises CudaError.
        """

def cuda_device(ordinal: int = 0, library: str = 'libcuda.so.1') -> CudaDevice:
    """
    Return the GPU with that number; the same object at every call.

    `library` is the driver to open. Raises CudaError where there is no driver, no such device, or a driver too
    old for lanes.
    """
