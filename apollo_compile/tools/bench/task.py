"""The measured task, and the variants of a model that are compared on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

DType = Literal["float32", "bfloat16"]

TOLERANCES: Mapping[DType, float] = {"float32": 1e-3, "bfloat16": 5e-2}
"""Accepted relative difference of loss and gradients from the reference. float32 sums in another order differ by about
1e-5 over a whole model. With bfloat16 (8 bits of precision), compilers keep intermediate results in float32 that eager
rounds, so gradients of single elements differ by some percent."""

StepKind = Literal["train", "inference"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredVariant:
    """A measured variant of a model: a backend of `torch.compile` with options, or eager."""

    name: str
    backend: str | None
    """Backend of `torch.compile`; None is eager."""
    options: Mapping[str, Any] = field(default_factory=dict)
    keeps_memory: bool = False
    """Whether its process gets apollo's allocator settings, which otherwise only `backend="apollo"` has."""
    stepper: str = "apollo_compile.tools.bench.child:Stepper"
    """`module:class` of the `Stepper` that takes its steps."""


INDUCTOR_MODES: tuple[MeasuredVariant, ...] = (
    MeasuredVariant(name="inductor", backend="inductor"),
    MeasuredVariant(
        name="inductor-max-autotune",
        backend="inductor",
        options={"max_autotune": True, "coordinate_descent_tuning": True, "max_autotune_gemm_backends": "CPP,ATEN"},
    ),
)
"""Inductor's default, and the options of `mode="max-autotune-no-cudagraphs"` with the GEMM backends of a CPU."""

VARIANTS: tuple[MeasuredVariant, ...] = (
    MeasuredVariant(name="eager", backend=None),
    *INDUCTOR_MODES,
    MeasuredVariant(name="apollo-serial", backend="apollo", options={"plan.planner": "serial"}),
    MeasuredVariant(name="apollo", backend="apollo"),
)
"""Eager, the modes of Inductor, the bodies of apollo on one lane in graph order, and apollo."""

KEPT_MEMORY: tuple[MeasuredVariant, ...] = (
    MeasuredVariant(name="inductor-kept-memory", backend="inductor", keeps_memory=True),
    MeasuredVariant(name="eager-kept-memory", backend=None, keeps_memory=True),
)
"""Inductor and eager with apollo's allocator settings, to see how much of a gain is due to kept memory."""

AGAIN: tuple[MeasuredVariant, ...] = (MeasuredVariant(name="inductor-again", backend="inductor"),)
"""Inductor's default again, to see how much two processes with the same code differ."""

LIBRARIES: tuple[MeasuredVariant, ...] = (
    MeasuredVariant(name="apollo-blas", backend="apollo", options={"runtime.onednn": False}),
)
"""apollo with all matmuls in BLAS, as in eager and Inductor."""

PLANS: tuple[MeasuredVariant, ...] = tuple(
    MeasuredVariant(
        name=f"plan-{variant}",
        backend="apollo",
        options={"plan.autotune": False, "partition.weight_gradients": variant},
    )
    for variant in ("together", "apart")
)
"""The plan without autotuning, with weight gradients in the segments of their layers or in separate segments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTask:
    """The measured task: its builder and its kind of step."""

    builder: str
    """`module:function`; it returns an object with `model`, `inputs` (keyword arguments) and `loss` (of the output)."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the builder, representable in JSON."""
    mode: StepKind = "train"
    dtype: DType = "float32"
    """Data type; for `bfloat16`, forward and loss run under `torch.autocast`, with float32 parameters and gradients."""
    compared: str = "gradients"
    """Name of the values of parameters that its steppers compare besides the loss."""

    @property
    def tolerance(self) -> float:
        """Accepted relative difference of loss and gradients from the reference."""
        return TOLERANCES[self.dtype]
