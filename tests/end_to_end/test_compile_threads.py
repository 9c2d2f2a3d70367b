"""Threads that compile at the same time: what one of them asks Inductor for is not what another gets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.codecache import CppWrapperCodeCache
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.end_to_end.models import STRICT


class SeenEnoughError(Exception):
    """Ends a compile whose code was seen: the C++ compiler would take the longest."""


def test_plain_inductor_on_another_thread_keeps_its_own_code_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds no lock that would keep it from compiling in the midst of a body, as in the first call of a backward."""
    codes: dict[int, list[str]] = {}
    headers: list[Any] = []
    usual_header = CppWrapperCodeCache._get_uncompiled_header("cpu")

    def record(code: str) -> None:
        codes.setdefault(threading.get_ident(), []).append(code)
        raise SeenEnoughError

    def compile_plainly() -> None:
        headers.append(CppWrapperCodeCache._get_uncompiled_header("cpu"))
        with FakeTensorMode() as mode:
            graph = make_fx(lambda x: (x.sin() + 1,), tracing_mode="real")(torch.ones(8))
            with pytest.raises(Exception, match="SeenEnoughError"), inductor_config.patch(cpp_wrapper=True):
                compile_fx_inner(graph, [mode.from_tensor(torch.ones(8))], cpp_wrapper=True)

    def compile_beside(graph: torch.fx.Graph) -> None:
        """Let the other thread compile before this body is lowered."""
        if plain.ident is None:
            plain.start()
            plain.join()

    plain = threading.Thread(target=compile_plainly)
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(record))
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    # A pass that has no name keeps bodies out of Inductor's cache, where nothing would be lowered.
    changes: dict[str, Any] = {"post_grad_custom_pre_pass": compile_beside, "cpp.vec_isa_ok": True}
    compiled: Callable[..., Any] = torch.compile(model, backend="apollo", options={**STRICT, "plan.planner": "serial"})
    with (
        fresh_cache(),
        inductor_config.patch(changes),
        torch.no_grad(),
        pytest.raises(Exception, match="SeenEnoughError"),
    ):
        compiled(x)
    (others,) = codes[plain.ident or 0]
    assert "inductor_entry_impl" in others and "lane_body" not in others
    assert headers == [usual_header]
    assert "lane_body" in codes[threading.get_ident()][0]
    assert CppWrapperCodeCache._get_uncompiled_header("cpu") == usual_header
