"""Lines of the log say why bodies run under the GIL."""

from __future__ import annotations

import itertools
import logging

import pytest

from apollo_compile.session import bodies
from apollo_compile.target.target import CompiledBody, KeepsPython
from tests.reports.test_summary import compilation

NATIVE = CompiledBody(function=lambda inputs: inputs)
CALLER, LOST = (
    CompiledBody(function=lambda inputs: inputs, keeps_python=KeepsPython(reason=reason, is_lost=is_lost))
    for reason, is_lost in (("it calls a custom operator", False), ("no such method", True))
)


def test_bodies_that_call_python_are_one_line(info_log: pytest.LogCaptureFixture) -> None:
    """Nothing is wrong; native ones are not mentioned."""
    bodies.log_python_bodies(compilation(), [NATIVE, NATIVE, NATIVE])
    bodies.log_python_bodies(compilation(), [CALLER, NATIVE, CALLER])
    assert info_log.messages == ["test: segments that call Python run under the GIL: embed, head"]
    assert info_log.records[0].levelno == logging.INFO


def test_bodies_that_could_not_be_native_are_one_warning_of_a_process(
    monkeypatch: pytest.MonkeyPatch, info_log: pytest.LogCaptureFixture
) -> None:
    """With what it costs, why, and what to do; later ones are for whoever wants to know."""
    monkeypatch.setattr(bodies, "_num_warnings", itertools.count())
    for _ in range(2):
        bodies.log_python_bodies(compilation(), [NATIVE, LOST, LOST])
    assert [record.levelno for record in info_log.records] == [logging.WARNING, logging.INFO]
    (message,) = set(info_log.messages)
    assert message.startswith("test: 2 of 3 bodies could not be compiled to run without Python, so lanes take turns")
    assert "C++ wrapper failed for segment image.layers.0: no such method; 'apollo doctor' tells" in message
