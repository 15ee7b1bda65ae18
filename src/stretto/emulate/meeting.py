"""Where emulated replicas of a stage meet."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stretto.replicas.reduction import ReplicaReducer, Then

COMPRESSED: Mapping[str | None, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class EmulatedReducer(ReplicaReducer):
    """Replicas run every action one after the other: the last one to come adds up for all, in the order of replicas."""

    def __init__(self, count: int, hook: str | None = None) -> None:
        super().__init__(count)
        self._compressed = COMPRESSED.get(hook)
        self._there: list[tuple[Sequence[Tensor], Then]] = []

    def add_up(self, tensors: Sequence[Tensor], then: Then) -> None:
        """The last one does it."""
        self._meet(tensors, then, None)

    def add_up_gradients(self, gradients: Sequence[Tensor], then: Then) -> None:
        """The last one does it."""
        self._meet(gradients, then, self._compressed)

    @torch.no_grad()
    def _meet(self, tensors: Sequence[Tensor], then: Then, compressed: torch.dtype | None) -> None:
        self._there.append((tensors, then))
        if len(self._there) < self.count:
            return
        there, self._there = self._there, []
        for parts in zip(*(mine for mine, _ in there), strict=True):
            total = self._sum(parts, compressed)
            for part in parts:
                part.copy_(total)
        for _, afterwards in there:
            afterwards()

    def _sum(self, parts: Sequence[Tensor], compressed: torch.dtype | None) -> Tensor:
        # As torch's hooks: the mean is what travels.
        sent = parts if compressed is None else [part.to(compressed).div_(self.count) for part in parts]
        total = sent[0].clone()
        for part in sent[1:]:
            total += part
        return total if compressed is None else total.to(parts[0].dtype) * self.count

    def forget(self) -> None:
        """Whoever waits is let go."""
        self._there = []
