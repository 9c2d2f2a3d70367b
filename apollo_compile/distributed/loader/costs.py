"""Costs of samples: seconds per module as a function of a sample's sizes.

    ModuleCosts                                the result of `apollo_compile.module_costs`
    costs.seconds(sizes) -> (samples, modules)
    costs.phases(sizes, encoders=[...]) -> (samples, 2)
    costs.corrected_by(report), costs.corrected({"vision": 1.2})

A module has a table: its seconds at powers of two of each size that its work depends on. Between entries the cost is a
polynomial of degree two in each size, through the three nearest entries. That is exact for matmuls (linear in the
number of tokens) and attention (quadratic), apart from rates of the device, which change slowly with sizes. Beyond the
table the last polynomial is used, or the line through the last two entries where it would fall below that.

A module that has no work at a size of 0, such as an image encoder for a sample without images, costs nothing there.

Tables are read by additions, multiplications and divisions of single elements, so that the same table gives the same
costs on every machine. Ranks with different device profiles must share one table: `share_costs` (`ranks.py`).
Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from apollo_compile.errors import SampleError
from apollo_compile.json_form import from_json, parse, to_json
from apollo_compile.units import NS_PER_S

if TYPE_CHECKING:
    from apollo_compile.reports.values import ModelSummary

Numbers: TypeAlias = NDArray[np.float64]

Sizes: TypeAlias = Mapping[str, ArrayLike] | Sequence[Mapping[str, float]]
"""One array per size with an entry per sample, or one mapping per sample."""

REST = ""
"""Name of the work outside all named modules, such as the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleTable:
    """Seconds of one module per sample."""

    name: str
    sizes: tuple[str, ...]
    """Sizes that its work depends on."""
    nodes: tuple[tuple[float, ...], ...]
    """Values of every size in the table, ascending; at least three each."""
    seconds: tuple[float, ...]
    """Seconds per combination of nodes, the last size varying fastest."""
    needs: tuple[str, ...] = ()
    """Sizes at which it has no work if they are 0."""
    factor: float = 1.0
    """Measured over predicted time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCosts:
    """Seconds that every module takes for a sample of given sizes, forward and backward."""

    sizes: tuple[str, ...]
    modules: tuple[ModuleTable, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules; the last is "", the work outside all of them."""
        return tuple(table.name for table in self.modules)

    @property
    def digest(self) -> str:
        """Hash of all tables and factors."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def seconds(self, sizes: Sizes) -> Numbers:
        """Return the (samples, modules) seconds of samples.

        Arguments:
            sizes: an array per size, with an entry per sample; or one mapping per sample, from sizes to numbers.

        Raises:
            SampleError: a sample lacks a size, or a size is negative or not a finite number.
        """
        columns = _read_sizes(sizes, self.sizes)
        found = [_read_table(table, columns) * table.factor for table in self.modules]
        return np.stack(found, axis=1)

    def phases(self, sizes: Sizes, *, encoders: Iterable[str]) -> Numbers:
        """Return the (samples, 2) seconds of the modules `encoders` together, and of all other modules together.

        Raises:
            SampleError: a sample lacks a size, or a size is negative or not a finite number.
            LookupError: there is no module of a name.
        """
        wanted = (encoders,) if isinstance(encoders, str) else tuple(encoders)
        self._check_names(wanted)
        seconds = self.seconds(sizes)
        phases = np.zeros((len(seconds), 2))
        for column, name in enumerate(self.names):  # in a fixed order: a sum over an axis may round differently
            phases[:, 0 if name in wanted else 1] += seconds[:, column]
        return phases

    def corrected(self, factors: Mapping[str, float]) -> ModuleCosts:
        """Return the costs with the predictions of some modules multiplied by measured over predicted time.

        Arguments:
            factors: factors by name of a module; other modules keep their factors.

        Raises:
            LookupError: there is no module of a name.
            ValueError: a factor is not a positive number.
        """
        self._check_names(factors)
        for name, factor in factors.items():
            if not (math.isfinite(factor) and factor > 0):
                raise ValueError(
                    f"factor of module {name!r} is {factor}: expected measured over predicted time, above 0"
                )
        modules = (replace(table, factor=float(factors.get(table.name, table.factor))) for table in self.modules)
        return replace(self, modules=tuple(modules))

    def corrected_by(self, report: ModelSummary) -> ModuleCosts:
        """Return the costs corrected by the measurements of a report, `apollo_compile.report(model)`.

        The factor of a module is the measured over the predicted time of its segments, forward and backward. A module
        without measurements gets the factor of all other modules together.

        Raises:
            ValueError: the report has no measurements.
        """
        measured, predicted = dict.fromkeys(self.names, 0), dict.fromkeys(self.names, 0)
        for graph in report.graphs:
            for module in graph.modules:
                if module.measured_ns is not None:
                    owner = owner_of(module.name, self.names)
                    measured[owner] += module.measured_ns
                    predicted[owner] += module.predicted_ns
        if not sum(predicted.values()):
            raise ValueError("the report has no measured module: train some steps with backend='apollo' first")
        overall = sum(measured.values()) / sum(predicted.values())
        return self.corrected(
            {name: measured[name] / predicted[name] if predicted[name] else overall for name in self.names}
        )

    def to_json(self) -> str:
        """Return all tables as JSON text, which `ModuleCosts.from_json` reads."""
        return json.dumps(to_json(self))

    @classmethod
    def from_json(cls, text: str) -> ModuleCosts:
        """Return the costs that `to_json` wrote.

        Raises:
            ValueError: the text is not a `ModuleCosts`.
        """
        return from_json(cls, parse(text))

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ModuleCosts:
        """Return the costs in a file; raises `OSError` or `ValueError` if it cannot be read."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def _check_names(self, names: Iterable[str]) -> None:
        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise LookupError(f"there is no module {unknown[0]!r}: modules are {', '.join(map(repr, self.names))}")


def owner_of(path: str, names: Iterable[str]) -> str:
    """Return the innermost of the modules `names` that contains the module at `path`, or `REST`."""
    inside = [name for name in names if name and (path == name or path.startswith(f"{name}."))]
    return max(inside, key=len, default=REST)


def to_nanoseconds(costs: ArrayLike, names: Sequence[Any] | None = None) -> NDArray[np.int64]:
    """Return the (samples, phases) costs of samples, given in seconds, as whole nanoseconds.

    Arguments:
        costs: (samples, phases) or (samples,) seconds.
        names: names of the samples in messages; None is their numbers.

    Raises:
        SampleError: a cost is negative or not a finite number.
        ValueError: `costs` does not have the shape (samples, phases) or (samples,).
    """
    try:
        seconds = np.asarray(costs, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"costs are not a (samples, phases) array of seconds: {error}") from error
    if seconds.ndim == 1:
        seconds = seconds[:, None]
    if seconds.ndim != 2 or not seconds.shape[1]:
        raise ValueError(f"costs have the shape {seconds.shape}: expected (samples, phases), or (samples,)")
    bad = ~((seconds >= 0) & (seconds <= 1e6))  # sums of nanoseconds have 64 bits
    if bad.any():
        sample, phase = np.argwhere(bad)[0]
        shown = sample if names is None else repr(names[sample])
        raise SampleError(
            f"sample {shown} costs {seconds[sample, phase]} seconds in phase {phase}: expected a number from 0 "
            "to a million"
        )
    return np.rint(seconds * NS_PER_S).astype(np.int64)


def _read_sizes(sizes: Sizes, names: Sequence[str]) -> dict[str, Numbers]:
    """Return one checked array per size, all of one length."""
    columns = {name: _read_column(sizes, name) for name in names}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        fewest = min(lengths, key=lambda name: lengths[name])
        raise SampleError(
            f"sample {lengths[fewest]} has no size {fewest!r}: there are {lengths} values; expected one per size and "
            "sample"
        )
    return columns


def _read_column(sizes: Sizes, name: str) -> Numbers:
    values: Any
    if isinstance(sizes, Mapping):
        if name not in sizes:
            raise SampleError(
                f"sample 0 has no size {name!r}: got arrays of {', '.join(map(repr, sizes)) or 'nothing'}"
            )
        values = sizes[name]
    else:
        values = [row.get(name) for row in sizes]
    try:
        column = np.asarray(values, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError):
        column = np.array([_to_number(value) for value in values], dtype=np.float64)
    bad = ~(np.isfinite(column) & (column >= 0))
    if bad.any():
        sample = int(np.argmax(bad))
        value = values[sample] if isinstance(values, Sequence) else column[sample]
        what = f"no size {name!r}" if value is None else f"a size {name!r} of {value!r}"
        raise SampleError(f"sample {sample} has {what}: expected a finite number of at least 0")
    return column


def _to_number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _read_table(table: ModuleTable, columns: Mapping[str, Numbers]) -> Numbers:
    """Return the predicted seconds of samples."""
    num_samples = len(next(iter(columns.values()))) if columns else 0
    found = np.zeros((2, num_samples))
    values = np.array(table.seconds)
    # (index in the flat table, weight) of every node that is used, one size after the other
    terms: list[tuple[Any, Any]] = [(0, 1.0)]
    for name, nodes in zip(table.sizes, table.nodes, strict=True):
        first, weights = _lagrange(columns[name], np.array(nodes))
        terms = [
            (place * len(nodes) + first + offset, weight * weights[offset])
            for place, weight in terms
            for offset in range(3)
        ]
    for place, weight in terms:
        found = found + values[place] * weight
    runs = np.ones(num_samples, dtype=bool)
    for name in table.needs:
        runs &= columns[name] > 0
    return np.where(runs, np.maximum(found.max(axis=0), 0.0), 0.0)


def _lagrange(x: Numbers, nodes: Numbers) -> tuple[NDArray[np.intp], list[Numbers]]:
    """Return the first of the three nodes around each `x`, and the weights of a polynomial through them.

    In a second row it is the line through the last two nodes where `x` is beyond them.
    """
    # `x` lies between the second and the third, or between the first and the second if there is none before
    first = np.clip(np.searchsorted(nodes, x, side="right") - 2, 0, len(nodes) - 3)
    a, b, c = nodes[first], nodes[first + 1], nodes[first + 2]
    curve = (x - b) * (x - c) / ((a - b) * (a - c)), (x - a) * (x - c) / ((b - a) * (b - c))
    weights = [*curve, (x - a) * (x - b) / ((c - a) * (c - b))]
    line = [0.0 * x, (c - x) / (c - b), (x - b) / (c - b)]
    return first, [np.stack([own, np.where(x > c, other, own)]) for own, other in zip(weights, line, strict=True)]
