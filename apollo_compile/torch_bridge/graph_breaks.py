"""Graph breaks: where Dynamo had to end a graph, and how to remove the break.

Dynamo records on every graph why it ended: an explanation, hints, and the stack of the user's code. Several encoders
and a language model can share the device only if they are in one graph, so a graph break is the first thing to look for
when nothing overlaps.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch._dynamo.exc import FailOnRecompileLimitHit, TorchRuntimeError

from apollo_compile.errors import ApolloError
from apollo_compile.ir import GraphBreak
from apollo_compile.torch_bridge.traced_step import describe_compile_error, is_compile_error

if TYPE_CHECKING:
    from torch import fx

_FLAGS = {
    "capture_scalar_outputs": "torch._dynamo.config.capture_scalar_outputs = True",
    "capture_dynamic_output_shape_ops": "torch._dynamo.config.capture_dynamic_output_shape_ops = True",
    "allow_rnn": "torch._dynamo.config.allow_rnn = True",
    "trace_autograd_ops": "torch._dynamo.config.trace_autograd_ops = True",
}
"""Dynamo's flags that avoid a break, by the name that its messages mention."""

_BY_SYMPTOM = {
    "item(": _FLAGS["capture_scalar_outputs"],
    "nonzero": _FLAGS["capture_dynamic_output_shape_ops"],
    "masked_select": _FLAGS["capture_dynamic_output_shape_ops"],
    "dynamic shape operator": _FLAGS["capture_dynamic_output_shape_ops"],
}
"""The same, by words in its messages about an operator."""

FIRST_FORWARD = "run one forward of the model in eager before torch.compile: it installs its hooks in the first one"
_HOOKS = ("hook", "_maybe_install", "install_", "maybe_install")

_IN_CODE = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in .*\n\s*(?P<code>.+)')
"""A frame of the user's stack in a message of Inductor."""


def problem_of(error: Exception) -> str | None:
    """Return why a function does not compile as one graph, with the line of code where that is known.

    None if neither compiling nor a check in Inductor's code failed, or if this package refuses to go on.
    """
    cause = getattr(error, "inner_exception", None) or error
    is_check = isinstance(error, AssertionError) and str(error).startswith("expected size")  # as Inductor's code runs
    if not (is_check or is_compile_error(error)) or isinstance(cause, ApolloError):
        return None
    of_dynamo = next((line.strip() for line in str(error).splitlines() if line.strip()), "Dynamo gives no reason")
    return (of_dynamo if cause is error and not is_check else describe_compile_error(error)) + _place_of(error, cause)


def _place_of(error: Exception, cause: Exception) -> str:
    frames = getattr(error, "real_stack", None) or getattr(cause, "real_stack", None)
    if frames:
        return f" in {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
    found = list(_IN_CODE.finditer(str(cause)))
    return f" in {found[-1]['file']}:{found[-1]['line']}: {found[-1]['code']}" if found else ""


def way_out(problem: str) -> str:
    """Return what to do about a loss function that has an RNN, or that reads, prints or logs a number.

    It is empty where none of these is why.
    """
    if "RNN, GRU, or LSTM" in problem:
        return f"; `{_FLAGS['allow_rnn']}` lets Dynamo trace it"
    what, _, code = problem.rpartition(": ")
    if code.startswith(("if ", "while ")):  # the number decides what comes next
        return ""
    is_read = any(word in what for word in ("Tensor.item", "tolist", "logging.Logger")) or code.startswith("print(")
    skip = "; or let Dynamo skip it, with `torch._dynamo.config.ignore_logging_functions`" * ("logging.Logger" in what)
    return f"; return the tensor instead, and read `step.outputs` after the step{skip}" if is_read else ""


def is_of_user(error: Exception) -> bool:
    """Return whether an operator cannot run on its arguments, such as for their shapes; eager would raise as well."""
    return isinstance(error, TorchRuntimeError)


def is_limit_hit(error: Exception) -> bool:
    """Return whether Dynamo compiles no more graphs for a function, since it has compiled so many."""
    return isinstance(error, FailOnRecompileLimitHit)


def find_break(graph_module: fx.GraphModule, name: str) -> GraphBreak | None:
    """Return the break that ended the Dynamo graph `name`; None where it ended with the function."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    lines = [line.strip() for line in str(reason.reason).splitlines() if line.strip()]
    frames = list(reason.user_stack)
    last = frames[-1] if frames else None
    return GraphBreak(
        graph=name,
        problem=lines[0] if lines else "Dynamo gives no reason",
        explanation=_after(lines, "Explanation:")[0] if _after(lines, "Explanation:") else "",
        file=last.filename if last else "",
        line=(last.lineno or 0) if last else 0,
        function=last.name if last else "",
        code=(last.line or "") if last else "",
        remedies=_remedies(lines, [f"{frame.name} {frame.line}" for frame in frames]),
        callers=tuple(f"{frame.filename}:{frame.lineno}" for frame in frames),
    )


def _remedies(lines: list[str], frames: list[str]) -> tuple[str, ...]:
    text = "\n".join(lines).lower()
    found = [setting for flag, setting in _FLAGS.items() if flag in text]
    found += [setting for symptom, setting in _BY_SYMPTOM.items() if symptom in text]
    if any(word in frame.lower() for frame in frames for word in _HOOKS):
        found.append(FIRST_FORWARD)
    hints = [hint for hint in _after(lines, "Hint:") if not any(flag in hint for flag in _FLAGS)]
    found += [hint for hint in hints if not hint.startswith("File an issue")]  # that does not help the user now
    return tuple(dict.fromkeys(found))


def _after(lines: list[str], label: str) -> list[str]:
    return [line.removeprefix(label).strip() for line in lines if line.startswith(label)]
