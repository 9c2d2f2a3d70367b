"""Load a program, launch it on lanes, capture it as a CUDA graph, and replay that.

    gpu.py            the one interface to torch.cuda and to the driver; tests replace it by a recording fake
    execute.py        Program + bodies -> CudaExecutable: launched on lanes at first, replayed afterwards
    launch.py         launches a program from the host: one order over all lanes, forks, joins, waits
    capturer.py       makes a CUDA graph of a program
    captured.py       a CUDA graph with the addresses that it uses, and the copies around each replay
    captures.py       the CUDA graphs of one program, by addresses of its inputs
    in_place.py       the inputs of a program that a capture uses in place
    copies.py         copies of tensors that keep their layouts, and the memory that they share
    torch_capture.py  captures with torch's own class, and cleans up after a capture that failed
    memory.py         the memory that the CUDA graphs of a model share
    live_captures.py  the CUDA graphs of a device that are alive
    measure.py        times every body on every quota

Note [who owns a buffer]: torch's allocator reuses the memory of a freed tensor at once, in host order, for later
allocations on the stream that was current when the tensor was allocated. So a buffer may be freed only after the lane
that made it has waited for all readers; `plan_memory(owners_release=True)` and the joins ensure that, and nothing here
calls `record_stream`, which would keep all buffers until the end of a capture. The caller frees outputs between runs,
and every run begins with all lanes waiting for the caller's stream: so outputs must be used on that stream only, or be
synchronized like any tensor of another stream.
"""
