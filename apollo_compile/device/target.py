"""The seam between the compiler and a device.

    Target     what a device can do, and how programs are loaded onto it: one implementation per kind of device
    Runnable   a loaded program
    Code       what the segments of a graph were compiled to, and what its caller promises

Whatever differs between a CPU and a GPU is a question to the target. A new kind of device is one more implementation,
a profile and, where its lanes are native, a lane class in `runtime/`. Nothing here needs torch at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from apollo_compile.device.profile import DeviceProfile
from apollo_compile.ir import BodyId, Lane, LaneId, Observations, Trace, Variant

if TYPE_CHECKING:
    import ctypes

    import torch

    from apollo_compile.pipeline import Compilation

Run = Callable[[list[Any]], Sequence[Any]]
"""Takes the inputs of a graph in a list, which it empties, and returns the outputs."""


@dataclass(frozen=True, slots=True)
class KeepsPython:
    """Why lanes need Python for a body that was to do without."""

    reason: str
    is_lost: bool
    """Whether it could do without: Inductor's C++ wrapper failed, not that the body calls Python."""


@dataclass(frozen=True, slots=True)
class CompiledBody:
    """What a lane can call.

    With `entry_address`, a C function `void entry(AtenTensorHandle* inputs, AtenTensorHandle* outputs)` that owns its
    inputs, takes `constants` behind them, and never touches Python; else `function(list) -> sequence` under the GIL.
    Sizes come to both as tensors without dimensions.
    """

    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    entry_address: int | None = None
    constants: tuple[torch.Tensor, ...] = ()
    library: ctypes.CDLL | None = field(default=None, repr=False)
    """Where the entry is."""
    keeps_python: KeepsPython | None = None
    """Why there is no entry, where there was to be one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """What the caller of a graph promises about its inputs and expects of its outputs, by position."""

    static_inputs: frozenset[int] = frozenset()
    """Inputs that AOTAutograd calls static: parameters; in a backward all that the forward saved."""
    written_inputs: frozenset[int] | None = frozenset()
    """Inputs that the graph writes to; None where it also writes to something else."""
    user_outputs: frozenset[int] = frozenset()
    """Outputs that outlive the next run."""
    unsafe: str | None = None
    """An operator that does more than a recording of launches repeats; None where there is none."""

    @property
    def writes(self) -> bool:
        """Whether the graph writes to anything but its outputs."""
        return self.written_inputs != frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """What a graph was compiled to, whatever plan it runs by."""

    bodies: tuple[CompiledBody, ...]
    """By the id of the body."""
    contract: Contract = field(default_factory=Contract)
    tuned: Mapping[tuple[BodyId, int], CompiledBody] = field(default_factory=dict)
    """What lanes run instead of a body, by its id and their number of units."""


class Runnable(Protocol):
    """A program on a device; one call runs at a time."""

    @property
    def num_runs(self) -> int:
        """Runs on lanes."""

    def run(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Run once; `inputs` is emptied.

        Raises:
            Exception: whatever a body raised.
        """

    def trace(self) -> Trace:
        """Return the spans of the last run; empty where a run does not tell when its segments ran."""

    def measure(self, inputs: Sequence[torch.Tensor]) -> Observations | None:
        """Return how long every body takes on every number of units, for these inputs; None where runs tell it."""

    def lane_bytes(self) -> Mapping[LaneId, int]:
        """Return the device memory that every lane holds for this program; empty where lanes hold none."""

    def release(self) -> None:
        """Let go of the memory that is held for the next run; the next run takes it again."""


class Target(Protocol):
    """A device, as compiler and session see it; one per Dynamo graph, whose graphs may share memory there."""

    @property
    def profile(self) -> DeviceProfile:
        """What plans are made for."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""

    @property
    def variants(self) -> Collection[Variant]:
        """Ways to run a graph here besides its plan, its segments in turn and Inductor's whole graph."""

    @property
    def is_synchronous(self) -> bool:
        """Whether a run has ended when its call returns.

        Then a run tells when its segments ran, and calls are timed by the host's clock, as long as the model trains.
        Where not, bodies are timed once, and calls only while variants are compared, since that waits for the device.
        """

    @property
    def binds_graphs(self) -> bool:
        """Whether all graphs of a model have to run the same variant."""

    @property
    def keeps_findings(self) -> bool:
        """Whether code and verdicts are of use to the next process."""

    @property
    def has_native_bodies(self) -> bool:
        """Whether a body can run without Python; then there may also be several libraries for its matmuls."""

    @property
    def can_interpret(self) -> bool:
        """Whether a graph may run operator by operator where there is no C++ compiler."""

    @property
    def lane_memory_quota(self) -> int | None:
        """Bytes that one lane may hold; None is no limit."""

    def start(self, lanes: tuple[Lane, ...]) -> None:
        """Make lanes ready before anything is compiled for them.

        Raises:
            Exception: there can be none here.
        """

    def tuned_lanes(self, lanes: Sequence[Lane]) -> Mapping[int, Lane]:
        """Return the lanes that code of their own is to be compiled for, by their number of units."""

    def compile_scope(self, lane: Lane) -> AbstractContextManager[None]:
        """Time kernels that the compiler chooses among on this lane, in a `with`."""

    def load(self, compilation: Compilation, code: Code, variant: Variant) -> Runnable:
        """Return a program ready to run; `variant` says how its lanes share the device, and whose memory it shares."""

    def load_whole(self, compilation: Compilation, code: Code, run: Run) -> Runnable:
        """Return the whole graph as Inductor compiled it, ready to run as plans do."""

    def keep_only(self, variants: Collection[Variant]) -> None:
        """Forget the memory that graphs share where they run other variants."""

    def trim_memory(self) -> None:
        """Give free memory back to the system, where it is of no use to what follows."""

    def is_capturing(self) -> bool:
        """Whether somebody records what is launched now, so that nothing may be timed or changed."""

    def now_ns(self) -> int:
        """Return the time at which everything launched so far has ended."""

    def circumstances(self) -> Sequence[object]:
        """Return what of this machine shapes findings besides the profile, in terms of JSON."""
