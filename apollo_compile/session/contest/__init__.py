"""torch.compile's code against ours, where calls do not wait for the device: what was faster in the loop runs.

What follows is in the order of use.

    default.py      may a Dynamo graph be contested?
    challenge.py    what Dynamo calls: the side of the current step
    challenger.py   our sides: all graphs of a Dynamo graph, as one program each, and in segments
    rival_graph.py  one of these graphs
    promises.py     what is worth comparing, by dependencies and times
    sizes.py        sizes that change: which of them are replayed
    turns.py        which side runs in which step, until it is decided what stays
"""
