"""Values of every kind go in and come out as in eager: aliases, views, layouts, types, and shapes at their limits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.testing._internal.two_tensor import TwoTensor

from apollo_compile.session import registry
from tests.end_to_end.models import Training, assert_same_training, assert_trains_as_in_eager, train
from tests.end_to_end.step_cases.models import Wrapped

Options = dict[str, Any]


def values(subject: str) -> pytest.MarkDecorator:
    """Mark a test that docs/robustness.md counts."""
    return pytest.mark.robustness("Values", subject)


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return the same random numbers on every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_call(
    function: Callable[..., Any], inputs: tuple[Any, ...], options: Options
) -> tuple[Any, Any, tuple[Any, ...]]:
    """Call `function` in eager and compiled; results and what became of the inputs must agree.

    Returns both results, and the inputs of the compiled call.
    """
    eager_inputs, own_inputs = copy.deepcopy(inputs), copy.deepcopy(inputs)
    expected, actual = function(*eager_inputs), torch.compile(function, **options)(*own_inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own_inputs, eager_inputs, rtol=1e-4, atol=1e-5)
    return expected, actual, own_inputs


@values("inputs that alias each other, written to")
def test_writing_to_one_of_two_inputs_that_share_memory(either: Options) -> None:
    """The other one sees it, in the function and after it."""

    def write(x: torch.Tensor, row: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = (x @ y).sum(1)
        row.mul_(2)
        return (x @ y).sum(1) - before

    x = floats(8, 8)
    with torch.no_grad():
        _, _, (own, row, _) = same_call(write, (x, x[1], floats(8, 8, seed=1)), either)
    assert torch.equal(own[1], row)


@values("inputs that alias each other, written to while gradients flow")
def test_training_writes_to_inputs_that_share_memory(either: Options) -> None:
    """A state and a row of it, over steps: values, states and gradients are those of eager."""

    def advance(x: torch.Tensor, w: torch.Tensor, state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x @ w).tanh()
        state.mul_(0.9).add_(y.detach())
        row.add_(1)
        z = (y * state) @ w
        return z, (state * x).sum()

    def play(run: Callable[..., tuple[torch.Tensor, ...]]) -> list[Any]:
        x, w, state = floats(8, 8).requires_grad_(), floats(8, 8, seed=1).requires_grad_(), floats(8, 8, seed=2)
        seen: list[Any] = []
        for _ in range(3):
            z, total = run(x, w, state, state[2])
            seen += [z.detach(), state.clone(), *torch.autograd.grad(z.square().sum() + total, (x, w))]
        return seen

    torch.testing.assert_close(play(torch.compile(advance, **either)), play(advance), rtol=1e-4, atol=1e-4)


def _aliases(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = (x @ y).relu()
    return z, z.t(), z[1:3], x.view(-1), y, x.detach(), z


@values("outputs that alias inputs and each other")
def test_outputs_alias_what_they_alias_in_eager(either: Options) -> None:
    """Same memory, offsets and strides; writing to one output shows in its aliases."""
    with torch.no_grad():
        expected, actual, (x, y) = same_call(_aliases, (floats(8, 8), floats(8, 8, seed=1)), either)
    for left, right in zip(expected, actual, strict=True):
        assert (left.stride(), left.storage_offset()) == (right.stride(), right.storage_offset())
    z, transposed, rows, flat, same, detached, again = actual
    assert {tensor.data_ptr() for tensor in (flat, detached)} == {x.data_ptr()} and same.data_ptr() == y.data_ptr()
    z.zero_()
    assert not transposed.any() and not rows.any() and not again.any()


@values("detached outputs")
def test_a_detached_output_requires_no_gradient(either: Options) -> None:
    """Though it is a view of one that does, and in its memory."""

    def detach(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = x * 3
        return out.view(-1), out, out[0].detach(), out.detach()

    x = floats(4, 4).requires_grad_()
    expected, actual = detach(x), torch.compile(detach, **either)(x)
    torch.testing.assert_close(actual, expected)
    assert [value.requires_grad for value in actual] == [True, True, False, False]
    assert len({value.untyped_storage().data_ptr() for value in actual}) == 1
    gradients = [torch.autograd.grad(flat.sum() + out.exp().sum(), x)[0] for flat, out, *_ in (actual, expected)]
    torch.testing.assert_close(*gradients)


def _copies(x: torch.Tensor) -> dict[str, Any]:
    y, z = x.exp(), x + 1
    copy = y.clone()
    return {
        "copies": [copy, y.detach().clone(), copy.clone()],
        "views of copies": (y.view(-1).clone()[8:], y.view_as(y).clone().t()),
        "of an input": [x.clone(), x.clone().clone()],
        "same": (z, z, copy),
        "of another type": [x.double(), x.double().float()],
        "constants": [torch.zeros_like(x) + 0, torch.zeros_like(x)],
    }


def _relations(outputs: dict[str, Any], x: torch.Tensor) -> list[tuple[Any, ...]]:
    """Return of each output whether it has a gradient, and which are the same tensor, or in the same memory."""
    tensors = [*itertools.chain.from_iterable(outputs.values()), x]
    memories = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [
        (tensor.requires_grad, [tensor is other for other in tensors], [memory == other for other in memories])
        for tensor, memory in zip(tensors, memories, strict=True)
    ]


@values("outputs that are copies")
def test_returned_copies_are_tensors_of_their_own(either: Options) -> None:
    """What is one tensor in eager is one, what are two are two; who writes to a copy changes nothing else."""
    for mode, dynamic in itertools.product((torch.enable_grad, torch.no_grad, torch.inference_mode), (False, True)):
        torch._dynamo.reset()
        with mode():
            x = floats(8, 8).requires_grad_()
            expected, actual = _copies(x), torch.compile(_copies, dynamic=dynamic, **either)(x)
            torch.testing.assert_close(actual, expected)
            assert _relations(actual, x) == _relations(expected, x), (mode, dynamic)
        if mode is torch.enable_grad:
            actual["copies"][1].zero_()
            actual["copies"][0].detach().zero_()
            torch.testing.assert_close(actual["copies"][2], expected["copies"][2])
            gradients = [torch.autograd.grad(outputs["copies"][2].sum(), x)[0] for outputs in (actual, expected)]
            torch.testing.assert_close(gradients[0], gradients[1])


@values("an input that is copied and written to afterwards")
def test_a_copy_of_an_input_that_is_written_to_is_of_its_time(either: Options) -> None:
    """Copies before and after the write, and none of them is the input."""

    def write(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = x.clone()
        x.mul_(2)
        return before, x.clone(), before.clone()

    _, actual, (x,) = same_call(write, (floats(8, 8),), either)
    assert len({tensor.data_ptr() for tensor in (*actual, x)}) == 4


def _views_across(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = (x @ y).relu()
    left, right = z[:, ::2], z.t()[1::2]
    one = (left @ right).softmax(-1)
    other = z.as_strided((4, 8), (16, 1)) @ y.t().contiguous()
    return one, other, (other.expand(2, 4, 8) @ one).permute(2, 0, 1)


@values("views across segments")
def test_views_of_one_segment_are_read_in_others(either: Options) -> None:
    """Strided, transposed and expanded, with the strides of eager where they leave the graph; gradients too."""
    x, y = floats(8, 8).requires_grad_(), floats(8, 8, seed=1).requires_grad_()
    expected, actual = _views_across(x, y), torch.compile(_views_across, **either)(x, y)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert [tensor.stride() for tensor in actual] == [tensor.stride() for tensor in expected]
    gradients = [torch.autograd.grad(sum(t.cos().sum() for t in out), (x, y)) for out in (actual, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


@values("outputs without elements")
def test_an_output_without_elements_may_have_any_strides(lanes: Options) -> None:
    """Inductor gives a segment's empty output other strides than traced, which is no reason to fall back."""
    same_call(lambda x: (x[:, :-30, 0], x[:, :10, 0] + x[:, 10:, 0]), (floats(2, 20, 2),), lanes)
    model = registry.compiled_models()[-1]
    assert model.graphs and not model.fallbacks


def _odd_outputs(x: torch.Tensor) -> dict[str, Any]:
    y = x @ x
    return {"none": None, "number": 3, "size": y.shape[0], "flag": True, "nested": [y.sum(), (y.relu(),)]}


@values("None, numbers and nested outputs")
def test_outputs_that_are_no_tensors_come_back(either: Options) -> None:
    """None and numbers beside a tensor without dimensions, in containers."""
    with torch.no_grad():
        same_call(_odd_outputs, (floats(8, 8),), either)


@values("channels last")
def test_channels_last_stays_channels_last(either: Options) -> None:
    """Outputs and gradients have eager's strides and values."""
    layers = {"left": nn.Conv2d(3, 8, 3, padding=1), "right": nn.Conv2d(3, 8, 1)}
    model, found = Wrapped(lambda own, x: own.left(x).relu() * own.right(x), **layers), []
    model.to(memory_format=torch.channels_last)
    for run in (model, torch.compile(model, **either)):
        x = floats(2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
        output = run(x)
        found.append((output.detach(), *torch.autograd.grad(output.square().mean(), (x, model.left.weight))))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert [value.stride() for value in found[1]] == [value.stride() for value in found[0]]


def _typed(z: torch.Tensor, index: torch.Tensor, mask: torch.Tensor, half: torch.Tensor) -> tuple[torch.Tensor, ...]:
    turned = z * z.conj() + z.abs()
    picked = index.cumsum(0) // 2 + torch.where(mask, index, -index)
    return turned, torch.view_as_real(z @ z).sum(-1), picked, index.to(torch.uint8), mask ^ (index > 3), half @ half.T


@values("complex, integer, boolean and half-precision values")
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_values_of_every_type_pass_through_segments(either: Options) -> None:
    """With their types; integers and booleans are exact."""
    z = torch.complex(floats(6, 6), floats(6, 6, seed=1))
    index, mask = torch.arange(36).view(6, 6), floats(6, 6, seed=2) > 0
    with torch.no_grad():
        expected, actual, _ = same_call(_typed, (z, index, mask, floats(6, 6, seed=3).to(torch.bfloat16)), either)
    assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in expected]


@values("empty and size-one batches")
def test_batches_of_none_and_of_one_train(either: Options) -> None:
    """Each batch size is a graph of its own; gradients of an empty batch are zeros."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def trained(**options: Any) -> Training:
        batches = iter((floats(0, 8), floats(1, 8)))
        return train(model, lambda run: run(next(batches)).square().sum(), steps=2, **options)

    assert_same_training(trained(), trained(dynamic=False, **either))


@values("tensor subclasses")
def test_a_subclass_that_holds_two_tensors_goes_in_and_comes_out(either: Options) -> None:
    """AOTAutograd unwraps it, and the two halves become two towers in one graph."""
    halves = floats(8, 8), floats(8, 8, seed=1)
    weight = floats(8, 8, seed=2).requires_grad_()

    def tower(x: TwoTensor, w: torch.Tensor) -> TwoTensor:
        return (x @ w).tanh() @ w

    expected = tower(TwoTensor(*halves), weight)
    actual = torch.compile(tower, **either)(TwoTensor(*halves), weight)
    assert isinstance(actual, TwoTensor)
    torch.testing.assert_close((actual.a, actual.b), (expected.a, expected.b), rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(out.sum(), weight) for out in (actual, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


def _both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left = nn.functional.dropout((x @ x).tanh(), 0.5)
    right = nn.functional.dropout((y @ y).tanh(), 0.5)
    return torch.stack([left, right])


@values("dropout on two lanes")
def test_two_towers_draw_different_masks_and_the_same_ones_again(lanes: Options) -> None:
    """Equal towers on equal inputs share a body but not their random numbers; a seed brings both masks back."""
    run = torch.compile(_both, **lanes)
    x = floats(16, 16).abs() + 1
    with torch.no_grad():
        torch.manual_seed(5)
        first, second = run(x, x), run(x, x)
        torch.manual_seed(5)
        again = run(x, x)
        torch.manual_seed(5)
        inductor = torch.compile(_both, backend="inductor")(x, x)
    assert torch.equal(first, again)
    assert torch.equal(first == 0, inductor == 0)
    assert not torch.equal(first[0] == 0, first[1] == 0)
    assert not torch.equal(first == 0, second == 0)
    (graph,) = registry.compiled_models()[-1].graphs
    assert len(graph.compilation.partition.bodies) < len(graph.compilation.partition.graph.segments)


def _copied_and_cleared(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    similarity = x @ kept.clone().T
    kept.zero_()
    return similarity.square()


def _used_and_scaled(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    result = x * kept.sin()
    kept.mul_(0.5)
    return result


def _used_through_a_view_and_replaced(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    result = (x.flatten() * (kept.view(-1) + 1)).sin()
    kept.copy_(x.detach())
    return result


def _used_in_parts_and_added_to(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    left, right = kept.chunk(2, dim=1)
    result = x * (left.exp() + right.exp()).repeat(1, 2)
    kept.add_(1)
    return result


def _copied_twice_and_written_between(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    old = kept.clone()
    kept.mul_(0.5)
    new = kept.clone()
    kept.mul_(0.5)
    return (x @ old.T).tanh() * (x @ new.T).tanh()


USES = (
    _copied_and_cleared,
    _used_and_scaled,
    _used_through_a_view_and_replaced,
    _used_in_parts_and_added_to,
    _copied_twice_and_written_between,
)


def _use_all(own: Any) -> torch.Tensor:
    """Use for every use a parameter and a buffer, named by it."""
    results = [use(own.x[use.__name__], getattr(own, use.__name__)) for use in USES]
    return torch.stack([result.sum() for result in results]).sum()


@values("buffers that are used, then written")
def test_gradients_are_of_the_values_that_were_used(either: Options) -> None:
    """In each of five ways to use one; Inductor alone reads the buffer again, and its gradients are silently wrong."""
    parameters, buffers = ({use.__name__: torch.randn(4, 4) for use in USES} for _ in range(2))
    assert_trains_as_in_eager(Wrapped(_use_all, x=nn.ParameterDict(parameters), **buffers), lambda run: run(), **either)


def _swap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)
    return x - y


@values("inputs that change places")
def test_two_inputs_change_places(lanes: Options) -> None:
    """Compiled code does not take the copy for nothing either."""
    same_call(_swap, (floats(8, 8), floats(8, 8, seed=1)), lanes)


@values("version counters of inputs")
def test_a_write_to_an_input_counts_once(either: Options) -> None:
    """Autograd knows by the version of a tensor whether a saved one was written to; torch.compile adds one a call."""

    def write(x: torch.Tensor, total: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum())
        with torch.no_grad():
            last.copy_(x)
        return x * total

    def versions_of(run: Callable[..., torch.Tensor]) -> list[int]:
        x, total, last = floats(4).requires_grad_(), floats(4, seed=1), floats(4, seed=2)
        versions = []
        for _ in range(2):
            run(x, total, last)
            versions += [x._version, total._version, last._version]
        return versions

    assert versions_of(torch.compile(write, **either)) == versions_of(write) == [0, 1, 1, 0, 2, 2]


def _written_by_one_read_by_the_other(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    one, other = w, w.t()
    for _ in range(3):
        one, other = (one @ w).tanh(), (other @ w + y).tanh()
    x.copy_(one)
    for _ in range(3):
        other = (other @ w + y).tanh()
    return other, one.sum()


def _written_by_both(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x.add_(w @ w)
    y.mul_(0.5)
    x.add_(w.tanh() @ w)
    y.add_(w.sin() @ w)
    return x @ w, y.sum()


@pytest.mark.parametrize(
    "share",
    [
        lambda memory: (memory[:64].view(8, 8), memory[:64].view(8, 8).t()),
        lambda memory: (memory[:64].view(8, 8), memory[20:84].view(8, 8)),
        lambda memory: (memory.as_strided((8, 8), (16, 2)), memory.as_strided((8, 8), (8, 1), 1)),
        lambda memory: (memory.as_strided((8, 8), (16, 2)), memory.as_strided((8, 8), (16, 2), 1)),
    ],
    ids=["transposed", "shifted", "overlapping", "interleaved"],
)
@values("arguments that overlap, written to")
@pytest.mark.parametrize("function", [_written_by_one_read_by_the_other, _written_by_both])
def test_lanes_keep_the_order_of_arguments_that_share_memory(
    function: Callable[..., tuple[torch.Tensor, ...]],
    share: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    either: Options,
) -> None:
    """AOTAutograd traces them as views of one tensor, where one of them is written to."""
    options = {**either, "options": {**either["options"], "partition.min_segment_share": 0.01}}

    def call(run: Callable[..., tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        memory = floats(200)
        return [*run(*share(memory), floats(8, 8, seed=1) / 3), memory]

    compiled = torch.compile(function, **options)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(compiled), call(function), rtol=1e-4, atol=1e-5)
    (graph,) = registry.compiled_models()[-1].graphs
    assert len(graph.compilation.plan.lanes) > 1 or torch.get_num_threads() == 1


def _norms() -> Wrapped:
    """Return two towers whose running statistics overlap."""
    norms, memory = (nn.BatchNorm1d(8), nn.BatchNorm1d(8)), torch.ones(12)
    for norm, begin in zip(norms, (0, 4), strict=True):
        norm.running_mean, norm.running_var = memory[begin : begin + 8], norms[0].running_var

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        one, other = self.norms[0](self.one(x)), self.norms[1](self.other(x))
        return one.square().mean() + (other.sin() * self.norms[0].running_mean).mean()

    return Wrapped(forward, one=nn.Linear(8, 8), other=nn.Linear(8, 8), norms=nn.ModuleList(norms))


def _mirrored() -> Wrapped:
    """Return a tower that writes to a buffer, and one that reads the same memory by another buffer."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        before = (self.other(x) + self.mirror).tanh()
        self.memory.copy_(self.one(x).detach())
        return (before * (self.other(x) + self.mirror).sin()).mean()

    memory = floats(8, 8)
    return Wrapped(forward, one=nn.Linear(8, 8), other=nn.Linear(8, 8), memory=memory, mirror=memory.t())


@values("buffers that share memory")
@pytest.mark.parametrize("make", [_norms, _mirrored])
def test_buffers_that_share_memory_are_trained_as_in_eager(make: Callable[[], nn.Module], either: Options) -> None:
    """Gradients and buffers, over steps."""
    expected, model = make(), make()  # a copy has buffers of its own
    model.load_state_dict(expected.state_dict())
    compiled = torch.compile(model, **either)
    for seed in range(3):
        for run in (expected, compiled):
            run(floats(8, 8, seed=seed)).backward()
        gradients = [{name: p.grad for name, p in each.named_parameters()} for each in (model, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    assert registry.compiled_models()[-1].graphs


@values("writes to memory of a parameter")
def test_a_write_to_memory_of_a_parameter_is_refused_as_by_torch_compile(either: Options) -> None:
    """AOTAutograd cannot trace it, so nothing runs in an order of its own."""
    model = nn.Linear(8, 8)
    model.register_buffer("memory", model.weight.data[0])

    def forward(x: torch.Tensor) -> torch.Tensor:
        model.memory.mul_(0.5)
        return model(x).sum()

    def message(**options: Any) -> str:
        torch._dynamo.reset()
        with pytest.raises(BackendCompilerFailed, match="input mutations") as caught:
            torch.compile(forward, **options)(floats(8, 8))
        return str(caught.value.inner_exception)

    assert message(**either) == message()
