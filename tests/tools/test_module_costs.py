"""Costs of modules for samples of other sizes, against tracing the model at these sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from apollo_compile import ModuleCosts, module_costs
from apollo_compile.errors import TargetError

WIDTH = 32
OPTIONS = {"device.units": 1, "device.profile": "cpu"}
SIZES: dict[str, tuple[str | int, int]] = {"tokens": ("ids", 1), "patches": ("patches", 1)}


class Vlm(nn.Module):
    """An encoder whose result is put before the tokens of a language model with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.embed = nn.Embedding(100, WIDTH)
        self.language = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, ids: torch.Tensor, patches: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen = self.vision(patches)
        x = torch.cat([seen, self.embed(ids)], dim=1)
        logits = self.head(self.language(x, x, x, need_weights=False)[0])[:, seen.shape[1] :]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(tokens: int, patches: int) -> dict[str, torch.Tensor]:
    """Return a batch of two."""
    ids = torch.randint(0, 100, (2, tokens))
    return {"ids": ids, "patches": torch.randn(2, patches, WIDTH), "labels": ids.clone()}


def trace(tokens: int, patches: int) -> ModuleCosts:
    """Return the costs as traced with a batch of these sizes."""
    return module_costs(Vlm(), batch(tokens, patches), sizes=SIZES, samples=2, options=OPTIONS)


@pytest.fixture(scope="module")
def costs() -> ModuleCosts:
    """Return the costs as traced with 48 tokens and 80 patches."""
    return trace(48, 80)


@pytest.mark.slow
def test_other_sizes_cost_what_they_cost_when_the_model_is_traced_with_them(costs: ModuleCosts) -> None:
    """At entries of the table exactly, between them within a few hundredths."""
    other = trace(192, 320)
    at_entry, between = {"tokens": [192], "patches": [320]}, {"tokens": [150], "patches": [400]}
    assert costs.names == other.names == ("vision", "embed", "language", "head", "")
    np.testing.assert_allclose(costs.seconds(at_entry), other.seconds(at_entry), rtol=1e-9)
    np.testing.assert_allclose(costs.seconds(between).sum(), other.seconds(between).sum(), rtol=0.05)


@pytest.mark.slow
def test_modules_follow_their_own_sizes(costs: ModuleCosts) -> None:
    """The encoder follows patches and is not run without any; the language model follows both, and attention more."""
    found = costs.seconds({"tokens": [48, 48, 768, 48], "patches": [80, 0, 80, 1280]})
    vision, language = (found[:, costs.names.index(name)] for name in ("vision", "language"))
    assert vision[1] == 0 and vision[3] > 8 * vision[0] > 0
    assert 0 < language[1] < language[0] < language[2]
    assert language[3] > 16 * language[1]


class Doubler(nn.Module):
    """Fixes a size, or breaks the graph, as the tests want."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(8, 8)
        self.positions = nn.Parameter(torch.zeros(6, 8))

    def forward(self, x: torch.Tensor, unused: Any = None) -> torch.Tensor:
        if self.how == "positions":
            x = x + self.positions
        if self.how == "break":
            torch._dynamo.graph_break()
        return self.inner(x)


@pytest.mark.parametrize(
    ("how", "inputs", "sizes", "message"),
    [
        ("positions", (4, 6, 8), {"tokens": (0, 1)}, "costs cannot depend on size 'tokens': the model's code fixes it"),
        ("break", (4, 6, 8), {"tokens": (0, 1)}, "cannot compute costs of modules: the model is not one graph"),
        ("", (4, 6, 8), {"tokens": ("y", 1)}, "size 'tokens' is dimension 1 of argument 'y', and the example has none"),
        ("", (4, 6, 8), {"tokens": (0, 3)}, "size 'tokens' is dimension 3 of argument 0"),
        ("", (6, 6, 8), {"a": (0, 0), "b": (0, 1)}, r"sizes are equal in the example \(a=6, b=6\)"),
        ("", (1, 6, 8), {"a": (0, 0)}, "size 'a' is 1 in the example: expected at least 2"),
        ("", (4, 6, 8), {}, "0 sizes: expected 1 to 3"),
        ("", (0, 6, 8), {"a": (0, 1)}, "samples is 0: expected the number of samples"),
    ],
)
def test_what_costs_cannot_be_told_of_is_refused(
    how: str, inputs: tuple[int, ...], sizes: dict[str, tuple[str | int, int]], message: str
) -> None:
    """With the size and the reason."""
    with pytest.raises(TargetError, match=message):
        module_costs(Doubler(how), torch.ones(inputs), sizes=sizes, samples=min(inputs[0], 1), options=OPTIONS)


def test_an_unknown_submodule_is_refused_and_one_that_is_named_twice_counts_once() -> None:
    """The message names the ones that there are; the time of a module would else be in two columns."""
    settings: dict[str, Any] = {"sizes": {"a": (0, 1)}, "options": OPTIONS}
    with pytest.raises(LookupError, match="no submodule 'outer'; it has inner"):
        module_costs(Doubler(""), torch.ones(4, 6, 8), modules=["outer"], **settings)
    costs = module_costs(Doubler(""), torch.ones(4, 6, 8), modules=["inner", "inner"], **settings)
    assert costs.names == ("inner", "")


def test_a_size_in_the_first_dimension_counts_all_samples_together() -> None:
    """So that two samples with three images each come as six images, and one costs half of them."""
    costs = module_costs(Doubler(""), torch.ones(6, 4, 8), sizes={"images": (0, 0)}, samples=2, options=OPTIONS)
    whole = module_costs(Doubler(""), torch.ones(6, 4, 8), sizes={"images": (0, 0)}, options=OPTIONS)
    np.testing.assert_allclose(costs.seconds({"images": [3]}) * 2, whole.seconds({"images": [6]}))
    assert whole.seconds({"images": [0]}).sum() == 0


def test_costs_are_of_the_device_that_is_named() -> None:
    """Without having it: a large layer takes a GPU less time than one core."""
    model, sizes = nn.Linear(512, 512), {"rows": (0, 0)}
    here = module_costs(model, torch.ones(64, 512), sizes=sizes, options=OPTIONS)
    there = module_costs(model, torch.ones(64, 512), sizes=sizes, profile="h200", options=OPTIONS)
    assert 0 < there.seconds({"rows": [1024]}).sum() < here.seconds({"rows": [1024]}).sum()
