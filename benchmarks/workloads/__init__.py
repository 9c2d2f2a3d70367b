"""Workloads of benchmarks: models with inputs and a loss, by name; stored graphs and synthetic ones for the planner."""

from benchmarks.workloads.build import SIZES, TwoTower, Workload, assemble, build, build_spec, weigh_outputs

__all__ = ["SIZES", "TwoTower", "Workload", "assemble", "build", "build_spec", "weigh_outputs"]
