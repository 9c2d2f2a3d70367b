"""The entry for `device/open.py` to the interface to the GPU."""

from apollo_compile.device.gpu.run.gpu import TorchGpu

__all__ = ["TorchGpu"]
