"""Measure variants of one model against each other.

    (MeasuredTask, variants) -> Measurement

    task.py      the measured task, and its variants
    turns.py     the parent: starts a process per variant and gives them turns
    child.py     the process of one variant
    numbers.py   speed-ups from step times, differences from gradients
    render.py    a measurement as a table
    facts.py     machine, versions and commit

Every variant has its own process, since allocator settings, OpenMP teams and pinned threads are per process. One
process runs at a time, in alternating order (ABCD, DCBA, ...), so that drift of the machine affects all variants alike;
see Note [idle children] in `turns.py` for the other processes.

    turn     one untimed step, which warms the caches, then `steps_per_turn` timed steps
    round    one turn of every variant; the bootstrap resamples rounds, because steps of one turn are correlated
    step     forward, loss and backward (train), or forward without gradients (inference), timed inside the child from
             the call to its return; gradients are set to None between steps, outside the timing

Before its first turn a child builds the task, takes one cold step (compile included), and saves loss and gradients of
that step. The parent compares them with the reference, which is eager if it is among the variants.
"""
