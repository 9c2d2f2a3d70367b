"""The CPU as a target."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from apollo_compile.config import Config
from apollo_compile.device.cpu.cores import core_topology
from apollo_compile.device.cpu.execute import Executable, core_share, keep_memory, start_lanes, trim_memory
from apollo_compile.device.cpu.machine import machine_fingerprint
from apollo_compile.device.cpu.matmul_libraries import libraries_in
from apollo_compile.ir import Lane, LaneId, Observations, Trace, Variant
from apollo_compile.json_form import to_json
from apollo_compile.store.profiles import cached_profile_path, inspect_profile
from apollo_compile.target.compilation import Compilation
from apollo_compile.target.matmul import Matmul
from apollo_compile.target.profile import DeviceProfile
from apollo_compile.target.target import Code, Run, Target


class CpuTarget:
    """Target of the cores of this process; lanes are pinned threads."""

    device = torch.device("cpu")
    has_spans = True
    calls_wait = True
    captures = False
    has_native_bodies = True
    lane_memory_quota = None

    def __init__(self, profile: DeviceProfile, config: Config) -> None:
        self.profile = profile
        self._config = config

    @property
    def keeps_profile(self) -> bool:
        """Whether the next process plans with the same profile; a profile measured on a busy machine is not kept."""
        device = self._config.device
        if device.profile is not None or device.cache is None:
            return device.profile is not None
        if self.profile.source == "measured":
            return True
        path = cached_profile_path(device.cache, self.profile.units)
        return inspect_profile(path, machine_fingerprint(self.profile.units)).content == self.profile

    def unavailable_reason(self) -> None:
        """Return None: threads and cores need no trial."""

    def failure(self) -> None:
        """Return None: whatever fails is an error of the run."""

    def start(self, lanes: tuple[Lane, ...]) -> None:
        """Start the pinned threads, and keep freed memory in the process.

        Raises:
            RuntimeError: threads cannot be pinned.
        """
        if self._config.runtime.keep_memory:
            keep_memory()
        start_lanes(lanes, park_team=self._config.runtime.park_team)

    def saved_by_onednn(self, cases: Iterable[tuple[Matmul, int]]) -> Mapping[tuple[Matmul, int], float]:
        """Return the measured nanoseconds of matmuls and numbers of cores for which oneDNN is faster."""
        config = self._config
        return libraries_in(config.device.cache if config.plan.remember else None).choose(cases)

    def load(self, compilation: Compilation, code: Code, variant: Variant) -> Executable:
        """Load the program onto native lanes."""
        return Executable(
            compilation.program,
            compilation.partition.graph,
            code.bodies,
            mutates=code.contract.writes,
            park_team=self._config.runtime.park_team,
        )

    def load_whole(self, compilation: Compilation, code: Code, run: Run) -> CalledWhole:
        """Wrap the compiled graph; the calling thread runs it."""
        return CalledWhole(run)

    def share_memory(self, other: Target) -> None:
        """Do nothing: programs hold no memory between steps."""

    def keep_only(self, variants: Collection[Variant]) -> None:
        """Do nothing: graphs share no memory."""

    def trim_memory(self) -> None:
        """Return free memory to the system, if `runtime.keep_memory` keeps it in the process."""
        if self._config.runtime.keep_memory:
            trim_memory()

    def is_capturing(self) -> bool:
        """Return False: there are no captures on a CPU."""
        return False

    def now_ns(self) -> int:
        """Return the host's monotonic time in nanoseconds."""
        return time.perf_counter_ns()

    def circumstances(self) -> Sequence[object]:
        """Return the fingerprint of the machine, the topology of the lanes' cores, and torch's number of threads."""
        units = self.profile.units
        topology = core_topology(core_share().order[:units])
        return [to_json(machine_fingerprint(units)), [topology, torch.get_num_threads()]]


class CalledWhole:
    """A graph that Inductor compiled, run by the calling thread."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.num_runs = 0

    def trace(self) -> Trace:
        """Return no spans: there are no segments."""
        return Trace(spans=(), duration_ns=0)

    def measure(self, inputs: Sequence[torch.Tensor]) -> Observations | None:
        """Return None: there are no bodies."""
        return None

    def lane_bytes(self) -> Mapping[LaneId, int]:
        """Return an empty mapping: lanes are not used."""
        return {}

    def release(self) -> None:
        """Do nothing: no memory is held."""
