"""Lanes on a GPU: streams that use some of its SMs, and CUDA graphs that replay what was launched on them.

    gpu.py       the one interface to torch.cuda and to the driver; tests replace it by a recording fake
    launch.py    launches a program from the host: one order over all lanes, forks, joins, waits
    execute.py   Program + bodies -> CudaExecutable: lanes at first, one CUDA graph afterwards
    capturer.py  makes a CUDA graph of a program: what is used in place, copied, lent and saved
    captures.py  the CUDA graphs of one program, by addresses of its inputs
    in_place.py  the inputs of a program that a capture uses in place
    captured.py  a captured CUDA graph: addresses that it uses, and copies around each replay
    copies.py    copies of tensors that keep their layouts, and what they share
    torch_capture.py  captures with torch's own class; what to do if that fails
    memory.py    CUDA graphs that are alive: those of a model, and those of a device
    whole.py     a whole graph of Inductor as a program of one segment
    measure.py   times every body on every quota
    urgency.py   priorities of lanes that share SMs
    fingerprint.py  names a GPU, its driver and torch
    quota.py     checks the bytes of every lane against its quota
    ledger.py    where the memory of a CUDA graph goes
    census_kernel.py  a kernel that records on which SMs it runs
    examine.py   checks by experiment what this GPU, driver and torch can do for lanes

The native side (runtime/, `cuda_lane.h`) opens the driver, splits the device once and creates the streams.

Note [who owns a buffer]: torch's allocator reuses the memory of a freed tensor at once, in host order, for later
allocations on the stream that was current when the tensor was allocated. So a buffer may be freed only after the lane
that made it has waited for all readers; `plan_memory(owners_release=True)` and the joins ensure that, and nothing here
calls `record_stream`, which would keep all buffers until the end of a capture. The caller frees outputs between runs,
and every run begins with all lanes waiting for the caller's stream: so outputs must be used on that stream only, or be
synchronized like any tensor of another stream.
"""
