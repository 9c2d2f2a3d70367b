"""The defects of torch that this package works around: where they were reported, and which releases have them.

UPSTREAM_BUGS has an entry per file of this directory. The test of an entry compiles the defect with torch alone, and
fails where torch and the entry disagree.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class UpstreamBug:
    """A defect of torch and its workaround."""

    file: str
    """File in this directory that has the workaround."""
    defect: str
    """What torch does wrong, as a sentence without its subject, which is torch."""
    report: str | None
    """Address of an issue, or of a pull request if there is no issue; None if none was found in torch's tracker."""
    seen_in: tuple[str, ...]
    """Releases that have it, as far as they were tried or the report names them."""
    fixed_in: str | None = None
    """First release without it; None if no tested release is without it."""
    test: str
    """Function in `tests/torch_bridge/upstream_bugs/test_<file>` that shows the defect."""


UPSTREAM_BUGS = (
    UpstreamBug(
        file="dropped_writes.py",
        defect="drops writes in place to a float64 tensor without dimensions",
        report=None,
        seen_in=("2.11", "2.12", "2.13"),
        fixed_in="2.14.1",
        test="test_torch_drops_a_write_to_a_number",
    ),
    UpstreamBug(
        file="expanded_writes.py",
        defect="writes in place to a tensor whose elements share memory",
        report="https://github.com/pytorch/pytorch/issues/183986",  # 2.14.1 asks for expanded tensors, not for windows
        seen_in=("2.11", "2.12", "2.13", "2.14"),
        test="test_torch_writes_to_all_elements_that_share_memory",
    ),
    UpstreamBug(
        file="freed_sizes.py",
        defect="saves the arguments of `_unsafe_view` from memory that was freed",
        report="https://github.com/pytorch/pytorch/issues/185630",  # pull requests 184774 and 185861 fix it
        seen_in=("2.11", "2.12", "2.13"),
        fixed_in="2.14.1",
        test="test_torch_saves_sizes_that_were_freed",
    ),
    UpstreamBug(
        file="fused_updates.py",
        defect="skips full vectors of a parameter of lower precision in the fused update of SGD",
        report="https://github.com/pytorch/pytorch/issues/191763",
        seen_in=("2.13",),
        fixed_in="2.14.1",
        test="test_torch_leaves_most_parameters_of_lower_precision_as_they_were",
    ),
    UpstreamBug(
        file="kept_symbols.py",
        defect="keeps a ShapeEnv of dynamic sizes after `torch._dynamo.reset()`",
        report="https://github.com/pytorch/pytorch/issues/190093",  # of tracked fake tensors; none found of the caches
        seen_in=("2.13",),
        test="test_torch_keeps_what_it_knows_of_sizes",
    ),
    UpstreamBug(
        file="late_reads.py",
        defect="reads an input in the backward, after the forward wrote to it, for a value from before",
        report="https://github.com/pytorch/pytorch/pull/197039",  # of what is computed again; none found of the copy
        seen_in=("2.13",),
        test="test_torch_reads_an_input_after_the_write",
    ),
    UpstreamBug(
        file="lost_copies.py",
        defect="returns one tensor where the program returns two copies",
        report=None,  # 197893 is about the same pass, and a copy of an input
        seen_in=("2.13",),
        test="test_torch_returns_one_tensor_for_two_copies",
    ),
    UpstreamBug(
        file="misplaced_resizes.py",
        defect="frees the memory of a value where the program freed that of an input",
        report=None,
        seen_in=("2.13",),
        test="test_torch_frees_the_value_instead_of_the_input",
    ),
    UpstreamBug(
        file="pooling_divisor.py",
        defect="divides gradients of an average over an overhanging window by the size of a whole window",
        report="https://github.com/pytorch/pytorch/issues/198119",
        seen_in=("2.13", "2.14"),
        test="test_torch_divides_by_the_size_of_a_whole_window",
    ),
    UpstreamBug(
        file="scatter_addresses.py",
        defect="adds transposed values at the wrong addresses, in code that several threads run",
        report="https://github.com/pytorch/pytorch/issues/191837",
        seen_in=("2.13",),
        fixed_in="2.14.1",
        test="test_torch_adds_transposed_values_elsewhere",
    ),
    UpstreamBug(
        file="skipped_guards.py",
        defect="runs the graph from before where parameters were frozen, thawed or converted in place",
        report="https://github.com/pytorch/pytorch/issues/139476",
        seen_in=("2.11",),
        fixed_in="2.12.1",  # 2.12.0 was not tried
        test="test_torch_does_not_see_that_a_layer_is_frozen",
    ),
    UpstreamBug(
        file="untrained_lstms.py",
        defect="traces an LSTM that is trained as an operator without a backward",
        report="https://github.com/pytorch/pytorch/pull/185163",
        seen_in=("2.11", "2.12", "2.13", "2.14"),
        test="test_torch_does_not_train_an_lstm_that_reads_the_batch",
    ),
    UpstreamBug(
        file="vector_functions.py",
        defect="loses half of the digits of a function such as tanh where two threads make its first call",
        report="https://github.com/pytorch/pytorch/issues/188792",  # oneMKL from 2025.0 on does not
        seen_in=("2.10", "2.13"),
        test="test_torch_has_an_mkl_that_chooses_kernels_without_a_lock",
    ),
)
