"""Would Inductor's C++ template compute the matrix products of a training step faster than BLAS and oneDNN?

    python -m benchmarks.gemm_template --workloads two_tower,clip,flava --batch 4 --cores 1,2 --json out.json

Inductor offers the template for a right matrix that is a constant. Of batched products it also takes inputs, and packs
them in every call where they do not lie by rows; so each product goes to it as a batch of one, in a native body that
adds the bias in the template's epilogue. The three take turns on matrices that are not in the caches of a core. On one
core it is the processor's time that counts, which neighbours disturb less. To oneDNN and the template, which want the
left matrix by rows, the time is added that it takes to write a transposed one that way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from tabulate import tabulate
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from apollo_compile.device.cpu.machine import cpu_description
from apollo_compile.device.cpu.matmul_libraries import LEAST_FLOPS
from apollo_compile.tools.bench.facts import machine_facts
from apollo_compile.torch_bridge.bodies import compile_bodies
from apollo_compile.torch_bridge.frontend import compile_with_inductor
from apollo_compile.torch_bridge.interpret import interpret_whole
from apollo_compile.torch_bridge.onednn import Matmul, find_matmuls, onednn_linear
from benchmarks.run import batch_sizes, workloads
from benchmarks.workloads import build

FAR_BYTES = 8 * 2**20
"""More than the caches of one core hold."""

MEASURE_S = 0.3
LEAST_SAMPLES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Median times of one product on so many cores, all matrices written as they are wanted."""

    product: str
    cores: int
    flops: int
    blas_ns: float
    onednn_ns: float
    template_ns: float

    @property
    def gain(self) -> float:
        """How many times as fast the template is as the better library."""
        return min(self.blas_ns, self.onednn_ns) / self.template_ns


def main(arguments: list[str] | None = None) -> int:
    """Measure all products that bodies may give to a library, print a table."""
    args = _parse(arguments)
    products = dict.fromkeys(
        product
        for name, batch in itertools.product(args.workloads, args.batch)
        for product in find_products(name, args.size, batch)
        if product.flops >= LEAST_FLOPS
    )
    products = sorted(products, key=lambda product: product.flops, reverse=True)[: args.products]
    threads, found = torch.get_num_threads(), []
    try:
        for number, (product, cores) in enumerate(itertools.product(products, args.cores), 1):
            torch.set_num_threads(cores)
            found.append(compare(product, cores, measure_s=args.seconds))
            print(f"   {number}/{len(products) * len(args.cores)} {product.name}", file=sys.stderr, flush=True)
    finally:
        torch.set_num_threads(threads)
    print(format_comparisons(found))
    if args.json is not None:
        content = {"machine": machine_facts(), "cpu": cpu_description(), "comparisons": list(map(asdict, found))}
        args.json.write_text(json.dumps(content, indent=1))
    return 0


def find_products(name: str, size: str, batch: int) -> list[Matmul]:
    """Return the products of the forward and the backward of a workload; its operators run one by one."""
    found: list[Matmul] = []

    def note(graph_module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> tuple[Callable[..., Any], None]:
        found.extend(find_matmuls(graph_module.graph))
        return interpret_whole(graph_module), None

    torch._dynamo.reset()
    workload = build(name, size, batch=batch)
    model = torch.compile(
        workload.model, backend=lambda graph, inputs: compile_with_inductor(graph, inputs, note, recompute_masks=True)
    )
    workload.loss(model(**workload.inputs)).backward()
    return found


def compare(product: Matmul, cores: int, *, measure_s: float = MEASURE_S) -> Comparison:
    """Measure a product on `cores` cores, which torch is set to.

    Raises:
        AssertionError: the three do not compute the same.
    """
    template = compile_template(product)
    copies = [_calls(product, template) for _ in range(max(2, -(-FAR_BYTES // product.num_bytes)))]
    for calls in copies:
        expected, *others = (call() for call in calls)
        for other in others:
            torch.testing.assert_close(other, expected, rtol=1e-3, atol=1e-3)
    clock = time.thread_time_ns if cores == 1 else time.perf_counter_ns
    blas, onednn, call = _typical_times(copies, clock, measure_s)
    extra = 0.0
    if product.is_left_transposed:
        left = torch.ones(product.rows, product.inner)
        again = torch.empty_like(left)
        (extra,) = _typical_times([[lambda: again.copy_(left)]], clock, measure_s / 10)
    return Comparison(
        product=product.name,
        cores=cores,
        flops=product.flops,
        blas_ns=blas,
        onednn_ns=onednn + extra,
        template_ns=call + extra,
    )


def compile_template(product: Matmul) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Return a native body that computes the product with the template: left by rows, right, bias if there is one."""

    def multiply(left: Tensor, right: Tensor) -> tuple[Tensor]:
        return (torch.bmm(left.unsqueeze(0), right.unsqueeze(0)).squeeze(0),)

    def multiply_and_add(left: Tensor, right: Tensor, bias: Tensor) -> tuple[Tensor]:
        return (multiply(left, right)[0] + bias,)

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(value) for value in _matrices(product)]
        piece = make_fx(multiply_and_add if product.has_bias else multiply)(*fakes)
    inputs = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
    with inductor_config.patch({"max_autotune": True, "max_autotune_gemm_backends": "CPP"}):
        (body,) = compile_bodies([(product.name, piece, inputs)], native=True, is_inference=True)
    return body.function


def _matrices(product: Matmul) -> list[Tensor]:
    """Return what multiplies: the left matrix by rows, the right one as it lies, the bias if there is one."""
    left, right = torch.randn(product.rows, product.inner), torch.randn(product.inner, product.columns)
    if product.is_right_transposed:
        right = right.t().contiguous().t()
    return [left, right, *([torch.randn(product.columns)] if product.has_bias else [])]


def _calls(product: Matmul, template: Callable[[list[Tensor]], Sequence[Tensor]]) -> list[Callable[[], Tensor]]:
    left, right, *bias = inputs = _matrices(product)
    given = left.t().contiguous().t() if product.is_left_transposed else left
    weight, linear = right.t(), onednn_linear()
    return [
        lambda: torch.addmm(bias[0], given, right) if bias else torch.mm(given, right),
        lambda: linear(left, weight, bias[0] if bias else None),  # type: ignore[no-any-return]
        lambda: template(list(inputs))[0],
    ]


def _typical_times(
    copies: Sequence[Sequence[Callable[[], Any]]], clock: Callable[[], int], measure_s: float
) -> list[float]:
    """Return the median of the nanoseconds of each call; calls and copies take turns."""
    times: list[list[int]] = [[] for _ in copies[0]]
    end = time.perf_counter() + measure_s
    for number, calls in enumerate(itertools.cycle(copies)):
        order = range(len(calls)) if number % 2 else reversed(range(len(calls)))
        for position in order:
            begin = clock()
            calls[position]()
            times[position].append(clock() - begin)
        if number + 1 >= LEAST_SAMPLES and time.perf_counter() > end:
            return [statistics.median(samples) for samples in times]
    raise AssertionError("a cycle has no end")


def format_comparisons(comparisons: Sequence[Comparison]) -> str:
    """Return a table in Markdown, the CPU below it."""
    rows = [
        (
            f"`{found.product}`",
            found.cores,
            *(f"{time_ns / 1000:.0f}" for time_ns in (found.blas_ns, found.onednn_ns, found.template_ns)),
            f"{found.gain:.2f}x",
        )
        for found in comparisons
    ]
    headers = ("product", "cores", "BLAS, us", "oneDNN, us", "template, us", "over the better library")
    table: str = tabulate(rows, headers=headers, tablefmt="pipe", colalign=("left", *["right"] * 5))
    wins = sum(found.gain > 1 for found in comparisons)
    return f"{table}\nthe template is the fastest of the three at {wins} of {len(comparisons)}; {cpu_description()}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gemm_template", description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=workloads, default=["two_tower", "clip", "flava"])
    parser.add_argument("--size", choices=("tiny", "small"), default="small")
    parser.add_argument("--batch", type=batch_sizes, default=[4], help="batch sizes, e.g. 2,4")
    parser.add_argument("--cores", type=batch_sizes, default=[1, 2], help="numbers of cores, e.g. 1,2")
    parser.add_argument("--products", type=int, help="how many, the largest first; default: all")
    parser.add_argument("--seconds", type=float, default=MEASURE_S, help="that every product is measured for")
    parser.add_argument("--json", type=Path, help="write all times there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
