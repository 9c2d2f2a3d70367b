"""Settings of Inductor, as they are handed on to what is compiled later."""

from __future__ import annotations

import pytest
import torch._inductor.config as inductor_config

from apollo_compile.torch_bridge.settings import current_settings


def test_a_setting_that_torch_gave_up_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor compiles its variant with all of the user's settings; to read a deprecated one is a FutureWarning."""
    (entry,) = (e for name, e in inductor_config._config.items() if name == "max_fusion_size")  # type: ignore[attr-defined]
    monkeypatch.setattr(entry, "deprecated", True, raising=False)
    settings = current_settings()
    with inductor_config.patch(dict(settings)):
        assert "max_fusion_size" not in settings and "fallback_random" in settings
