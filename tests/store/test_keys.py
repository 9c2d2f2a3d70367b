"""A key is the same for the same things, and another one for anything that would be another result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from apollo_compile.config import Config, load_config
from apollo_compile.ir import Capture
from apollo_compile.passes.partition import partition_graph
from apollo_compile.store.keys import bundle_key, circumstances, finding_key
from apollo_compile.store.profiles import default_profile
from apollo_compile.target.profile import DeviceProfile
from tests.ir.check.test_graph import capture, with_node

CAPTURE, PROFILE = capture(), default_profile(4)


def test_a_key_holds_all_that_shapes_a_finding() -> None:
    """Graph, role, machine, profile, options, topology of the cores, and threads."""
    config = load_config()

    def key(
        capture: Capture = CAPTURE,
        config: Config = config,
        profile: DeviceProfile = PROFILE,
        machine: Sequence[object] = (((0, 0), (1, 0)), 4),
        compiler: str = "",
    ) -> str:
        partition = partition_graph(capture, config=config.partition)
        around = circumstances(profile=profile, config=config, machine=machine, compiler=compiler)
        return finding_key(capture, partition, around)

    keys = [
        key(),
        key(capture=with_node(3, target="aten.bmm", signature="bmm")),
        key(profile=replace(PROFILE, handover_ns=PROFILE.handover_ns + 1)),
        key(profile=default_profile(3)),
        key(config=load_config({"partition.granularity": "module"})),
        key(config=load_config({"plan.min_gain": 0.5})),
        key(config=load_config({"runtime.bodies": "python"})),
        key(machine=(((0, 0), (0, 0)), 4)),
        key(machine=(((0, 0), (1, 0)), 3)),
        key(compiler="freezing"),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]
    assert key(config=load_config({"debug.log": "INFO"})) == keys[0]
    assert key(capture=replace(CAPTURE, name="another")) == keys[0]


def test_a_key_of_bundles_holds_circumstances_and_paths() -> None:
    """AOTAutograd knows the rest; no part can stand for another one."""
    keys = {bundle_key(*both) for both in (("a", "b"), ("a", "c"), ("c", "b"), ("a b", ""), ("", "a b"))}
    assert len(keys) == 5
    assert bundle_key("a", "b") == bundle_key("a", "b")
