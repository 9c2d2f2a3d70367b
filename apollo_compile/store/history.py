"""What earlier processes found out about a graph, so that the next one begins where they ended.

    History(directory).recall(key) -> Finding | None;    keep(key, finding);    key_of(..., circumstances(...)) -> key

A training run that is started again plans the same graphs, measures the same bodies and holds the same contest. Its
finding per graph is a file: the plan, the measured durations that the plan was made from, and which way won. A plan
that comes from there is not planned again, and a way that won runs from the first step on; the others are not even
compiled.

A key holds what shaped a finding: the graph, the machine, how its cores lie to each other, the profile, the options,
Inductor's settings, the versions of torch and of this package. A finding is forgotten after `MAX_AGE_S`, because a
machine changes in ways that no key shows, and the `MAX_FILES` youngest are kept. Files are data; one that cannot be
read, or whose plan is not legal for the graph, is as if it were not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from apollo_compile import __version__
from apollo_compile.config import Config
from apollo_compile.device.profile import DeviceProfile, format_profile, machine_fingerprint
from apollo_compile.ir import Capture, Observations, Partition, Plan, Variant, Verdict
from apollo_compile.json_form import from_json, read_file, to_json, write_file

_logger = logging.getLogger(__name__)

MAX_AGE_S = 7 * 24 * 3600
MAX_FILES = 512
_FORMAT = 2
"""Raised when findings of before would be misunderstood: what `way` says without a verdict, for one."""
_GENERATION = ".generation"
_MAX_BYTES = 64 * 2**20
"""A plan of 10,000 segments takes about 2 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is known about one graph."""

    observations: Observations
    """What the plan was made from."""
    plan: Plan
    way: Variant
    """How it ran when its model's contest was over."""
    verdict: Verdict | None
    """Of that contest; None if there was nothing to contend about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    format: int
    made_at: float
    """Seconds since the epoch."""
    finding: Finding


class History:
    """Findings in a directory, which need not exist yet."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def recall(self, key: str) -> Finding | None:
        """Return what was found, unless that is too long ago."""
        path = self._path(key)
        try:
            file = from_json(_File, read_file(path, max_bytes=_MAX_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _logger.info("what an earlier run found out is not used, and found out anew: %s: %s", path, error)
            return None
        is_fresh = file.format == _FORMAT and 0 <= time.time() - file.made_at <= MAX_AGE_S
        return file.finding if is_fresh else None

    def keep(self, key: str, finding: Finding) -> None:
        """Write a finding; where that is impossible, the next process finds it out again."""
        content = _File(format=_FORMAT, made_at=time.time(), finding=finding)
        try:
            write_file(self._path(key), json.dumps(to_json(content)) + "\n")
            self._forget_oldest()
        except OSError as error:
            _logger.info("what was found out about a graph is not kept: %s", error)

    def generation(self, name: str) -> int:
        """Return the number of the bundles of that name that are right: see `bundle.py`."""
        try:
            number = read_file(self._directory / f"{name}{_GENERATION}", max_bytes=32)
        except (OSError, ValueError):
            return 0
        return number if isinstance(number, int) else 0

    def begin_generation(self, name: str) -> None:
        """Let bundles of that name be made anew by the next process that wants them."""
        try:
            write_file(self._directory / f"{name}{_GENERATION}", str(self.generation(name) + 1))
        except OSError as error:
            _logger.info("graphs that AOTAutograd's cache has are compiled anew every time: %s", error)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.json"

    def _forget_oldest(self) -> None:
        ages = []
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process forgets too
                ages.append((path.stat().st_mtime, path))
        left_behind = [path for age, path in ages if path.suffix == ".tmp" and time.time() - age > MAX_AGE_S]
        findings = sorted((age, path) for age, path in ages if path.suffix in (".json", _GENERATION))
        for path in [*left_behind, *(path for _, path in findings[:-MAX_FILES])]:
            path.unlink(missing_ok=True)


def circumstances(*, profile: DeviceProfile, config: Config, machine: Sequence[object], compiler: str) -> str:
    """Return what shapes findings besides a graph, as a text that is the same for the same ones.

    `machine` is what of the machine shapes them besides the profile, in terms of JSON, and `compiler` is Inductor's
    settings as a text.
    """
    parts = [
        __version__,
        to_json(machine_fingerprint(profile.units)),
        machine,
        compiler,
        format_profile(profile),
        [repr(asdict(options)) for options in (config.partition, config.plan, config.runtime)],
    ]
    return json.dumps(parts)


def key_of(capture: Capture, partition: Partition, around: str) -> str:
    """Return the name of a graph's finding; `around` are its circumstances."""
    graph = partition.graph
    parts = [
        around,
        capture.role,
        [repr(node) for node in capture.nodes],
        [repr(segment) for segment in graph.segments],
        [repr(buffer) for buffer in graph.buffers],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
