"""The all-reduce of emulated replicas."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stretto.replicas.reducer import ReplicaReducer, Then

COMPRESSED: Mapping[str | None, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class EmulatedReducer(ReplicaReducer):
    """Replicas call it one after the other; the call of the last one adds up for all, in the order of replicas."""

    def __init__(self, count: int, hook: str | None = None) -> None:
        super().__init__(count)
        self._compressed = COMPRESSED.get(hook)
        self._calls: list[tuple[Sequence[Tensor], Then]] = []

    def add_up(self, tensors: Sequence[Tensor], then: Then) -> None:
        """Add up the tensors of all replicas, in the call of the last one."""
        self._meet(tensors, then, None)

    def add_up_gradients(self, gradients: Sequence[Tensor], then: Then) -> None:
        """Add up the gradients of all replicas, in the call of the last one, with the hook's compression."""
        self._meet(gradients, then, self._compressed)

    @torch.no_grad()
    def _meet(self, tensors: Sequence[Tensor], then: Then, compressed: torch.dtype | None) -> None:
        self._calls.append((tensors, then))
        if len(self._calls) < self.count:
            return
        calls, self._calls = self._calls, []
        for addends in zip(*(given for given, _ in calls), strict=True):
            total = self._sum(addends, compressed)
            for addend in addends:
                addend.copy_(total)
        for _, afterwards in calls:
            afterwards()

    def _sum(self, addends: Sequence[Tensor], compressed: torch.dtype | None) -> Tensor:
        # torch's compression hooks send each replica's share of the mean.
        sent = addends if compressed is None else [addend.to(compressed).div_(self.count) for addend in addends]
        total = sent[0].clone()
        for addend in sent[1:]:
            total += addend
        return total if compressed is None else total.to(addends[0].dtype) * self.count

    def forget(self) -> None:
        """Drop the calls of a sum that will not be completed."""
        self._calls = []
