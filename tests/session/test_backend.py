"""torch.compile(backend="apollo"): options, environment, fallbacks, and what users see."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.utils import fresh_cache

import apollo_compile
from apollo_compile.device import open as device_open
from apollo_compile.device.cpu.execute import available_units, core_share
from apollo_compile.ir import CostSource
from apollo_compile.reports.summary import summarize
from apollo_compile.session import registry
from apollo_compile.session.learner import MAX_REPLANS, OBSERVED_RUNS, SKIPPED_RUNS
from apollo_compile.store.profiles import default_profile, save_profile
from apollo_compile.torch_bridge.settings import compiler_settings
from tests.end_to_end import models
from tests.end_to_end.marks import needs_two_cores
from tests.session.test_compile import SIZES_BY_DATA, chosen
from tests.torch_settings import bfloat16_matmuls, changed, threads

UNCOMPILED = {**models.STRICT, "runtime.bodies": "eager"}
"""For what plans and reports say of segments, whatever runs in them."""

LANES = pytest.param(models.TwoTowers(), id="lanes", marks=pytest.mark.soak)


@needs_two_cores
@pytest.mark.parametrize("model", [pytest.param(models.Tower(64, 1), id="one lane"), LANES])
def test_bodies_with_parallel_loops_train_as_in_eager(model: nn.Module) -> None:
    """Compiled by g++, since the compiler of other tests may make loops serial; one lane has all cores."""
    compiler = Path(__file__).parents[2] / ".ci" / "g++"
    inputs = models.two_tower_inputs()[: 1 if isinstance(model, models.Tower) else 2]
    # Precompiling headers for it would take longer than the few bodies.
    changes = {"cpp.cxx": (None, str(compiler)), "cpp_cache_precompile_headers": False}
    with inductor_config.patch(changes):
        one_lane, lanes = {"plan.planner": "serial"}, {"partition.granularity": "module"}
        options = {**models.STRICT, **(one_lane if isinstance(model, models.Tower) else lanes)}
        loss_of = lambda run: run(*inputs).square().mean()  # noqa: E731
        models.assert_trains_as_in_eager(model, loss_of, backend="apollo", options=options)
    graphs = registry.compiled_models()[-1].graphs
    assert [graph.compilation.capture.role for graph in graphs] == ["forward", "backward"]
    for graph in graphs:
        units = {graph.compilation.plan.lanes[span.lane].units for span in graph.trace().spans}
        assert units == {tuple(range(available_units()))} if isinstance(model, models.Tower) else len(units) > 1
        libraries = [Path(body.library._name).read_bytes() for body in graph.bodies if body.library is not None]
        assert any(b"GOMP_parallel" in library for library in libraries)


def test_a_wrong_unit_count_is_an_error() -> None:
    """A setting that cannot be honoured is not turned into plain Inductor; others are in `device/test_open.py`."""
    with pytest.raises(Exception, match=r"lanes may use \d+ cores here"):
        torch.compile(nn.Linear(2, 2), backend="apollo", options={"device.units": 4096})(torch.ones(1, 2))


def test_parameters_can_be_swapped_after_a_compile() -> None:
    """As `Module.to` does with those of tensor subclasses; torch refuses where somebody refers to one weakly."""
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    run = torch.compile(layer, backend="apollo", options=UNCOMPILED)
    run(x).sum().backward()
    assert registry.find_models(layer) and not registry.find_models(nn.Linear(2, 2))
    layer.zero_grad(set_to_none=True)
    with changed(torch.__future__.set_swap_module_params_on_conversion, True, False):
        layer.double()
    torch.testing.assert_close(run(x.double()), layer(x.double()))


def test_a_precision_that_the_old_setting_has_no_word_for_is_no_error() -> None:
    """`torch.get_float32_matmul_precision` raises then; the setting is part of what graphs are kept under."""
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with bfloat16_matmuls():
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        others = compiler_settings()
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(layer, backend="apollo")(x), layer(x))
    assert compiler_settings() != others


def test_the_environment_switch_turns_apollo_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """With APOLLO_DISABLE=1 every graph is Inductor's own."""
    monkeypatch.setenv("APOLLO_DISABLE", "1")
    gc.collect()  # what earlier tests compiled goes now, not in between
    before = len(registry.compiled_models())
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    torch.testing.assert_close(torch.compile(layer, backend="apollo")(x), layer(x))
    assert len(registry.compiled_models()) == before


@pytest.mark.robustness("Values", "shapes that depend on data")
def test_a_shape_that_depends_on_data_falls_back_in_one_line(info_log: pytest.LogCaptureFixture) -> None:
    """What segments cannot express still runs, and the log says why."""
    layer, x = chosen()
    run = torch.compile(layer, backend="apollo", options=models.STRICT)
    with SIZES_BY_DATA, torch.no_grad():
        torch.testing.assert_close(run(x), layer(x), rtol=1e-4, atol=1e-5)
    (line,) = [record.getMessage() for record in info_log.records if "falls back" in record.getMessage()]
    assert "no input of the graph says what u0 is" in line
    report = apollo_compile.report(layer)
    (reason,) = report.fallbacks
    assert "has a dynamic shape" in reason[1]
    assert str(report).splitlines()[0] == f"falls back: {reason[1]}"


class Counted(models.TwoTowers):
    """Two towers that count tokens before they go on, as LLaVA counts those of images."""

    def forward(self, image: torch.Tensor, text: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        number = (tokens == 1).sum().item()
        torch._check(number > 0)
        return super().forward(image, text) * 0.01 * (number + tokens.shape[0])


@pytest.mark.robustness("Values", "whole numbers read from tensors")
def test_towers_of_a_model_that_reads_a_number_run_side_by_side() -> None:
    """Each segment reads it for itself; a check that fails raises what Inductor's code would, in every call."""
    model, inputs, tokens = Counted(), models.two_tower_inputs(), torch.tensor([0, 1, 2, 1])
    run = torch.compile(model, backend="apollo", options=models.STRICT)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        for found in (tokens, torch.ones_like(tokens), tokens):
            torch.testing.assert_close(run(*inputs, found), model(*inputs, found), rtol=1e-4, atol=1e-5)
            with pytest.raises(RuntimeError, match="u0 >= 1"):
                run(*inputs, torch.zeros_like(tokens))
    report = apollo_compile.report(run)
    (graph,) = report.graphs
    assert report.fallbacks == report.breaks == () and graph.num_lanes > 1


class Checked(models.TwoTowers):
    """Two towers of a model that wants tokens."""

    def forward(self, image: torch.Tensor, text: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        torch._check((tokens == 1).sum().item() > 0)
        return super().forward(image, text)


class Weighted(nn.Linear):
    """A layer whose output counts as often as there are tokens: so does its gradient."""

    def __init__(self) -> None:
        super().__init__(64, 4)

    def forward(self, image: torch.Tensor, text: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(image) * (tokens == 1).sum().item()


@pytest.mark.robustness("Values", "whole numbers read from tensors, with gradients")
def test_a_model_that_checks_a_number_trains_as_in_eager(caplog: pytest.LogCaptureFixture) -> None:
    """Forward and backward in segments; where the backward needs the number itself, both fall back, in words."""
    inputs = (*models.two_tower_inputs(), torch.tensor([0, 1, 2, 1]))
    runs = []

    def loss_of(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        runs.append(run)
        return run(*inputs).square().mean()

    for kind, roles in ((Checked, ["forward", "backward"]), (Weighted, [])):
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            models.assert_trains_as_in_eager(kind(), loss_of, backend="apollo", options=UNCOMPILED)
        report = apollo_compile.report(runs[-1])
        assert [graph.role.value for graph in report.graphs] == roles
    ((_, reason),) = report.fallbacks
    assert "returns _local_scalar_dense, a SymInt" in reason
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_one_compile_thread_compiles_when_a_body_is_needed() -> None:
    """As on a machine with one core: nothing waits for itself, and bodies are native all the same."""
    layer, x = nn.Linear(3, 5), torch.ones(7, 3)
    with fresh_cache(), inductor_config.patch(compile_threads=1), torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend="apollo", options=models.STRICT)(x), layer(x))
    (graph,) = registry.find_models(layer)[0].graphs
    assert all(body.entry_address is not None for body in graph.bodies)


def test_two_compiles_write_identical_dumps(tmp_path: Path) -> None:
    """Every stage is deterministic, so its text is the same from compile to compile."""
    model = models.TwoTowers()
    inputs = models.two_tower_inputs()
    texts = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        torch._dynamo.reset()
        options = {**UNCOMPILED, "debug.dump": folder, "plan.time_limit_s": models.UNTIL_PROVEN_S}
        torch.compile(model, backend="apollo", options=options)(*inputs).sum().backward()
        texts.append({str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.*")})
    assert texts[0] == texts[1]
    stages = {Path(name).name for name in texts[0]}
    names = ("capture", "partition", "cost", "plan", "sync", "memory", "program")
    assert stages == {"plan.json", *(f"{number:02d}_{name}.txt" for number, name in enumerate(names))}
    assert {Path(name).parent.name for name in texts[0]} == {"0_0_forward", "0_0_backward"}


def test_the_report_names_segments_lanes_and_times() -> None:
    """`apollo_compile.report` shows what was planned and what the last step measured."""
    model = models.TwoTowers()
    run = torch.compile(model, backend="apollo", options=UNCOMPILED)
    run(*models.two_tower_inputs()).square().mean().backward()
    first = apollo_compile.report(run)
    assert re.match(r"measuring, about \d+ steps left\n", str(first))
    assert all(graph.measured is None and graph.is_cold for graph in first.graphs)
    run(*models.two_tower_inputs()).square().mean().backward()
    for found in (apollo_compile.report(model), apollo_compile.report(run)):
        assert [graph.role for graph in found.graphs] == ["forward", "backward"]
        assert all(segment.measured_ns for graph in found.graphs for segment in graph.segments)
        names = {segment.module for graph in found.graphs for segment in graph.segments}
        assert {"image.layers.0", "text.layers.0"} <= names
        assert "image.layers.0" in str(found)
        assert re.match(r"measuring, about \d+ steps left\n", str(found))
    for _ in range((1 + MAX_REPLANS) * (SKIPPED_RUNS + OBSERVED_RUNS)):
        run(*models.two_tower_inputs()).square().mean().backward()
    assert str(apollo_compile.report(run)).startswith(f"{apollo_compile.status(run)}\n")
    assert re.fullmatch(r"settled: (plan on \d lanes?|segments in turn)", apollo_compile.status(model))
    assert apollo_compile.status(nn.Linear(1, 1)) == str(apollo_compile.report(nn.Linear(1, 1)))
    assert "call the compiled model first" in str(apollo_compile.report(nn.Linear(1, 1)))


def test_without_a_model_the_report_is_of_all_that_was_compiled() -> None:
    """Of a function too, whose graphs read no parameter; names that begin again after a reset are numbered."""
    gc.collect()
    num_before = len(apollo_compile.report().graphs)  # what something keeps from tests before
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        torch.compile(layer, backend="apollo", options=UNCOMPILED)(torch.ones(2, 4))
        first = registry.compiled_models()[-1]
        torch._dynamo.reset()
        torch.compile(lambda x: x @ x @ x, backend="apollo", options=UNCOMPILED)(torch.ones(3, 3))
    assert [graph.name for graph in apollo_compile.report(layer).graphs] == ["0/0 inference"]
    assert first.name == registry.compiled_models()[-1].name == "0/0"
    everything = [graph.name for graph in apollo_compile.report().graphs]
    assert len(set(everything)) == len(everything) == num_before + 2


def test_what_was_compiled_goes_when_dynamo_lets_it_go() -> None:
    """Models that are compiled again and again do not pile up."""
    before = _count_after_a_reset()
    run = torch.compile(nn.Linear(4, 4), backend="apollo", options=UNCOMPILED)
    with torch.no_grad():
        run(torch.ones(2, 4))
    assert len(registry.compiled_models()) == before + 1
    del run
    assert _count_after_a_reset() == before


def _count_after_a_reset() -> int:
    torch._dynamo.reset()
    gc.collect()
    return len(registry.compiled_models())


@pytest.mark.parametrize("replans", (True, False))
def test_measured_times_replace_formulas_after_the_first_steps(tmp_path: Path, replans: bool) -> None:
    """A profile that no machine is as slow as is put right, unless that is switched off; training is as in eager."""
    wrong = dataclasses.replace(default_profile(available_units()), name="wrong", launch_ns=models.NEVER_AS_LONG_NS)
    save_profile(wrong, tmp_path / "wrong.json")
    options = {**UNCOMPILED, "plan.replan": replans, "device.profile": tmp_path / "wrong.json"}
    steps = 2 * (SKIPPED_RUNS + OBSERVED_RUNS)
    models.assert_trains_as_in_eager(
        models.TwoTowers(), models.two_tower_loss, steps=steps, backend="apollo", options=options
    )
    graphs = registry.compiled_models()[-1].graphs
    assert [graph.compilation.capture.role for graph in graphs] == ["forward", "backward"]
    for graph in graphs:
        assert (graph.num_replans >= 1) is replans
        summary = summarize(graph.compilation, graph.trace(), num_replans=graph.num_replans)
        assert all((segment.source is CostSource.MEASURED) is replans for segment in summary.segments)
        assert all((segment.predicted_ns < wrong.launch_ns) is replans for segment in summary.segments)
        assert bool(graph.compilation.observations.entries) is replans


@needs_two_cores
def test_a_dumped_plan_is_run_again(tmp_path: Path) -> None:
    """`APOLLO_DUMP` writes plans, `APOLLO_PLAN` reads them; an edited plan is the one that runs.

    It has gradients of weights on a lane of their own, although without it they would stay with the others.
    """
    model, inputs = models.Tower(64, 3), models.two_tower_inputs()[:1]
    first = tmp_path / "first"
    options = {**UNCOMPILED, "debug.dump": first, "partition.weight_gradients": "apart"}
    torch._dynamo.reset()
    torch.compile(model, backend="apollo", options=options)(*inputs).sum().backward()
    (file,) = first.glob("*_backward/plan.json")
    content = json.loads(file.read_text())
    weights = {index for index, name in enumerate(content["graph"]["segments"]) if name.endswith(":weights")}
    assert len(weights) == 3
    for assignment in content["plan"]["assignments"]:
        assignment.update(lane=1 + (assignment["segment"] in weights), start_ns=assignment["segment"])
    file.write_text(json.dumps(content))

    # A directory of its own numbers its graphs from zero, as the first did.
    options = {**UNCOMPILED, "plan.file": first, "debug.dump": tmp_path / "second"}
    models.assert_trains_as_in_eager(model, lambda run: run(*inputs).square().mean(), backend="apollo", options=options)
    forward, graph = registry.compiled_models()[-1].graphs
    assert forward.compilation.plan.pinned and graph.compilation.plan.pinned
    assert "read from a plan file" in str(apollo_compile.report())
    lane_of = {span.segment: span.lane for span in graph.trace().spans}
    assert {lane_of[segment] for segment in weights} == {2}
    assert {lane for segment, lane in lane_of.items() if segment not in weights} == {1}


def test_a_plan_for_another_model_is_not_used_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The graph is planned as if there were no file."""
    inputs = models.two_tower_inputs()
    for depth, options in ((1, {"debug.dump": tmp_path}), (2, {"plan.file": tmp_path, "debug.dump": tmp_path / "own"})):
        torch._dynamo.reset()
        model = models.TwoTowers(depth=depth)
        with torch.no_grad():
            run = torch.compile(model, backend="apollo", options={"runtime.bodies": "eager", **options})
            torch.testing.assert_close(run(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)
    (graph,) = registry.find_models(model)[-1].graphs
    assert not graph.compilation.plan.pinned
    assert "whose segments are not those of 0/0 inference" in caplog.text
    assert "planning 0/0 inference without it" in caplog.text


@needs_two_cores
def test_a_launcher_that_leaves_one_thread_per_rank_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As torchrun does; one rank tells, once, and says what to set."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    # All of this process's cores are its own.
    monkeypatch.setattr("apollo_compile.device.cpu.cores._launchers_cores", list)
    device_open._warn_of_one_thread.cache_clear()
    layer, x = nn.Linear(8, 8), torch.ones(4, 8)
    told = []
    for rank, count in (("1", 1), ("0", torch.get_num_threads()), ("0", 1), ("0", 1)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        torch._dynamo.reset()
        with threads(count), torch.no_grad():
            torch.compile(layer, backend="apollo", options=UNCOMPILED)(x)
        told.append([text for text in caplog.messages if "OMP_NUM_THREADS" in text])
    assert list(map(len, told)) == [0, 0, 1, 1]
    count = len(core_share().own)
    wanted = f"start torchrun with OMP_NUM_THREADS={count}, or call torch.set_num_threads({count})"
    assert wanted in told[-1][0] and "there are no lanes on 2 local ranks" in told[-1][0]


def test_a_function_that_dynamo_does_not_trace_into_may_be_part_of_a_graph() -> None:
    """Its node has a description of a tree as an argument, which has no symbols."""
    untraced = torch._dynamo.nonstrict_trace(lambda x: x.cos() * 3)

    class Untraced(models.Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = untraced(super().forward(x))
            return out

    inputs = models.two_tower_inputs()[:1]
    loss_of = lambda run: run(*inputs).square().mean()  # noqa: E731
    models.assert_trains_as_in_eager(Untraced(64, 1), loss_of, backend="apollo", options=UNCOMPILED)
