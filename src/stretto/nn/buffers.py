"""Restores a module's buffers for a second forward, so that running statistics are updated once per micro-batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

Snapshot = list[tuple[nn.Module, str, Tensor]]
Copy = tuple[Tensor, int, Tensor]  # a buffer, its version counter at the time of the copy, the copy


class Buffers:
    """The buffers of modules: BatchNorm's statistics, spectral_norm's vectors, counters."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        owners = (owner for module in modules for owner in module.modules())
        self._owners = [owner for owner in owners if any(True for _ in owner.buffers(recurse=False))]
        self._latest: dict[int, Copy] = {}  # by the buffer's id

    def snapshot(self) -> Snapshot:
        """The buffers' current values. A buffer unchanged since the last snapshot is not copied again."""
        former, self._latest = self._latest, {}
        return [
            (owner, name, self._copy(buffer, former.get(id(buffer))))
            for owner in self._owners
            for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False)
        ]

    def _copy(self, buffer: Tensor, former: Copy | None) -> Tensor:
        copy = self._latest.get(id(buffer), former)  # two names of one buffer get one copy
        if copy is None or copy[0] is not buffer or copy[1] != buffer._version:
            copy = (buffer, buffer._version, buffer.detach().clone())
        self._latest[id(buffer)] = copy
        return copy[2]


@contextmanager
def exchanged(snapshot: Snapshot) -> Iterator[None]:
    """In this block modules hold the buffers of a snapshot, and update those.

    Afterwards the original tensor objects are put back, not copied into: autograd graphs that saved one stay valid.
    """
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in snapshot]
    try:
        for owner, name, value in snapshot:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)
