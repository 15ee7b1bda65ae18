"""The processes that hold the same stages in other replicas add up what they have, over torch.distributed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from stretto.collectives import Calibration, CollectiveError, all_reduce
from stretto.nn.buckets import buckets, joined, split_like
from stretto.replicas import Sync
from stretto.replicas.reducer import ReplicaReducer, ShareExchange, Then
from stretto.runtime.failure import PeerLostError
from stretto.runtime.powersgd import PowerSGD
from stretto.runtime.share_exchange import LARGE, GroupExchange
from stretto.runtime.wait_report import Status


class ReplicaGroup(NamedTuple):
    """The group of these processes, their ranks in the job in its order, and where this one says what it waits for."""

    group: dist.ProcessGroup
    ranks: Sequence[int]
    status: Status

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """While it lasts this process waits for the others; an error of torch.distributed means that one is gone."""
        me = dist.get_rank(self.group)
        others = [rank for rank in self.ranks if rank != self.ranks[me]]
        try:
            with self.status.waiting("its replicas", self.ranks[(me + 1) % len(self.ranks)], others):
                yield
        except (RuntimeError, CollectiveError) as error:
            raise PeerLostError(others[0], error, others) from error


class GroupPeers(ReplicaReducer):
    """One stage's copies, each in a process of its own. All of them come to the same sum, to the last bit.

    `calibration` is what the algorithm `auto` goes by, the same on all of them; None for built-in constants.
    """

    def __init__(self, replica_group: ReplicaGroup, sync: Sync, calibration: Calibration | None = None) -> None:
        super().__init__(len(replica_group.ranks))
        self._replica_group = replica_group
        self._group = replica_group.group
        self._algorithm = None if sync.reducing is None else sync.reducing.algorithm
        self._calibration = calibration
        self._hook = hook_of(sync, self._group)

    def add_up(self, tensors: Sequence[Tensor], then: Then) -> None:
        """Sum tensors over the replicas, in place, bucket by bucket."""
        self._reduce(tensors, self._sum)
        then()

    def add_up_gradients(self, gradients: Sequence[Tensor], then: Then) -> None:
        """Sum gradients over the replicas, in place, through the communication hook if there is one."""
        if self._hook is not None:
            self._reduce(gradients, self._through_hook)
        elif self._algorithm is not None:
            self._reduce(gradients, self._sum)
        else:
            self._sum_together(gradients)
        then()

    @torch.no_grad()
    def _sum_together(self, gradients: Sequence[Tensor]) -> None:
        # All sums are on their way at a time, and large gradients are not copied. Strides do not decide which ones are:
        # a missing gradient may have others than those of the other replicas.
        large = [gradient for gradient in gradients if gradient.nbytes >= LARGE]
        parts = buckets([gradient for gradient in gradients if gradient.nbytes < LARGE])
        flat = [*(gradient.cpu().contiguous() for gradient in large), *(joined(part).cpu() for part in parts)]
        with self._replica_group.meeting():
            works = [dist.all_reduce(addend, group=self._group, async_op=True) for addend in flat]
            for work in works:
                work.wait()
        for gradient, total in zip(large, flat, strict=False):
            if total is not gradient:
                gradient.copy_(total)
        for part, total in zip(parts, flat[len(large) :], strict=True):
            for gradient, values in zip(part, split_like(total, part), strict=True):
                gradient.copy_(values)

    @property
    def exchange(self) -> ShareExchange:
        """Over the same group."""
        return GroupExchange(self._replica_group)

    @property
    def remembers(self) -> bool:
        """Whether the hook keeps a state from update to update: PowerSGD does."""
        return isinstance(self._hook, PowerSGD)

    def state_dict(self) -> dict[str, Any]:
        """The state of PowerSGD; empty for any other hook."""
        return self._hook.state_dict() if isinstance(self._hook, PowerSGD) else {}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state of PowerSGD; nothing for any other hook."""
        if isinstance(self._hook, PowerSGD):
            self._hook.load_state_dict(state)

    @torch.no_grad()
    def _reduce(self, tensors: Sequence[Tensor], reduce: Callable[["Bucket"], Tensor]) -> None:
        parts = buckets(tensors)
        for number, part in enumerate(parts):
            bucket = Bucket(number, part, last=number + 1 == len(parts))
            with self._replica_group.meeting():
                total = reduce(bucket)
            for tensor, value in zip(part, split_like(total, part), strict=True):
                tensor.copy_(value)

    def _sum(self, bucket: "Bucket") -> Tensor:
        flat = bucket.buffer()
        if self._algorithm is None:
            dist.all_reduce(flat, group=self._group)
        else:
            all_reduce(flat, self._group, self._algorithm, calibration=self._calibration)
        return flat

    def _through_hook(self, bucket: "Bucket") -> Tensor:
        # torch's hooks give means.
        assert self._hook is not None, "there is a hook"
        mean: Tensor = self._hook(bucket).wait()
        return mean.mul_(self.count)


class Bucket:
    """Tensors of one dtype as one, on the CPU: as much of `torch.distributed.GradBucket` as hooks ask for."""

    def __init__(self, index: int, tensors: Sequence[Tensor], *, last: bool) -> None:
        self._index, self._last = index, last
        self._shapes = [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]
        self._flat = joined(tensors).cpu()

    def index(self) -> int:
        """Its number among those of its stage."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last of an update."""
        return self._last

    def buffer(self) -> Tensor:
        """All elements, in one tensor."""
        return self._flat

    def set_buffer(self, flat: Tensor) -> None:
        """Put another tensor of as many elements in its place."""
        self._flat = flat

    def gradients(self) -> list[Tensor]:
        """Views of its tensors."""
        return list(split_like(self._flat, self._shapes))

    def parameters(self) -> list[Tensor]:
        """Tensors of the same shapes."""
        return self._shapes


def hook_of(sync: Sync, group: dist.ProcessGroup) -> Callable[[Any], Any] | None:
    """torch's communication hook of that name, for one stage."""
    name = None if sync.reducing is None else sync.reducing.hook
    if name is None:
        return None
    if name == "powersgd":
        return PowerSGD(group)
    hook = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[name]
    return lambda bucket: hook(group, bucket)
