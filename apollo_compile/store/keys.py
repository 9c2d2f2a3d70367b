"""Under which keys things are kept: a key holds all that shaped what it stands for, and nothing else.

    circumstances(...)                              what shapes findings and bundles besides the graph
    finding_key(capture, partition, around)         of what was found out about a graph
    bundle_key(around, paths)                       of what AOTAutograd's cache keeps of a Dynamo graph
    digest(parts)                                   a text of fixed length for any of it

Findings are for the same graph, machine, topology of its cores, profile, options, settings of Inductor, and versions of
torch and of this package. Bundles hold objects of this package, so they are for the same code of it too.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import apollo_compile
from apollo_compile.config import Config
from apollo_compile.device.fingerprint import Fingerprint
from apollo_compile.device.profile import DeviceProfile
from apollo_compile.ir import Capture, Partition
from apollo_compile.json_form import to_json
from apollo_compile.store.profiles import format_profile


def circumstances(
    *, fingerprint: Fingerprint, profile: DeviceProfile, config: Config, machine: Sequence[object], compiler: str
) -> str:
    """Return what shapes findings and bundles besides a graph, as a text that is the same for the same ones.

    Arguments:
        fingerprint: of the machine.
        profile: what plans count on.
        config: of the compile; where things are kept, and what is logged, shapes nothing.
        machine: what else of the machine shapes them, in terms of JSON.
        compiler: Inductor's settings as a text.
    """
    parts = [
        apollo_compile.__version__,
        to_json(fingerprint),
        machine,
        compiler,
        format_profile(profile),
        [repr(asdict(options)) for options in (config.partition, config.plan, config.runtime)],
    ]
    return json.dumps(parts)


def finding_key(capture: Capture, partition: Partition, around: str) -> str:
    """Return the key of a graph's finding; `around` are its circumstances."""
    graph = partition.graph
    return digest(
        [
            around,
            capture.role,
            [repr(node) for node in capture.nodes],
            [repr(segment) for segment in graph.segments],
            [repr(buffer) for buffer in graph.buffers],
        ]
    )


def bundle_key(around: str, paths: str) -> str:
    """Return what shapes the bundles of a Dynamo graph besides what AOTAutograd knows.

    Arguments:
        around: its circumstances.
        paths: which modules its nodes come from; segments are cut and named after them.
    """
    return digest([_own_code(), around, paths])


def digest(parts: object) -> str:
    """Return a hash of something in terms of JSON, as 64 letters and digits."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@functools.cache
def _own_code() -> str:
    """Return a digest of this package: bundles hold its objects, and are for no other version."""
    code = hashlib.sha256()
    root = Path(apollo_compile.__file__).parent
    for path in sorted([*root.rglob("*.py"), *root.glob("_native*")]):
        code.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return code.hexdigest()
