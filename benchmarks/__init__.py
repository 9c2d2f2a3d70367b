"""Workloads, measurements and the demo; the harness itself is `apollo_compile.tools.bench`."""
