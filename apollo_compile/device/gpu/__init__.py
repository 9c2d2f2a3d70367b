"""Lanes on a GPU: streams that use some of its SMs, and CUDA graphs that replay what was launched on them.

    gpu.py       the one interface to torch.cuda and to the driver; tests put a recording stand-in behind it
    launch.py    a program as the host launches it: one order over all lanes, forks, joins, waits
    execute.py   Program + bodies -> CudaExecutable: lanes at first, one CUDA graph afterwards
    whole.py     a graph as Inductor compiles it, run the same way
    measure.py   how long every body takes on every quota
    urgency.py   which lanes go first where they share SMs
    calibrate.py what lanes of every size achieve -> DeviceProfile
    discover.py  the profile of a GPU: measured, or what a data sheet says of another one
    quota.py     bytes that every lane took, against what it may take
    census_kernel.py  the kernel that tells on which SM it runs
    examine.py   what this GPU, driver and torch can do, shown by running it

The native side (runtime/, `cuda_lane.h`) opens the driver, splits the device once and makes the streams.

Note [who owns a buffer]: torch's allocator gives the memory of a freed tensor to later allocations on the stream that
was current when it was allocated, at once and in the order of the host. So a buffer may be freed only when the lane
that made it has waited for all readers; `plan_memory(owners_release=True)` and the joins see to that, and nothing here
calls `record_stream`, which would keep all of it until the end of a capture. What a run returns is freed by the caller
between runs, and every run begins with all lanes waiting for the caller's stream: so it has to be used on that stream
only, or like any tensor of another stream.
"""
