"""Settings of Inductor, as they are handed on to what is compiled later."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config

from apollo_compile.torch_bridge.settings import current_settings, may_choose_library
from tests.torch_settings import bfloat16_matmuls, changed


def test_a_setting_that_torch_gave_up_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor compiles its variant with all of the user's settings; to read a deprecated one is a FutureWarning."""
    (entry,) = (e for name, e in inductor_config._config.items() if name == "max_fusion_size")  # type: ignore[attr-defined]
    monkeypatch.setattr(entry, "deprecated", True, raising=False)
    settings = current_settings()
    with inductor_config.patch(dict(settings)):
        assert "max_fusion_size" not in settings and "fallback_random" in settings


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_the_user_may_have_forbidden_a_choice_of_libraries() -> None:
    """Deterministic algorithms, oneDNN switched off and less precision each leave the choice to Inductor."""
    assert may_choose_library()
    fixed_numbers = changed(torch.use_deterministic_algorithms, True, False)
    for forbidding in (fixed_numbers, torch.backends.mkldnn.flags(enabled=False), bfloat16_matmuls()):
        with forbidding:
            assert not may_choose_library()
        assert may_choose_library()
