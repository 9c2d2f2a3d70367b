"""The target of a command: a user's function that returns a model and its inputs.

    load_target("train.py:build", {"batch": 8}) -> ModelCall

The function returns `(model, inputs)`, where inputs are a tuple (positional), a dictionary (by name) or one tensor; or
an object with `model`, `inputs` and, optionally, `loss`, a function of the model's output. Without it, the loss is the
output's `loss`, or the sum of all floating-point numbers in the output.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from apollo_compile.errors import ApolloError, CallError, TargetError
from apollo_compile.tools.arguments import split_target


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCall:
    """A model with the arguments of one call and its loss."""

    name: str
    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], torch.Tensor]

    @property
    def inputs(self) -> Mapping[str, Any]:
        """All inputs by name, for `apollo_compile.tools.bench`.

        Raises:
            TargetError: a positional input has no name, or the model does not take the inputs.
        """
        forward = self.model.forward if isinstance(self.model, torch.nn.Module) else self.model
        signature = inspect.signature(forward)
        try:
            named = signature.bind(*self.args, **self.kwargs).arguments
        except TypeError as error:
            raise TargetError(f"{self.name} returns inputs for another signature, {signature}: {error}") from error
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in signature.parameters.values()):
            if self.args:
                raise TargetError(
                    f"{self.name} returns inputs by position, but {type(self.model).__name__}.forward does not name "
                    "them: return a dictionary of inputs"
                )
            return self.kwargs
        return named


def load_target(text: str, arguments: Mapping[str, Any] | None = None) -> ModelCall:
    """Call the function named by `text`, `path/to/file.py:function` or `package.module:function`; return its target.

    Raises:
        CallError: there is no such file or function.
        TargetError: the function fails, or returns something else.
    """
    place, name = split_target(text)
    module = _import(place)
    function = getattr(module, name, None)
    if not callable(function):
        known = ", ".join(sorted(key for key, value in vars(module).items() if inspect.isfunction(value)))
        raise CallError(f"{place} has no function {name!r}; it has: {known or 'none'}")
    try:
        built = function(**(arguments or {}))
    except Exception as error:
        raise TargetError(f"{text} failed: {describe_error(error, function)}") from error
    return _read(text, built)


def _import(place: str) -> ModuleType:
    path = Path(place)
    try:
        if path.suffix != ".py":
            return importlib.import_module(place)
        if not path.exists():
            raise CallError(f"there is no file {place}")
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # as for a script, which may import files of its directory
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)  # dataclasses look up their module there
        spec.loader.exec_module(module)
    except TargetError:
        raise
    except Exception as error:
        kind = CallError if isinstance(error, ModuleNotFoundError) and error.name == place else TargetError
        raise kind(f"cannot import {place}: {describe_error(error)}") from error
    return module


def _read(name: str, built: Any) -> ModelCall:
    loss = getattr(built, "loss", None)
    if isinstance(built, tuple) and len(built) == 2:
        model, inputs = built
        loss = None
    elif hasattr(built, "model") and hasattr(built, "inputs"):
        model, inputs = built.model, built.inputs
    else:
        raise TargetError(
            f"{name} returned {type(built).__name__}; expected (model, inputs), or an object with model and inputs"
        )
    if not callable(model):
        raise TargetError(f"{name} returned {type(model).__name__} as the model; expected a callable")
    if isinstance(inputs, Mapping):
        args, kwargs = (), {str(key): value for key, value in inputs.items()}
    else:
        args, kwargs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}
    return ModelCall(name=name, model=model, args=args, kwargs=kwargs, loss=loss if callable(loss) else default_loss)


@contextmanager
def errors_of_the_model(target: ModelCall, again: Callable[[], object] | None = None) -> Iterator[None]:
    """Let an error of the user's own model begin with its file and line, instead of with what torch.compile says of it.

    What fails is called again in eager, by `again` if there is more to it: if that fails too, the error is the model's.

    Raises:
        TargetError: the model fails in eager; its cause is the first error.
    """
    fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")  # it logs the error, with a traceback of its own
    level = fake_tensors.level
    fake_tensors.setLevel(logging.CRITICAL)
    try:
        yield
    except ApolloError:
        raise
    except Exception as error:
        wrapped = getattr(error, "inner_exception", None)  # Dynamo wraps the errors of a backend
        if isinstance(wrapped, ApolloError):
            raise wrapped from None
        try:
            target.model(*target.args, **target.kwargs) if again is None else again()
        except Exception as own:
            raise TargetError(f"{target.name} failed: {describe_error(own, target.model)}") from error
        raise
    finally:
        fake_tensors.setLevel(level)


def describe_error(error: BaseException, called: object = None) -> str:
    """Return an error with the user's innermost line that it passed, as in `model.py:12 in forward: ValueError: ...`.

    If it passed none, the place is where `called`, a module or a function, is defined.
    """
    what = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not any(each.filename.startswith(place) for place in _NOT_THE_USERS)]
    if own:
        return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {what}"
    function = inspect.unwrap(called.forward if isinstance(called, torch.nn.Module) else called)  # type: ignore[arg-type]
    code = getattr(function, "__code__", None)
    return what if code is None else f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}: {what}"


_NOT_THE_USERS = (
    *(
        f"{place}{os.sep}"
        for place in (Path(torch.__file__).parent, Path(__file__).parents[1], Path(os.__file__).parent)
    ),
    "<frozen",
)
"""Where files begin that belong to torch, to this package, or to Python, with what is installed beside it."""


def default_loss(output: Any) -> torch.Tensor:
    """Return the output's own loss, or the sum of all floating-point numbers in it.

    Raises:
        TargetError: the output has neither.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    sums = [tensor.float().sum() for tensor in tensors_of(output) if tensor.is_floating_point()]
    if not sums:
        raise TargetError(
            f"cannot make a loss of a {type(output).__name__} without floating-point tensors; return a loss too"
        )
    return torch.stack(sums).sum()


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in `value`, including nested mappings, tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)
