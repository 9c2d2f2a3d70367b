"""Legality checks, one per product; each raises `InvariantError` if the product is not legal.

    check_x(product, products that it was made from) -> None

A check uses another algorithm than the stage: the stages use vector clocks, the checks use sets of predecessors; the
last check executes the program symbolically. A failed check is a defect of this package, not of the user's model, so
the message names the product, the expected and the found value and the place, and asks for a report.

graph.py    stages 0 and 1: captures and partitions
plan.py     stages 2 and 3: costs and plans
program.py  stages 4, 5 and 6: waits, memory plans and programs
order.py    order relations in graphs, plans and sync plans
failure.py  the error that checks raise
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
