"""What a test of a defect compares: what torch does, and what the catalogue says."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

from apollo_compile.torch_bridge.upstream_bugs.catalogue import UPSTREAM_BUGS


def assert_as_listed(file: str, *, is_there: bool) -> None:
    """Fail where the catalogue says something else of the defect that `file` works around."""
    (bug,) = [bug for bug in UPSTREAM_BUGS if bug.file == file]
    is_listed = bug.fixed_in is None or TorchVersion(torch.__version__) < bug.fixed_in
    assert is_there or not is_listed, (
        f"torch {torch.__version__} is fixed: it no longer {bug.defect}. Name the first such release as `fixed_in` "
        f"in catalogue.py; {file} can go with the last supported release before it"
    )
    assert is_listed or not is_there, (
        f"torch {torch.__version__} {bug.defect}, though catalogue.py says that {bug.fixed_in} is fixed"
    )
