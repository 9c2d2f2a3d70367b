"""Every check and benchmark that needs a GPU, in one command of ten minutes.

    python -m benchmarks.gpu_suite --json gpu.json

    __main__.py   the command: stages in order, each with its time, and the JSON file after each of them
    plan.py       which stage comes when, and what goes on at the same time
    stages.py     how stages share the time
    device.py     the GPU itself, and the process that is asked about it
    checks.py     the checks of `gpu_checks.py` and `gpu_training_checks.py`, whenever there is time for some
    variants.py   what is measured, and the child process of one variant
    race.py       variants of one workload: compiled at the same time, measured in turns
    targets.py    what is wanted of the figures, and whether it was met
    tables.py     the short table that comes last
    dry.py        a dry run: what may not be missing in it

Everything that touches the device is in a process of its own, with a time limit: one that crashes or hangs costs itself
alone. With `--device cpu` all stages run with tiny models on a CPU, which tells that the suite works, and nothing else.
"""
