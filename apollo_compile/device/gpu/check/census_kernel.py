"""A kernel that records where it runs: each block stores its SM and spins, so that blocks spread over all SMs.

Imported only where there is a GPU: Triton reads the source of this file and compiles it for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer, smid

COLUMNS = 3
"""SM, start and end in nanoseconds of the device's clock."""

BLOCKS_PER_SM = 16
"""More than one, so that every SM gets a block even if others are busy."""


@triton.jit
def _note_and_spin(out, spin_ns):  # type: ignore[no-untyped-def]
    place = out + tl.program_id(0) * 3
    start = globaltimer()
    now = start
    while now - start < spin_ns:
        now = globaltimer()
    tl.store(place, smid().to(tl.int64))
    tl.store(place + 1, start)
    tl.store(place + 2, now)


def launch_census(out: torch.Tensor, spin_ns: int) -> None:
    """Fill `out`, of shape (blocks, COLUMNS) and int64, on torch's current stream."""
    _note_and_spin[(out.shape[0],)](out, spin_ns, num_warps=1)
