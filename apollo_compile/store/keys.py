"""Keys of findings and bundles: a key contains everything that its value depends on, and nothing else.

    circumstances(...)                              dependencies of findings and bundles besides the graph
    finding_key(capture, partition, circumstances)  key of a graph's finding
    bundle_key(circumstances, paths)                key of a Dynamo graph's bundles in AOTAutograd's cache
    digest(parts)                                   hash of a JSON value

Findings are reused for the same graph, machine, core topology, profile, options, Inductor settings, and versions of
torch and of this package. Bundles contain objects of this package, so they are also bound to its exact code.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from apollo_compile.config import Config
from apollo_compile.ir import Capture, Partition
from apollo_compile.store.profiles import format_profile
from apollo_compile.target.profile import DeviceProfile
from apollo_compile.version import __version__


def circumstances(*, profile: DeviceProfile, config: Config, machine: Sequence[object], compiler: str) -> str:
    """Return the dependencies of findings and bundles besides the graph, as a canonical text.

    Arguments:
        profile: profile that plans are made for.
        config: options of the compile, of which cache locations and logging are ignored.
        machine: relevant properties of the machine, as JSON values.
        compiler: Inductor's settings as text.
    """
    parts = [
        __version__,
        *machine,
        compiler,
        format_profile(profile),
        [repr(asdict(options)) for options in (config.partition, config.plan, config.runtime)],
    ]
    return json.dumps(parts)


def finding_key(capture: Capture, partition: Partition, circumstances: str) -> str:
    """Return the key of a graph's finding under these `circumstances`."""
    graph = partition.graph
    return digest(
        [
            circumstances,
            capture.role,
            [repr(node) for node in capture.nodes],
            [repr(segment) for segment in graph.segments],
            [repr(buffer) for buffer in graph.buffers],
        ]
    )


def bundle_key(circumstances: str, paths: str) -> str:
    """Return the part of a bundle's key that AOTAutograd does not add itself.

    Arguments:
        circumstances: see `circumstances`.
        paths: modules that its nodes come from, which determine the segments and their names.
    """
    return digest([_own_code(), circumstances, paths])


def digest(parts: object) -> str:
    """Return a hash of a JSON value, as 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@functools.cache
def _own_code() -> str:
    """Return a digest of this package's code: bundles contain its objects."""
    code = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted([*root.rglob("*.py"), *root.glob("_native*")]):
        code.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return code.hexdigest()
