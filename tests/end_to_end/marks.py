"""Marks that several files of tests use."""

from __future__ import annotations

import pytest
import torch

needs_two_cores = pytest.mark.skipif(torch.get_num_threads() < 2, reason="one core has no lanes to choose from")
