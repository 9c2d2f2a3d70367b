"""A captured CUDA graph with the addresses that it uses, and the copies around each replay.

    Captured.reads(inputs), Captured.is_unused(), Captured.replay(gpu, inputs) -> outputs
    Captured.release()      drops the CUDA graph, and those that read its saved outputs
    keep_outputs(outputs)   sorts outputs: saved, lent, copied out

`capturer.py` captures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from apollo_compile.device.gpu.run.copies import Copied, find_copied, in_copy, storage_address, target_for
from apollo_compile.device.gpu.run.gpu import Gpu, Recording, Stream
from apollo_compile.ir import LaneId, Role, Variant
from apollo_compile.torch_bridge.storages import Places, count_uses, storage_handles


@dataclass(eq=False, slots=True, weakref_slot=True)
class Captured:
    """A CUDA graph with the addresses that it uses."""

    role: Role
    recording: Recording | None
    """None once it is released."""
    addresses: dict[int, int]
    """Addresses of the inputs in place, by position."""
    copied_in: dict[int, torch.Tensor]
    """Tensors that the other inputs are copied to, by position."""
    in_place_storages: frozenset[int]
    """Storage addresses of the inputs in place."""
    kept: KeptOutputs
    """The handling of outputs by a replay."""
    memory: Mapping[LaneId, int]
    """Device memory in bytes by lane."""
    variant: Variant | None = None
    """The variant of the model that it is of; a backward reads outputs that a forward of the same variant saved."""
    forward: Captured | None = None
    """The CUDA graph whose saved outputs it reads in place."""
    owners: dict[int, Owner] | None = None
    """Owners of the memory of saved outputs, by storage address, until a backward is captured that reads them."""
    num_replays: int = 0
    readers: list[Captured] = field(default_factory=list)
    """CUDA graphs that read its saved outputs in place; released with it."""
    _places: Places = field(init=False)

    def __post_init__(self) -> None:
        """Make the addresses quick to compare."""
        self._places = Places(self.addresses)

    @property
    def is_live(self) -> bool:
        """Whether it can still be replayed."""
        return self.recording is not None

    @property
    def saved(self) -> frozenset[int]:
        """Storage addresses of outputs that are saved for backward."""
        return self.kept.saved

    def reads(self, inputs: list[torch.Tensor]) -> bool:
        """Whether a replay would read these inputs: those in place have unchanged addresses."""
        return self._places.hold(inputs)

    def is_unused(self) -> bool:
        """Whether nobody uses the saved and lent outputs of the last replay."""
        return count_uses(self.kept.handles) == self.kept.baseline

    def release(self) -> None:
        """Drop the CUDA graph and its memory; outputs that the caller still holds live on."""
        self.recording = self.owners = None
        self.memory = {}
        self.kept = KeptOutputs()  # without handles of storages that may end now
        self.copied_in.clear()
        for reader in self.readers:
            reader.release()
        self.readers.clear()

    def replay(self, gpu: Gpu, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Replay on the caller's stream, and return the outputs: views, copies of those that are copied out, inputs."""
        assert self.recording is not None, "a released CUDA graph is never replayed"
        self.num_replays += 1
        copies = [target_for(each.source) for each in self.kept.copied]  # if memory runs out, nothing has run
        gpu.copy(list(self.copied_in.values()), [inputs[index] for index in self.copied_in])
        self.recording.replay()
        return self.kept.hand_out(gpu, inputs, copies)


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The allocator's memory of a saved output, and the stream that it goes back to."""

    storage: torch.UntypedStorage
    stream: Stream

    def owning(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `tensor`, which is at the same address, that owns the memory."""
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(self.storage, tensor.storage_offset(), tensor.shape, tensor.stride())


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptOutputs:
    """The handling of outputs by a replay."""

    saved: frozenset[int] = frozenset()
    """Storage addresses of outputs that are saved for backward."""
    handles: tuple[int, ...] = ()
    """Handles of the storages of saved and lent outputs, for `count_uses`."""
    baseline: list[int] = field(default_factory=list)
    """Their reference counts without any user."""
    viewed: tuple[torch.Tensor, ...] = ()
    """Saved and lent outputs: every replay hands out new tensors, so that references can be counted."""
    copied: tuple[Copied, ...] = ()
    """Copies to make after a replay."""
    order: tuple[int, ...] = ()
    """Place of every output in the list of the views, the copies, None, and the inputs."""

    def hand_out(
        self, gpu: Gpu, inputs: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the outputs after a replay; `copies` are targets with the layouts of `copied`.

        A tensor that is returned twice is one object: else autograd would give one gradient to two parameters.
        """
        found: list[torch.Tensor | None] = [output.data for output in self.viewed]  # faster than `detach`
        if self.copied:
            gpu.copy(copies, [each.source for each in self.copied])
            for each, copy in zip(self.copied, copies, strict=True):
                found.extend(in_copy(output, each, copy) for output in each.outputs)
        found.append(None)
        found.extend(inputs)
        return [found[place] for place in self.order]


def keep_outputs(
    outputs: Sequence[torch.Tensor | int | None],
    *,
    user_outputs: frozenset[int],
    in_place: frozenset[int],
    own: frozenset[int],
    lends: bool,
) -> KeptOutputs:
    """Sort the outputs of a capture: saved, lent, copied out.

    Arguments:
        outputs: in the graph's memory, or the position of the input that it is, or None.
        user_outputs: positions of those that the user sees; the others are saved for backward.
        in_place: storage addresses of the inputs in place; a saved view of one needs no protection.
        own: identities of the outputs that are not views of inputs; only those are lent.
        lends: whether the user's outputs are lent where they can be.
    """
    saved: dict[int, torch.Tensor] = {}
    lent: dict[int, torch.Tensor] = {}
    viewed: dict[int, torch.Tensor] = {}
    to_copy: dict[int, torch.Tensor] = {}
    for index, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor):
            continue
        place = storage_address(output)
        if index not in user_outputs:
            saved[place] = viewed[id(output)] = output
        elif lends and id(output) in own:
            lent[place] = viewed[id(output)] = output
        else:
            to_copy[index] = output
    saved = {place: output for place, output in saved.items() if place not in in_place}
    copied = find_copied(to_copy.values())
    place_of_view = {each: place for place, each in enumerate(viewed)}
    place_of_copy = {
        id(output): len(viewed) + place for place, output in enumerate(o for each in copied for o in each.outputs)
    }
    num_made = len(viewed) + len(place_of_copy)

    def place_of(index: int, output: torch.Tensor | int | None) -> int:
        if isinstance(output, int):
            return num_made + 1 + output
        if output is None:
            return num_made
        return place_of_copy[id(output)] if index in to_copy else place_of_view[id(output)]

    handles = storage_handles([*saved.values(), *lent.values()])
    return KeptOutputs(
        saved=frozenset(saved),
        handles=tuple(handles),
        baseline=count_uses(handles),
        viewed=tuple(viewed.values()),
        copied=copied,
        order=tuple(place_of(index, output) for index, output in enumerate(outputs)),
    )
