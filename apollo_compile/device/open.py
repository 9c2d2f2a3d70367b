"""Open the device that a Dynamo graph is on.

open_target(example_inputs, config) -> Target, and why a graph on a GPU has no lanes
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from apollo_compile.config import Config
from apollo_compile.device.cpu.discover import discover_profile
from apollo_compile.device.cpu.execute import available_units, core_share, most_units
from apollo_compile.device.cpu.target import CpuTarget
from apollo_compile.errors import ConfigError, CudaError
from apollo_compile.store.profiles import load_profile, packaged_profile, packaged_profiles
from apollo_compile.target.profile import DeviceProfile, limit_units
from apollo_compile.target.target import Target

if TYPE_CHECKING:
    from apollo_compile.device.gpu.run.gpu import TorchGpu

_logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


def open_target(example_inputs: Sequence[Any], config: Config) -> tuple[Target, str | None]:
    """Return the target of a Dynamo graph, and why it falls back.

    The target is the GPU of its tensors, unless `device.cuda_lanes` is off or the driver cannot make lanes; else the
    CPU. The reason is None for a graph that lanes of the target may take.

    Raises:
        ConfigError: the configured profile or number of units cannot be used here.
    """
    _log_share()
    tensors = [item for item in example_inputs if isinstance(item, torch.Tensor)]
    if config.device.units is None and all(tensor.device == _CPU for tensor in tensors):
        _warn_without_lanes()
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    if device is None or config.device.cuda_lanes is False:
        return CpuTarget(select_profile(config), config), reason_without_lanes(example_inputs, _CPU)
    opened = _open_gpu(device, config)
    if isinstance(opened, str):
        return CpuTarget(select_profile(config), config), opened
    return opened, reason_without_lanes(example_inputs, opened.device)


def _open_gpu(device: torch.device, config: Config) -> Target | str:
    """Return the target of a GPU, or why it has no lanes."""
    from apollo_compile.device.gpu.check.self_check import unavailable_reason
    from apollo_compile.device.gpu.fingerprint import gpu_fingerprint  # on a CPU, nothing of this is imported
    from apollo_compile.device.gpu.run.gpu import TorchGpu
    from apollo_compile.device.gpu.target import GpuTarget

    try:
        gpu = TorchGpu(device.index)
    except CudaError as error:
        if config.debug.strict:
            raise
        return f"no lanes on {device}: {error}"
    if gpu.captures.why_off is not None:
        return f"no lanes on {device}: {gpu.captures.why_off}"
    native = gpu.native
    fingerprint = gpu_fingerprint(native.name, cuda=native.driver_version, units=native.num_sms)
    profile = _gpu_profile(gpu, config)
    assert config.device.cache is not None, "load_config fills it in"
    find_reason = functools.partial(unavailable_reason, gpu, config.device.cache)
    return GpuTarget(
        gpu, profile, config, device=gpu.device, fingerprint=fingerprint, find_unavailable_reason=find_reason
    )


def reason_without_lanes(example_inputs: Sequence[Any], device: torch.device) -> str | None:
    """Return why a graph with these inputs cannot run on lanes of `device`; None if it may."""
    elsewhere = {item.device for item in example_inputs if isinstance(item, torch.Tensor)} - {device, _CPU}
    if not elsewhere:
        return None
    where = ", ".join(sorted(map(str, elsewhere)))
    if device != _CPU:
        return f"it has tensors on {where}, and all lanes of this graph are on {device}"
    why = ", since option 'device.cuda_lanes' is off" if all(item.type == "cuda" for item in elsewhere) else ""
    return f"it has tensors on {where}, and lanes run on the CPU only{why}"


def select_profile(config: Config) -> DeviceProfile:
    """Return the profile that graphs are planned for.

    Raises:
        ConfigError: the configured profile or number of units cannot be used here.
    """
    units = available_units() if config.device.units is None else config.device.units
    if units > (most := most_units()):
        raise ConfigError(f"option 'device.units' is {units}; lanes may use {most} cores here: choose 1 to {most}")
    if config.device.profile is not None:
        profile, num_cores = load_profile(config.device.profile), os.cpu_count() or 1
        if profile.kind != "cpu":
            raise ConfigError(
                f"device profile {config.device.profile} is for a {profile.kind} device; only graphs on a CPU are "
                "planned: name the profile of a CPU"
            )
        if str(config.device.profile) in packaged_profiles():
            profile = limit_units(profile, units)  # valid for any number of cores
        elif profile.units > units and (profile.units <= num_cores or config.device.units or core_share().size > 1):
            _logger.info("device profile %s is for %d cores; lanes use %d", config.device.profile, profile.units, units)
            profile = limit_units(profile, units)  # it was measured with more cores than this process may use
        if profile.units > most:
            raise ConfigError(
                f"device profile {config.device.profile} is for {profile.units} cores, and this machine has "
                f"{num_cores}: measure one here, or set option 'device.units'"
            )
        return profile
    return discover_profile(units, cache_dir=config.device.cache)


def _gpu_profile(gpu: TorchGpu, config: Config) -> DeviceProfile:
    """Return the profile with this GPU's numbers of SMs and atoms; by default, rates are those of an H200's data sheet.

    They serve the first plan only: bodies are timed in the second call.
    """
    native = gpu.native
    profile = packaged_profile("h200") if config.device.profile is None else load_profile(config.device.profile)
    if profile.kind != "cuda":
        raise ConfigError(
            f"device profile {config.device.profile} is for a {profile.kind} device; this graph is on {gpu.device}: "
            "name the profile of a GPU, or none"
        )
    return replace(profile, units=native.num_sms, atoms=tuple(native.atom_sizes))


@functools.cache
def _log_share() -> None:
    """Log once which cores belong to this rank, if there are other local ranks."""
    share, units = core_share(), available_units()
    if share.size == 1:
        return
    own = ",".join(map(str, share.own))
    if units < len(share.own):
        own += f", of which torch has threads for {units} only (OMP_NUM_THREADS is 1 by default under torchrun)"
    _logger.info("local rank %d of %d: its lanes use cores %s", share.rank, share.size, own)


def _warn_without_lanes() -> None:
    """Warn if the launcher gave every rank several cores but only one torch thread."""
    share = core_share()
    if share.size > 1 and share.rank == 0 and len(share.own) > 1 and torch.get_num_threads() == 1:
        _warn_of_one_thread(share.size, len(share.own))


@functools.cache
def _warn_of_one_thread(num_ranks: int, num_cores: int) -> None:
    """Warn once per process."""
    _logger.warning(
        "there are no lanes on %d local ranks, so nothing overlaps: each has %d cores, and torch has 1 thread "
        "(torchrun sets OMP_NUM_THREADS=1); start torchrun with OMP_NUM_THREADS=%d, or call "
        "torch.set_num_threads(%d) before the model is compiled",
        num_ranks,
        num_cores,
        num_cores,
        num_cores,
    )
