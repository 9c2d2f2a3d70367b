"""Is a product legal? One check per product; each raises `InvariantError` if not.

    check_x(product, what it was made from) -> None

A check recomputes what it needs by other means than the stage: the stages use vector clocks, the checks use sets of
predecessors; the last check executes the program symbolically. A failed check is a defect of ours, never the user's, so
the message says which product, what was expected and found, where, and that it should be reported.

graph.py    stages 0 and 1: captures and partitions
plan.py     stages 2 and 3: costs and plans
program.py  stages 4, 5 and 6: waits, memory plans and programs
order.py    what comes before what
failure.py  the error of a check
"""

from apollo_compile.ir.check.graph import check_capture, check_partition
from apollo_compile.ir.check.plan import check_costs, check_plan
from apollo_compile.ir.check.program import check_memory, check_program, check_syncs

__all__ = [
    "check_capture",
    "check_costs",
    "check_memory",
    "check_partition",
    "check_plan",
    "check_program",
    "check_syncs",
]
