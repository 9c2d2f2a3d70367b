"""What the README says can be done works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_code_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """A CLIP model trains a step, and the report names its two towers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    exec("\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL)), {})
    printed = capsys.readouterr().out
    assert "text_model.encoder.layers.1" in printed
    assert "vision_model.encoder.layers.1" in printed


def test_the_links_of_the_readme_lead_somewhere() -> None:
    """Every relative link is a file of the repository."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []
