"""Values of a cluster: its nodes, jobs with the gangs that they may run on, and a plan.

A gang is a number of devices of one kind that a job gets and returns as a whole, and what a step takes there: a Cell of
`apollo estimate`, without its details. Times are seconds from the start of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Equal nodes of a cluster."""

    kind: str
    count: int
    devices: int
    """Devices of a node."""
    gpu: bool = False
    """Whether Ray and Slurm count the devices as GPUs; else they are a resource with the name of the kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes by kind of device; all nodes of one kind are equal."""

    nodes: tuple[Nodes, ...]
    restart_s: float = 0.0
    """Time that a job loses when it goes on after an interruption."""

    def of_kind(self, kind: str) -> Nodes | None:
        """Return the nodes of a kind."""
        return next((nodes for nodes in self.nodes if nodes.kind == kind), None)

    @property
    def num_devices(self) -> int:
        """Devices of all kinds."""
        return sum(nodes.count * nodes.devices for nodes in self.nodes)

    def fits(self, gang: Gang) -> bool:
        """Return whether a gang fits the empty cluster: into one node, or over whole nodes and the rest of one."""
        nodes = self.of_kind(gang.kind)
        return nodes is not None and 1 <= gang.devices <= nodes.count * nodes.devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Gang:
    """Devices that a job may run on, and what a step takes there."""

    kind: str
    devices: int
    step_s: float
    data: int = 0
    """Replicas; 0 if unknown."""
    tensor: int = 0
    stages: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Training for some steps."""

    name: str
    steps: int
    gangs: tuple[Gang, ...]
    arrival_s: float = 0.0
    devices: int = 0
    """Devices that the user asked for, where a policy does not choose; 0 is the smallest gang."""
    samples: float = 1.0
    """Samples of a step, for throughput."""
    command: tuple[str, ...] = ()
    """Arguments of torchrun: a script and its arguments."""

    def seconds(self, gang: Gang) -> float:
        """Return the duration of the job on a gang."""
        return self.steps * gang.step_s

    def asked(self) -> tuple[Gang, ...]:
        """Return the gangs with the number of devices that the user asked for, the fastest first."""
        wanted = self.devices or min(gang.devices for gang in self.gangs)
        return tuple(sorted((g for g in self.gangs if g.devices == wanted), key=lambda gang: gang.step_s))


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlacement:
    """An interval of a job on its devices."""

    job: str
    gang: Gang
    nodes: tuple[tuple[int, int], ...]
    """Index of a node among those of the kind, and devices on it."""
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSchedule:
    """Jobs as a policy ran them."""

    policy: str
    placements: tuple[JobPlacement, ...]
    """Runs, by start; a job that was interrupted has several."""
    completion_s: tuple[float, ...]
    """From arrival to end, by job."""
    end_s: tuple[float, ...]
    samples: float
    """Samples of all jobs."""
    device_s: float
    """Devices of the cluster times its makespan."""

    @property
    def makespan_s(self) -> float:
        """End of the last job."""
        return max(self.end_s, default=0.0)

    @property
    def mean_completion_s(self) -> float:
        """Mean time from arrival to end."""
        return sum(self.completion_s) / len(self.completion_s) if self.completion_s else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples of all jobs per second of the makespan."""
        return self.samples / self.makespan_s if self.completion_s else 0.0

    @property
    def busy_share(self) -> float:
        """Share of the devices' time that was given to jobs."""
        busy = sum((each.end_s - each.start_s) * each.gang.devices for each in self.placements)
        return busy / self.device_s if self.device_s else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPlan:
    """Plan of jobs: where and when each runs, uninterrupted."""

    objective: str
    cluster: Cluster
    jobs: tuple[Job, ...]
    placements: tuple[JobPlacement, ...]
    """One per job, by start."""
    value_s: float
    """Makespan or mean completion time."""
    bound_s: float
    """No plan has a smaller value."""
    makespan_s: float
    mean_completion_s: float
    samples_per_s: float

    @property
    def gap(self) -> float:
        """Relative distance of the value from the bound."""
        return self.value_s / self.bound_s - 1 if self.bound_s else 0.0
