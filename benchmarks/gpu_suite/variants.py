"""What is measured, and the process of one variant: a whole training step, with AdamW.

    VARIANTS                     by name, in the order in which they are worth their time
    make_task(workload, ...)     what their processes build
    Measured                     what a process answers, besides what every stepper does

Two of them are apollo: the plain backend, in the user's own loop, and `compile_step`. Rivals are the modes of Inductor
in the same loop; the whole step captured by hand as one CUDA graph, with forward and backward compiled by Inductor; and
Inductor on the whole traced step, with its CUDA graphs and without.

Times of a step, all with the host's time in them but the last:

    loops       per step of many steps in a row without a wait for the device in between: what a user feels
    steps       with a wait for the device after each
    host        from the call of a step to its return, the device idle before, and the CPU time that all threads took
    device      between two events around the step while the host is ahead: a spinning kernel is launched before it.
                None where the host cannot get ahead, since it launches more kernels than the driver's queue takes
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from apollo_compile import backend
from apollo_compile.device.gpu.run.gpu import TorchGpu
from apollo_compile.session import registry
from apollo_compile.tools.bench.task import MeasuredTask, MeasuredVariant
from benchmarks.harness.gpu_busy import busy_share, kernel_classes, profile_step, read_step, side_by_side_share
from benchmarks.harness.gpu_lanes import mark_lanes
from benchmarks.harness.whole_steps import ADAMW, CompiledStep, Loop, StepTask, TracedWholeStep
from benchmarks.workloads.gpu import build_gpu_workload

NUM_LOSSES = 50
"""Losses of the first steps that are kept, to be compared."""

RATE = 1e-5
"""Of AdamW: so small that one batch is not learned by heart in the first steps; then all losses would be zero."""

REPEATS = 9
"""Of host and device times, whose medians count."""

MOST_WARMUP_STEPS = 600

SPINS_S = (0.02, 0.08, 0.3)
"""How long a kernel spins so that the host gets ahead, tried in turn."""

CYCLES_PER_S = 2.0e9
"""Of any GPU, from above: a spin may be longer than it is said to be."""

GRAPHED_WARMUP_STEPS = 3
"""Steps before a capture by hand: torch's documentation asks for a few, on another stream."""

LANES: dict[str, Any] = {"plan.compile_share": 1e3}
"""Options of apollo: the default after a quarter of an hour of training. What is compiled after hours is left out."""


def build_step(*, name: str, batch: int, scale: str, device: str, dtype: str) -> StepTask:
    """Return a workload and how steps are taken on it."""
    workload = build_gpu_workload(name, batch=batch, scale=scale, device=device)

    def loss_fn(model: Callable[..., Tensor], part: Mapping[str, Tensor]) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == "bf16"):
            return model(dict(part))

    return StepTask(
        model=workload.model,
        batch=workload.inputs,
        loss_fn=loss_fn,
        optimizer="adamw",
        microbatches=1,
        adamw={**ADAMW, "lr": RATE},
    )


def make_task(name: str, *, batch: int, scale: str, device: str, dtype: str) -> MeasuredTask:
    """Return what processes of a workload build."""
    arguments = {"name": name, "batch": batch, "scale": scale, "device": device, "dtype": dtype}
    return MeasuredTask(builder=f"{__name__}:build_step", arguments=arguments)


class Measured(Loop):
    """A stepper on any device; answers are plain data."""

    built: StepTask

    def prepare(self, backend: str | None, options: dict[str, Any]) -> None:
        """Compile, and make the optimizer; no first weights are kept, which would count as memory."""
        torch.set_float32_matmul_precision("high")
        self._watches_peak = True  # from the start of the process
        self._losses: list[Tensor] = []
        self._marks_steps = bool(options.get("triton.cudagraphs"))
        self.optimizer = self.make_optimizer()
        self.compile(backend, options)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return AdamW as users have it: one call for all parameters."""
        return torch.optim.AdamW(self.built.model.parameters(), fused=True, **self.built.adamw)

    def compile(self, backend: str | None, options: dict[str, Any]) -> None:
        """Compile; apollo by its function, since its name is known only where the package is installed."""
        super().compile(_APOLLO if backend == "apollo" else backend, options)  # type: ignore[arg-type]

    def take(self) -> Tensor:
        """Take one step, and keep its loss if it is one of the first."""
        if self._marks_steps:
            torch.compiler.cudagraph_mark_step_begin()
        loss = self.step()
        if len(self._losses) < NUM_LOSSES:
            self._losses.append(loss.detach().clone())  # a CUDA graph writes to the same memory in the next step
        return loss

    # ---------------------------------------------------------------------------------------------------- requests

    def start(self) -> Any:
        """Take the first step; return its seconds."""
        begin = time.perf_counter()
        self.take()
        self._synchronize()
        return time.perf_counter() - begin

    def warm_up(self, steps: int, limit_s: float = float("inf")) -> Any:
        """Take at least `steps` steps, and more until nothing is being decided; nothing is waited for in between.

        Return how many, whether all is decided, and of each step its end in nanoseconds since the first one began and
        how long it took, as the device saw them.
        """
        begin, ends = time.monotonic(), [self._now()]
        while len(ends) <= steps or (
            len(ends) <= MOST_WARMUP_STEPS and not self.is_settled() and time.monotonic() - begin < limit_s
        ):
            self.take()
            ends.append(self._now())
        self._synchronize()
        ends_ns = [self._ns_between(ends[0], end) for end in ends]
        trace = [(end, end - before) for before, end in pairwise(ends_ns)]
        return {"steps": len(trace), "is_settled": self.is_settled(), "trace": trace}

    def loop(self, steps: int) -> int:
        """Take steps without a wait between them; return the nanoseconds of one."""
        self._synchronize()
        begin = time.perf_counter_ns()
        for _ in range(steps):
            self.take()
        self._synchronize()
        return (time.perf_counter_ns() - begin) // steps

    def run(self, untimed: int, timed: int) -> list[int]:
        """Take steps, each with a wait for the device; return the nanoseconds of the timed ones."""
        times = []
        for _ in range(untimed + timed):
            self._synchronize()
            begin = time.perf_counter_ns()
            self.take()
            self._synchronize()
            times.append(time.perf_counter_ns() - begin)
        return times[untimed:]

    def launch_times(self) -> dict[str, int | None]:
        """Return medians of host, CPU and device time of a step."""
        host, cpu = [], []
        for _ in range(REPEATS):
            self._synchronize()
            begin, used = time.perf_counter_ns(), time.process_time_ns()
            self.take()
            host.append(time.perf_counter_ns() - begin)
            cpu.append(time.process_time_ns() - used)
        self._synchronize()
        found = {"host_ns": round(statistics.median(host)), "cpu_ns": round(statistics.median(cpu))}
        return {**found, "device_ns": self._device_ns(self.take)}

    def replays(self) -> list[dict[str, Any]]:
        """Return host and device time of every CUDA graph of apollo's, replayed by itself."""
        found = []
        for model in registry.find_models(self.built.model) if self._device == "cuda" else ():
            for graph in model.graphs:
                captures = getattr(graph.executable, "captures", ())
                captured = next((each for each in captures if each.is_live), None)
                if captured is None:
                    continue
                host = []
                for _ in range(REPEATS):
                    self._synchronize()
                    begin = time.perf_counter_ns()
                    captured.recording.replay()
                    host.append(time.perf_counter_ns() - begin)
                times = {
                    "host_ns": round(statistics.median(host)),
                    "device_ns": self._device_ns(captured.recording.replay),
                }
                found.append({"graph": graph.compilation.partition.graph.name, **times})
        return found

    def memory(self) -> dict[str, int]:
        """Return peaks from the start of the process until now, and of a warm step.

        They are what CUDA's allocator holds, on a CPU the process; before the warm step it gives back what is unused.
        """
        if self._device != "cuda":
            peak = self.peak_bytes() or 0
            return {"peak_bytes": peak, "warm_bytes": peak, "warm_allocated_bytes": peak}
        self._synchronize()
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            self.take()
        self._synchronize()
        warm, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        return {"peak_bytes": peak, "warm_bytes": warm, "warm_allocated_bytes": allocated}

    def losses(self) -> list[float]:
        """Return the losses of the first steps."""
        while len(self._losses) < NUM_LOSSES:
            self.take()
        return [loss.item() for loss in self._losses]

    def decided(self) -> dict[str, Any]:
        """Return what apollo runs, and the makespans of its plans beside their bounds."""
        plans = [g.compilation.plan for m in registry.find_models(self.built.model) for g in m.graphs if g.has_run]
        return {
            "ran": self.ran(),
            "plan_ns": sum(plan.makespan_ns for plan in plans),
            "bound_ns": sum(plan.lower_bound_ns for plan in plans),
        }

    def ledger(self) -> dict[str, Any]:
        """Return what the allocator holds by pool and stream, and kernels by class."""
        if self._device != "cuda":
            return {"segments": [], "kernels": {}}
        self._synchronize()
        held: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: {"held_bytes": 0, "active_bytes": 0})
        for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
            entry = held[str(segment.get("segment_pool_id", "")), segment["stream"]]
            entry["held_bytes"] += segment["total_size"]
            entry["active_bytes"] += segment["active_size"]
        segments = [{"pool": pool, "stream": stream, **entry} for (pool, stream), entry in held.items()]
        segments.sort(key=lambda entry: -int(entry["held_bytes"]))
        gpu = TorchGpu(0)
        trace = profile_step(self.take, partial(mark_lanes, gpu))
        step = read_step(trace)
        return {
            "segments": segments,
            "kernels": kernel_classes(trace),
            "busy_share": busy_share(step.kernels, num_sms=gpu.native.num_sms, sms=step.sms),
            "side_by_side_share": side_by_side_share(step.kernels),
        }

    # ------------------------------------------------------------------------------------------------------ pieces

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _now(self) -> Any:
        """Return a mark of the time when the device gets here."""
        if self._device != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ns_between(self, begin: Any, end: Any) -> int:
        return end - begin if self._device != "cuda" else round(begin.elapsed_time(end) * 1e6)

    def _device_ns(self, work: Callable[[], object]) -> int | None:
        if self._device != "cuda":
            return None
        for spin_s in SPINS_S:
            times = [self._time_behind_spin(work, spin_s) for _ in range(REPEATS)]
            if all(times):
                return round(statistics.median(ns for ns in times if ns))
        return None

    def _time_behind_spin(self, work: Callable[[], object], spin_s: float) -> int | None:
        """Return the device's time for `work`; None if the host was not ahead of it."""
        self._synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(round(spin_s * CYCLES_PER_S))
        begin.record()
        work()
        end.record()
        is_ahead = not begin.query()
        end.synchronize()
        return round(begin.elapsed_time(end) * 1e6) if is_ahead else None


_APOLLO: Any = backend.apollo


class CapturedByHand(Measured):
    """Forward and backward compiled by Inductor, and with a capturable AdamW captured as one CUDA graph."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return AdamW whose number of steps is on the device."""
        is_cuda = self._device == "cuda"
        return torch.optim.AdamW(self.built.model.parameters(), fused=True, capturable=is_cuda, **self.built.adamw)

    def compile(self, backend: str | None, options: dict[str, Any]) -> None:
        """Compile the model, and note that nothing is captured yet."""
        super().compile(backend, options)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_steps = 0
        self._loss = torch.zeros(())

    def step(self) -> Tensor:
        """Take a step on another stream, as torch's documentation asks for, until the capture; then replay."""
        if self._device != "cuda":
            return super().step()
        if self._graph is None and self._num_steps < GRAPHED_WARMUP_STEPS:
            self._num_steps += 1
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = super().step()
            torch.cuda.current_stream().wait_stream(stream)
            return loss
        if self._graph is None:
            self.optimizer.zero_grad(set_to_none=True)  # the capture allocates gradients in the graph's memory
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._loss = super().step()
        self._graph.replay()
        return self._loss


class TracedWhole(Measured, TracedWholeStep):
    """Inductor on the whole traced step, the update inside."""

    def compile(self, backend: str | None, options: dict[str, Any]) -> None:
        """Compile, and say that the optimizer's state stays where it is: else Inductor makes no CUDA graph of it."""
        super().compile(backend, options)
        for tensors in self._state if self._device == "cuda" else ():
            for tensor in tensors:
                torch._dynamo.mark_static_address(tensor)


class WholeStep(Measured, CompiledStep):
    """`compile_step`."""

    def decided(self) -> dict[str, Any]:
        """Return what was chosen, and from what, and the makespan of the program's plan beside its bound."""
        plans = [tuner.program.variants.compilation.plan for tuner in self._take.tuners]
        return {
            "ran": self.ran(),
            "plan_ns": sum(plan.makespan_ns for plan in plans),
            "bound_ns": sum(plan.lower_bound_ns for plan in plans),
        }


def _stepper(of: type[Measured]) -> str:
    return f"{__name__}:{of.__name__}"


EAGER, INDUCTOR, REDUCE_OVERHEAD, MAX_AUTOTUNE = "eager", "inductor", "reduce-overhead", "max-autotune"
APOLLO, APOLLO_STEP = "apollo", "apollo-step"
BY_HAND, TRACED, TRACED_GRAPHED = "captured by hand", "traced whole", "traced whole as CUDA graphs"

BASELINES = (INDUCTOR, REDUCE_OVERHEAD, MAX_AUTOTUNE)
"""The fastest of these is what speed-ups are over."""

_GRAPHS = {"triton.cudagraphs": True}

VARIANTS: Mapping[str, MeasuredVariant] = {
    variant.name: variant
    for variant in (
        MeasuredVariant(name=INDUCTOR, backend="inductor", stepper=_stepper(Measured)),
        MeasuredVariant(name=REDUCE_OVERHEAD, backend="inductor", options=_GRAPHS, stepper=_stepper(Measured)),
        MeasuredVariant(name=APOLLO, backend="apollo", options=LANES, stepper=_stepper(Measured)),
        MeasuredVariant(name=APOLLO_STEP, backend="apollo", options=LANES, stepper=_stepper(WholeStep)),
        MeasuredVariant(
            name=MAX_AUTOTUNE,
            backend="inductor",
            options={
                "max_autotune": True,
                "coordinate_descent_tuning": True,
                "max_autotune_gemm_backends": "ATEN,TRITON",
                **_GRAPHS,
            },
            stepper=_stepper(Measured),
        ),
        MeasuredVariant(name=BY_HAND, backend="inductor", stepper=_stepper(CapturedByHand)),
        MeasuredVariant(name=TRACED_GRAPHED, backend="inductor", options=_GRAPHS, stepper=_stepper(TracedWhole)),
        MeasuredVariant(name=TRACED, backend="inductor", stepper=_stepper(TracedWhole)),
        MeasuredVariant(name=EAGER, backend=None, stepper=_stepper(Measured)),
    )
}

SLOW = (MAX_AUTOTUNE, TRACED, TRACED_GRAPHED)
"""Variants that compile for longer than all others; by default only the first workload has them."""

START_LIMITS_S: Mapping[str, float] = dict.fromkeys(SLOW, 130.0)
"""Seconds of a variant until its first step has been taken, where it may take less than all others; in a suite of ten
minutes, and in proportion in others."""
