"""The seam between the compiler and a device.

    Target     the capabilities of a device, and how programs are loaded onto it: one implementation per kind of device
    Runnable   a loaded program
    Code       the compiled bodies of a graph, and the contract with its caller

Everything that differs between a CPU and a GPU is behind this protocol. A new kind of device is one more
implementation, a profile and, if its lanes are native, a lane class in `runtime/`. Nothing here needs torch at run
time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from apollo_compile.ir import Lane, LaneId, Observations, Trace, Variant
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.matmul import Matmul
from apollo_compile.target.profile import DeviceProfile

if TYPE_CHECKING:
    import ctypes

    import torch

Run = Callable[[list[Any]], Sequence[Any]]
"""Runs a graph: takes the inputs in a list, which it empties, and returns the outputs."""


@dataclass(frozen=True, slots=True)
class KeepsPython:
    """Why a body that was to be native runs under the GIL."""

    reason: str
    is_lost: bool
    """Whether the cause is that Inductor's C++ wrapper failed, not that the body calls Python."""


@dataclass(frozen=True, slots=True)
class CompiledBody:
    """A body that a lane can call.

    With `entry_address`, it is a C function `void entry(AtenTensorHandle* inputs, AtenTensorHandle* outputs)` that owns
    its inputs, takes `constants` after them, and never uses Python; else `function(list) -> sequence` under the GIL.
    Both take sizes as tensors without dimensions.
    """

    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    entry_address: int | None = None
    entry_name: str = ""
    """Its name in the library."""
    constants: tuple[torch.Tensor, ...] = ()
    library: ctypes.CDLL | None = field(default=None, repr=False)
    """The library with the entry."""
    keeps_python: KeepsPython | None = None
    """Why a native body was requested but there is no entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """Guarantees of the caller of a graph about inputs, and its expectations of outputs, by position."""

    static_inputs: frozenset[int] = frozenset()
    """Inputs that AOTAutograd calls static: parameters; in a backward, everything that the forward saved."""
    stable_inputs: frozenset[int] = frozenset()
    """Inputs that stayed at their addresses in the last steps, although nothing promises it; they are read there until
    one moves."""
    written_inputs: frozenset[int] | None = frozenset()
    """Inputs that the graph writes to; None where it also writes to something else."""
    user_outputs: frozenset[int] = frozenset()
    """Outputs that the user sees, so they must outlive the next run."""
    unsafe: str | None = None
    """An operator that a CUDA graph cannot capture and replay; None if there is none."""

    @property
    def writes(self) -> bool:
        """Whether the graph writes to anything but its outputs."""
        return self.written_inputs != frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """The compiled code of a graph, the same for every plan."""

    bodies: tuple[CompiledBody, ...]
    """Bodies by id."""
    contract: Contract = field(default_factory=Contract)
    is_all_or_nothing: bool = False
    """Whether a run that fails must have changed nothing, since something else then runs in its place. Where runs are
    CUDA graphs, a run that cannot be one raises `NotReplayedError`."""


class Runnable(Protocol):
    """A program on a device; one call runs at a time."""

    @property
    def num_runs(self) -> int:
        """Number of runs on lanes."""

    def run(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Run once; `inputs` is emptied.

        Raises:
            Exception: whatever a body raised.
        """

    def trace(self) -> Trace:
        """Return the spans of the last run; empty if the device does not measure them."""

    def measure(self, inputs: Sequence[torch.Tensor]) -> Observations | None:
        """Time every body on every number of units, for these inputs; None if runs have spans."""

    def lane_bytes(self) -> Mapping[LaneId, int]:
        """Return the device memory in bytes that every lane holds for this program; empty if lanes hold none."""

    def release(self) -> None:
        """Release the memory held for the next run; the next run allocates it again."""


class Target(Protocol):
    """A device, as compiler and session see it; one per Dynamo graph, whose graphs may share memory on it."""

    @property
    def profile(self) -> DeviceProfile:
        """The profile that plans are made for."""

    @property
    def device(self) -> torch.device:
        """The torch device of the tensors."""

    @property
    def has_spans(self) -> bool:
        """Whether a run says when its segments began and ended; else bodies are timed once, by `Runnable.measure`."""

    @property
    def calls_wait(self) -> bool:
        """Whether a run has ended when its call returns, so that calls are timed by the host's clock."""

    @property
    def captures(self) -> bool:
        """Whether programs become CUDA graphs: they hold memory, need fixed addresses, and may fail to be captured.

        Then all graphs of a model run the same variant, since a backward's CUDA graph reads what its forward saved.
        """

    @property
    def has_native_bodies(self) -> bool:
        """Whether a body can run without Python; then `saved_by_onednn` is asked about its matmuls, bundles of
        graphs are kept for later processes, and a graph is interpreted if there is no C++ compiler.
        """

    @property
    def keeps_profile(self) -> bool:
        """Whether the next process plans with the same profile: one measured on a busy machine is not kept."""

    @property
    def lane_memory_quota(self) -> int | None:
        """Bytes that one lane may hold; None means no limit."""

    def unavailable_reason(self) -> str | None:
        """Return why lanes must stay off on this machine; None if they may be used. Asked before the first compile.

        The first call on a kind of GPU, driver and torch may take seconds; later ones and later processes know.
        """

    def failure(self) -> str | None:
        """Return why programs can no longer run as they should, such as a capture that failed; None if they can."""

    def start(self, lanes: tuple[Lane, ...]) -> None:
        """Start the lanes, before anything is compiled for them.

        Raises:
            Exception: this machine cannot have them.
        """

    def saved_by_onednn(self, cases: Iterable[tuple[Matmul, int]]) -> Mapping[tuple[Matmul, int], float]:
        """Return those of these matmuls, each with a number of units, that oneDNN computes faster than BLAS.

        The value is the nanoseconds that a call saves. Unknown times are measured, so call it inside
        `interpret.real_tensors` during a compile.
        """

    def load(self, compilation: Compilation, code: Code, variant: Variant) -> Runnable:
        """Load a program; `variant` says which graphs share memory with it."""

    def load_whole(self, compilation: Compilation, code: Code, run: Run) -> Runnable:
        """Load Inductor's code of the whole graph as the variant `INDUCTOR`, to run in the same form as plans."""

    def share_memory(self, other: Target) -> None:
        """Let programs of steps use the memory of those of another target, since one step runs at a time."""

    def keep_only(self, variants: Collection[Variant]) -> None:
        """Drop the memory that graphs share for all other variants."""

    def trim_memory(self) -> None:
        """Give free memory back to the system."""

    def is_capturing(self) -> bool:
        """Whether the caller captures a CUDA graph now, so that nothing may be timed or changed."""

    def now_ns(self) -> int:
        """Wait until everything launched so far has ended, and return the host's time."""

    def circumstances(self) -> Sequence[object]:
        """Return the dependencies of findings besides the profile, as JSON values."""
