"""Products written as text, for tests.

    graph((), (0,), (0, 1))          three segments; each tuple names the segments whose buffer it reads
    plan(some_graph, "A*B")          segment 0 on lane A, 1 on lane * (all units), 2 on lane B
    random_graph(rng, 12)            12 segments, random readers, sizes, shared bodies, order-only dependencies

Lane letters: `*` is lane 0, `A` lane 1, `B` lane 2, and so on.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from apollo_compile import ir
from apollo_compile.ir.check import check_memory, check_program, check_syncs
from apollo_compile.passes.emit import emit_program
from apollo_compile.passes.memory import plan_memory
from apollo_compile.passes.sync import eliminate_syncs
from apollo_compile.planner.problem import ExecutionMode as TaskMode
from apollo_compile.planner.problem import Interference, Problem, ResourceHold, Task
from apollo_compile.planner.simulate import serial_schedule
from apollo_compile.target.lanes import lane_catalogue, lanes_for_two

LETTERS = "*ABCDEFGHIJ"


class Clock:
    """A clock in seconds, which goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def graph(
    *reads: Sequence[int],
    after: Mapping[int, Sequence[int]] | None = None,
    outputs: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    bodies: Sequence[int] | None = None,
    collectives: Sequence[int] = (),
) -> ir.SegmentGraph:
    """Return a graph in which every segment makes one buffer.

    Buffer 0 is the graph input and is read by segments that read nothing else; segment `s` makes buffer `s + 1`.
    Without `outputs` (segments), the graph returns what nobody reads. `collectives` are segments too.
    """
    after = after or {}
    readers: list[list[ir.SegmentId]] = [[] for _ in range(len(reads) + 1)]
    for segment, others in enumerate(reads):
        for buffer in [other + 1 for other in others] or [0]:
            readers[buffer].append(ir.SegmentId(segment))
    returned = [s for s in range(len(reads)) if not readers[s + 1]] if outputs is None else list(outputs)
    segments = tuple(
        ir.Segment(
            id=ir.SegmentId(s),
            name=names[s] if names else f"m{s}",
            module=names[s] if names else f"m{s}",
            body=ir.BodyId(bodies[s] if bodies else s),
            inputs=tuple(ir.BufferId(other + 1) for other in others) or (ir.BufferId(0),),
            outputs=(ir.BufferId(s + 1),),
            after=tuple(ir.SegmentId(other) for other in after.get(s, ())),
            work=ir.Work(flops=1000, bytes_read=100, bytes_written=100, kernels=2),
            has_collective=s in collectives,
        )
        for s, others in enumerate(reads)
    )
    buffers = tuple(
        ir.Buffer(
            id=ir.BufferId(b),
            name="x" if b == 0 else f"v{b - 1}",
            producer=None if b == 0 else ir.SegmentId(b - 1),
            readers=tuple(readers[b]),
            num_bytes=sizes[b] if sizes else 100,
            is_output=b - 1 in returned and b > 0,
        )
        for b in range(len(reads) + 1)
    )
    return ir.SegmentGraph(
        name="test",
        role=ir.Role.INFERENCE,
        segments=segments,
        buffers=buffers,
        inputs=(ir.BufferId(0),),
        outputs=tuple(ir.BufferId(s + 1) for s in returned),
    )


def random_graph(rng: random.Random, num_segments: int) -> ir.SegmentGraph:
    """Return a graph with random readers, sizes, bodies, outputs and a few order-only dependencies."""
    reach = rng.choice((2, 4, num_segments))
    reads = [
        sorted(rng.sample(range(max(0, s - reach), s), min(s, reach, rng.choice((0, 1, 1, 1, 2, 3)))))
        for s in range(num_segments)
    ]
    after = {s: [rng.randrange(s)] for s in range(1, num_segments) if rng.random() < 0.1}
    read = {other for others in reads for other in others}
    outputs = [s for s in range(num_segments) if (s not in read and rng.random() < 0.7) or rng.random() < 0.1]
    return graph(
        *reads,
        after=after,
        outputs=outputs,
        sizes=[rng.randrange(1, 1000) for _ in range(num_segments + 1)],
        bodies=[rng.randrange(num_segments) for _ in range(num_segments)],
    )


def random_lanes(rng: random.Random) -> tuple[ir.Lane, ...]:
    """Return the catalogue of a random device, or random overlapping lanes behind one lane with all units."""
    units = rng.choice((1, 2, 2, 3, 4, 4, 8))
    if units == 1 or rng.random() < 0.5:
        return lane_catalogue(units)
    found = {tuple(range(units)): None}
    for _ in range(rng.randrange(1, 5)):
        found[tuple(sorted(rng.sample(range(units), rng.randrange(1, units))))] = None
    return tuple(ir.Lane(id=ir.LaneId(index), units=chosen) for index, chosen in enumerate(found))


def random_costs(rng: random.Random, graph: ir.SegmentGraph, lanes: Sequence[ir.Lane]) -> ir.CostTable:
    """Return durations that mostly, not always, fall with the number of units."""
    counts = sorted({len(lane.units) for lane in lanes})
    scale = rng.choice((20, 1000, 100_000))

    def modes(segment: ir.Segment) -> tuple[ir.Mode, ...]:
        work, exponent = rng.randrange(1, scale), rng.uniform(-0.1, 1.0)
        memory = sum(graph.buffers[buffer].num_bytes for buffer in segment.outputs)
        durations = {units: max(1, round(work / units**exponent)) for units in counts}
        return tuple(ir.Mode(units=n, duration_ns=ns, memory_bytes=memory) for n, ns in durations.items())

    rows = tuple(modes(segment) for segment in graph.segments)
    return ir.CostTable(modes=rows, handover_ns=rng.choice((0, 1, scale // 20, scale)))


def costs(graph: ir.SegmentGraph, lanes: Sequence[ir.Lane], *rows: Sequence[int], handover_ns: int = 0) -> ir.CostTable:
    """Return a cost table; a row has the durations of one segment, ascending in units. One row serves all segments."""
    counts = sorted({len(lane.units) for lane in lanes})
    modes = (
        tuple(ir.Mode(units=n, duration_ns=ns, memory_bytes=100) for n, ns in zip(counts, row, strict=True))
        for row in (len(graph.segments) * rows if len(rows) == 1 else rows)
    )
    return ir.CostTable(modes=tuple(modes), handover_ns=handover_ns)


def plan(
    graph: ir.SegmentGraph,
    lane_letters: str,
    *,
    lanes: tuple[ir.Lane, ...] | None = None,
    costs: ir.CostTable | None = None,
    order: Sequence[int] | None = None,
) -> ir.Plan:
    """Return the plan that puts segment `s` on lane `lane_letters[s]`, as early as `order` allows (default: by id).

    Without costs every segment takes 10 ns on every lane; without lanes the device has 2 units.
    """
    lanes = lane_catalogue(2) if lanes is None else lanes
    chosen = [LETTERS.index(letter) for letter in lane_letters]
    handover = costs.handover_ns if costs else 0
    done: dict[int, ir.Assignment] = {}
    for segment in range(len(graph.segments)) if order is None else order:
        lane = lanes[chosen[segment]]
        mode = ir.Mode(units=len(lane.units), duration_ns=10, memory_bytes=100)
        if costs:
            mode = next(mode for mode in costs.modes[segment] if mode.units == len(lane.units))
        start = 0
        for other in done.values():
            conflicts = set(lanes[other.lane].units) & set(lane.units)
            if conflicts or other.segment in graph.predecessors(ir.SegmentId(segment)):
                start = max(start, other.end_ns + (handover if other.lane != lane.id else 0))
        done[segment] = ir.Assignment(
            segment=ir.SegmentId(segment),
            lane=lane.id,
            quota=ir.Quota(units=mode.units, memory_bytes=mode.memory_bytes),
            start_ns=start,
            duration_ns=mode.duration_ns,
        )
    serial = sum(row[-1].duration_ns for row in costs.modes) if costs else 10 * len(done)
    makespan = max((a.end_ns for a in done.values()), default=0)
    return ir.Plan(
        origin=ir.Origin.GREEDY,
        lanes=lanes,
        assignments=tuple(done[segment] for segment in range(len(done))),
        makespan_ns=makespan,
        undisturbed_ns=makespan,
        serial_ns=serial,
        lower_bound_ns=0,
    )


def most_at_once(plan: ir.Plan) -> int:
    """Return the largest number of segments that run at once."""
    changes = [(each.start_ns, 1) for each in plan.assignments] + [(each.end_ns, -1) for each in plan.assignments]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def random_plan(rng: random.Random, graph: ir.SegmentGraph, lanes: tuple[ir.Lane, ...], costs: ir.CostTable) -> ir.Plan:
    """Return a legal plan with a random order and random lanes; it may be longer than the serial plan."""
    left, order = list(range(len(graph.segments))), list[int]()
    while left:
        order.append(rng.choice([s for s in left if not set(graph.predecessors(ir.SegmentId(s))) & set(left)]))
        left.remove(order[-1])
    return plan(graph, "".join(rng.choice(LETTERS[: len(lanes)]) for _ in order), lanes=lanes, costs=costs, order=order)


def random_planned(seed: int) -> tuple[ir.SegmentGraph, ir.Plan]:
    """Return a random graph of up to 13 segments, and a random plan of it over random lanes."""
    rng = random.Random(seed)
    made, lanes = random_graph(rng, rng.randrange(1, 14)), random_lanes(rng)
    return made, random_plan(rng, made, lanes, random_costs(rng, made, lanes))


def follow(
    graph: ir.SegmentGraph, plan: ir.Plan, *, owners_release: bool = False
) -> tuple[ir.SyncPlan, ir.MemoryPlan, ir.Program]:
    """Return what follows from a plan, checked; on a GPU, owners of buffers release them."""
    syncs = eliminate_syncs(graph, plan)
    check_syncs(syncs, graph, plan)
    memory = plan_memory(graph, plan, syncs, owners_release=owners_release)
    check_memory(memory, graph, plan, syncs, owners_release=owners_release)
    program = emit_program(graph, plan, syncs, memory)
    check_program(program, graph, plan, syncs, memory)
    return syncs, memory, program


def seeds(always: int, num: int) -> list[Any]:
    """Return `num` seeds as parameters of a test: the first ones for every run, the others for `make soak`."""
    return [*range(always), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(always, num))]


def a_task(*durations: int, before: Sequence[int] = (), **modes: Any) -> Task:
    """Return a task with a mode per duration, on lane 0 and the next ones, that are alike in all else."""
    made = (TaskMode(lane=lane, duration=duration, **modes) for lane, duration in enumerate(durations))
    return Task(modes=tuple(made), predecessors=tuple(before))


def on_halves(tasks: Iterable[Task], **others: Any) -> Problem:
    """Return a problem on a device of two units: lane 0 has both of them, lanes 1 and 2 have one each."""
    lanes = (frozenset({0, 1}), frozenset({0}), frozenset({1}))
    return Problem(tasks=tuple(tasks), lanes=lanes, atom_sizes=(1, 1), **others)


def _atoms_of(lanes: Sequence[ir.Lane]) -> tuple[Sequence[Collection[int]], tuple[int, ...]]:
    """Return the atoms of every lane, and their sizes: units that belong to the same lanes are one atom."""
    owners = [tuple(lane.id for lane in lanes if unit in lane.units) for unit in lanes[0].units]
    atoms = list(dict.fromkeys(owners))
    owned = [frozenset(atom for atom, owner in enumerate(atoms) if lane.id in owner) for lane in lanes]
    return owned, tuple(owners.count(atom) for atom in atoms)


def random_problem(rng: random.Random, num_tasks: int, num_units: int = 2) -> Problem:
    """Return a planning problem on a device of 2 or 4 units with splits in two, or of 16 with the whole catalogue."""
    atoms, sizes = _atoms_of(lane_catalogue(16) if num_units == 16 else lanes_for_two(lane_catalogue(num_units)))
    tasks = []
    for task in range(num_tasks):
        work, exponent, memory_share = rng.randrange(5, 200), rng.uniform(0.0, 1.0), rng.random()
        lanes = [lane for lane in range(len(atoms)) if lane == 0 or rng.random() < 0.9]
        units = {lane: sum(sizes[atom] for atom in atoms[lane]) for lane in lanes}
        modes = tuple(
            TaskMode(lane=lane, duration=max(1, round(work / count**exponent)), memory_share=memory_share)
            for lane, count in units.items()
        )
        predecessors = tuple(sorted(rng.sample(range(task), min(task, rng.choice((0, 1, 1, 2))))))
        tasks.append(Task(modes=modes, predecessors=predecessors))
    handover = rng.choice((0, 0, 3, 20))
    return Problem(tasks=tuple(tasks), lanes=tuple(map(frozenset, atoms)), atom_sizes=sizes, handover=handover)


def limited(rng: random.Random, problem: Problem) -> Problem:
    """Return the problem with a renewable resource, for which the serial schedule just suffices."""
    tasks = tuple(
        replace(task, modes=tuple(replace(mode, demands=(rng.randrange(8),)) for mode in task.modes))
        for task in problem.tasks
    )
    holds = tuple(
        ResourceHold(resource=0, amount=rng.randrange(1, 20), task=task, readers=tuple(readers))
        for task, readers in enumerate(problem.successors())
    )
    roomy = replace(problem, tasks=tasks, holds=holds, capacities=(30 * len(tasks),))
    return replace(roomy, capacities=(roomy.peak(serial_schedule(roomy), 0),))


def interfering(problem: Problem, factor: float = 1.6) -> Problem:
    """Return the problem on a device where two tasks that wait for memory slow each other by `factor`."""
    slowdown = ((1.02, 1 + (factor - 1) / 4), (1 + (factor - 1) / 4, factor))
    return replace(problem, interference=Interference(slowdown=slowdown))


def chains(
    *works: Sequence[float], units: int = 2, efficiency: float = 0.75, handover_ns: int = 0
) -> tuple[ir.SegmentGraph, ir.CostTable, tuple[ir.Lane, ...]]:
    """Return independent chains of layers: durations on one unit, and the parallel efficiency of all units."""
    lanes = lane_catalogue(units)
    reads: list[Sequence[int]] = []
    for work in works:
        first = len(reads)
        reads += [(first + index - 1,) if index else () for index in range(len(work))]
    made = graph(*reads)
    counts = sorted({len(lane.units) for lane in lanes})
    speed = {count: 1 + (count - 1) * (efficiency * units - 1) / max(1, units - 1) for count in counts}
    rows = [[max(1, round(layer / speed[count])) for count in counts] for work in works for layer in work]
    return made, costs(made, lanes, *rows, handover_ns=handover_ns), lanes


# ------------------------------------------------------------------------------- planning problems like real models


class Tower(NamedTuple):
    """A chain of equal transformer layers, cut into `chunks`."""

    chunks: int
    layers: int
    tokens: int
    width: int


class _Network:
    """Collects tasks whose durations follow a roofline with whole waves, in ns, on halves and quarters of a device.

    The device of 132 units has 600 TFLOP/s and 4 TB/s in all, 65 GB/s per unit, and takes 3 us per kernel.
    """

    def __init__(self, units: int) -> None:
        self.units = units
        self.lanes = lanes_for_two(lane_catalogue(units))
        self.tasks: list[Task] = []

    def add(self, flops: float, num_bytes: float, kernels: int, tiles: int, *predecessors: int) -> int:
        modes = []
        for lane in self.lanes:
            units = len(lane.units)
            waves = -(-tiles // units) * units / tiles
            arithmetic = flops / (600e12 / 132 * units) * waves
            memory = num_bytes / min(4e12 * self.units / 132, 65e9 * units)
            duration = max(arithmetic, memory) + 0.3 * min(arithmetic, memory) + 3e-6 * kernels
            share = memory / (arithmetic + memory) if memory else 0.0
            modes.append(TaskMode(lane=lane.id, duration=round(1e9 * duration), memory_share=share))
        self.tasks.append(Task(modes=tuple(modes), predecessors=tuple(sorted({p for p in predecessors if p >= 0}))))
        return len(self.tasks) - 1

    def chunk(self, tower: Tower, scale: int, *predecessors: int) -> int:
        """Add a share of the layers of a tower; `scale` is 1 for each of forward, input and weight gradients."""
        layers = tower.layers / tower.chunks
        flops = scale * layers * 24 * tower.tokens * tower.width**2
        num_bytes = scale * layers * (24 * tower.width**2 + 60 * tower.tokens * tower.width)
        tiles = max(1, round(tower.tokens * tower.width / 128**2))
        return self.add(flops, num_bytes, round(scale * layers * 12), tiles, *predecessors)

    def forward(self, tower: Tower, last: int) -> int:
        """Add the chunks of a tower behind a task; return the last one."""
        for _ in range(tower.chunks):
            last = self.chunk(tower, 1, last)
        return last

    def backward(self, tower: Tower, last: int, *, split: bool) -> int:
        """Add the backward of a tower; `split` makes weight gradients tasks of their own."""
        for _ in range(tower.chunks):
            before = last
            last = self.chunk(tower, 1 if split else 2, before)
            if split:
                self.chunk(tower, 1, before)
        return last

    def problem(self) -> Problem:
        atoms, sizes = _atoms_of(self.lanes)
        lanes = tuple(frozenset(each) for each in atoms)
        return Problem(tasks=tuple(self.tasks), lanes=lanes, atom_sizes=sizes, handover=5_000)


CLIP = ((24, 16 * 257, 1024), (12, 16 * 77, 768))
IMAGEBIND = ((32, 8 * 257, 1280), (24, 8 * 77, 1024), (12, 24 * 229, 768))
"""Layers, tokens and width of the towers."""


def contrastive(towers: Sequence[tuple[int, int, int]], chunks: int, *, split: bool, units: int = 132) -> Problem:
    """Return a training step of towers that meet in one loss; `split` makes weight gradients tasks of their own."""
    made = _Network(units)
    shapes = [Tower(chunks=chunks, layers=layers, tokens=tokens, width=width) for layers, tokens, width in towers]
    loss = made.add(1e9, 1e7, 20, 16, *[made.forward(tower, -1) for tower in shapes])
    for tower in shapes:
        made.backward(tower, loss, split=split)
    return made.problem()


def microbatches(count: int, *, encoder: int, decoder: int, split: bool, units: int = 132) -> Problem:
    """Return a training step of an encoder before a decoder over microbatches; `encoder`, `decoder` are chunks."""
    made = _Network(units)
    eyes = Tower(chunks=encoder, layers=24, tokens=2 * 577, width=1024)
    speech = Tower(chunks=decoder, layers=16, tokens=2048, width=2048)
    for _ in range(count):
        loss = made.add(1e12, 1e9, 6, 512, made.forward(speech, made.forward(eyes, -1)))
        made.backward(eyes, made.backward(speech, loss, split=split), split=split)
    return made.problem()


def realistic_problems(units: int = 132) -> dict[str, Problem]:
    """Return problems from 13 to 490 tasks, by name."""
    found = {}
    for name, towers in (("clip", CLIP), ("imagebind", IMAGEBIND)):
        for chunks, split in ((3, False), (4, False), (6, True), (12, True), (18, True)):
            found[f"{name} {chunks}{' split' if split else ''}"] = contrastive(towers, chunks, split=split, units=units)
    together, apart = ((4, 2, 3), (6, 3, 3), (8, 2, 4)), ((4, 2, 4), (8, 3, 4), (12, 5, 8))
    for count, encoder, decoder in (*together, *apart):
        split = (count, encoder, decoder) in apart
        name = f"microbatches {count} x {encoder}+{decoder}{' split' if split else ''}"
        found[name] = microbatches(count, encoder=encoder, decoder=decoder, split=split, units=units)
    return found


def in_threads(work: Callable[[int], object], count: int) -> None:
    """Run it in so many threads at once, each with its number, and wait for them."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
