"""Small kernels on lanes of GPU 0, as this process's environment sets the device up; see T3 of `gpu_checks.py`.

    python -m benchmarks.harness.gpu_pace 2 4 8

The last line is a JSON object: nanoseconds of a replay on so many lanes, and on plain streams.
"""

from __future__ import annotations

import json
import sys

from apollo_compile.device.gpu.run.gpu import TorchGpu
from benchmarks.harness.gpu_lanes import time_small_kernels

if __name__ == "__main__":
    print(json.dumps(time_small_kernels(TorchGpu(0), [int(count) for count in sys.argv[1:]])))
