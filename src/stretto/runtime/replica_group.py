"""Processes that hold the same stages in all replicas: they sum gradients, and exchange shares of weights."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from stretto.checkpoint.tree import empty_tensors, flatten, unflatten
from stretto.collectives import Calibration, CollectiveError, all_reduce
from stretto.nn.buckets import buckets, joined, split_like
from stretto.replicas import Sync
from stretto.replicas.reducer import ReplicaReducer, ShareExchange, Then
from stretto.runtime.failure import PeerLostError, Status
from stretto.runtime.world import broadcast

TAG = 1 << 29  # of shares; those of `collectives.all_reduce` are larger
LARGE = 1 << 20  # bytes of a tensor that is a message of its own
START = 10  # updates that are reduced whole before PowerSGD begins


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


class GroupExchange(ShareExchange):
    """Each replica in a process of its own sends every other one what it wants, all messages at a time.

    gloo's own reduce-scatter sums everything on every replica (torch 2.13). Here sums are in the order of replicas, so
    that they are those of emulated replicas, of any number. On GPUs too the messages go through the host.
    """

    def __init__(self, replica_group: ReplicaGroup) -> None:
        group = replica_group.group
        super().__init__(dist.get_world_size(group), dist.get_rank(group))
        self._replica_group, self._group = replica_group, group
        self._others = [replica for replica in range(self.count) if replica != self.me]

    @torch.no_grad()
    def scatter(self, shares: Sequence[Sequence[Tensor]], totals: Sequence[Tensor]) -> None:
        """Large gradients are not copied."""
        own = packed(shares[self.me])
        addends = {other: [torch.empty_like(message) for message in own] for other in self._others}
        self._send({other: packed(shares[other]) for other in self._others}, addends)
        addends[self.me] = own
        first, *rest = (addends[replica] for replica in range(self.count))
        sums = [message.clone() for message in first] if self.me == 0 else first  # this one's gradients stay
        for messages in rest:
            torch._foreach_add_(sums, messages)
        unpack(sums, totals)

    @torch.no_grad()
    def gather(self, shares: Sequence[Sequence[Tensor]]) -> None:
        """Large weights on the CPU arrive where they belong."""
        own, received = packed(shares[self.me]), {other: room_for(shares[other]) for other in self._others}
        self._send(dict.fromkeys(self._others, own), received)
        for other, messages in received.items():
            unpack(messages, shares[other])

    def states(self, state: Mapping[int, Any]) -> list[dict[int, Any]]:
        """One replica after the other tells all."""
        tree, tensors = flatten(dict(state))
        own = {name: tensor.cpu() for name, tensor in tensors.items()}
        with torch.no_grad(), self._replica_group.meeting():
            return [self._told(tree, own, replica) for replica in range(self.count)]

    def _told(self, tree: Any, own: Mapping[str, Tensor], replica: int) -> dict[int, Any]:
        told = json.loads(broadcast(self._group, json.dumps(tree).encode(), replica))
        tensors = own if replica == self.me else empty_tensors(told)
        given = list(tensors.values())
        messages = packed(given) if replica == self.me else room_for(given)
        for message in messages:
            dist.broadcast(message, group_src=replica, group=self._group)
        if replica != self.me:
            unpack(messages, given)
        state: dict[int, Any] = unflatten(told, tensors)
        return state

    def _send(self, sent: Mapping[int, Sequence[Tensor]], received: Mapping[int, Sequence[Tensor]]) -> None:
        with self._replica_group.meeting():
            for work in posted(sent, received, self._group):
                work.wait()


def posted(
    sent: Mapping[int, Sequence[Tensor]], received: Mapping[int, Sequence[Tensor]], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Messages on their way to members of a group, and from them."""
    works = [
        dist.isend(message, group=group, group_dst=other, tag=TAG)
        for other, messages in sent.items()
        for message in messages
    ]
    works += [
        dist.irecv(message, group=group, group_src=other, tag=TAG)
        for other, messages in received.items()
        for message in messages
    ]
    return [work for work in works if work is not None]


def parts_of(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The large tensors, and the small ones in buckets; by bytes alone, so that both ends divide alike."""
    large = [tensor for tensor in tensors if tensor.nbytes >= LARGE]
    return large, buckets([tensor for tensor in tensors if tensor.nbytes < LARGE])


def packed(tensors: Sequence[Tensor]) -> list[Tensor]:
    large, parts = parts_of(tensors)
    return [*(tensor.detach().reshape(-1).cpu() for tensor in large), *(joined(part).cpu() for part in parts)]


def room_for(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Messages to receive in place of tensors: a large one is its tensor, where that is contiguous and on the CPU."""
    large, parts = parts_of(tensors)
    direct = (tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in large)
    rooms = [
        tensor.detach().view(-1) if at_once else torch.empty(tensor.numel(), dtype=tensor.dtype)
        for tensor, at_once in zip(large, direct, strict=True)
    ]
    return [*rooms, *(torch.empty(sum(each.numel() for each in part), dtype=part[0].dtype) for part in parts)]


def unpack(messages: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Write messages into the tensors that `packed` would make them of."""
    large, parts = parts_of(tensors)
    for tensor, message in zip(large, messages, strict=False):
        if message.data_ptr() != tensor.data_ptr():
            tensor.copy_(message.view(tensor.shape))
    for part, message in zip(parts, messages[len(large) :], strict=True):
        for tensor, values in zip(part, split_like(message, part), strict=True):
            tensor.copy_(values)


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
        return GroupExchange(self._replica_group)

    @property
    def remembers(self) -> bool:
        """Whether the hook keeps a state from update to update: PowerSGD does."""
        return isinstance(self._hook, PowerSGD)

    def state_dict(self) -> dict[str, Any]:
        return self._hook.state_dict() if isinstance(self._hook, PowerSGD) else {}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
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
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> Tensor:
        return self._flat

    def set_buffer(self, flat: Tensor) -> None:
        self._flat = flat

    def gradients(self) -> list[Tensor]:
        return list(split_like(self._flat, self._shapes))

    def parameters(self) -> list[Tensor]:
        return self._shapes


def hook_of(sync: Sync, group: dist.ProcessGroup) -> Callable[[Any], Any] | None:
    name = None if sync.reducing is None else sync.reducing.hook
    if name is None:
        return None
    if name == "powersgd":
        return PowerSGD(group)
    hook = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[name]
    return lambda bucket: hook(group, bucket)


class PowerSGD:
    """torch's communication hook (Vogels et al. 2019) for one stage, and its state.

    That is what compression has left out so far, each replica its own, and the newest factors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._state = self._new()

    def _new(self) -> powerSGD_hook.PowerSGDState:
        return powerSGD_hook.PowerSGDState(
            process_group=self._group, matrix_approximation_rank=1, start_powerSGD_iter=START
        )

    def __call__(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        return powerSGD_hook.powerSGD_hook(self._state, bucket)

    def state_dict(self) -> dict[str, Any]:
        """Errors and factors by the number of their bucket, the count of updates, the generator of new factors."""
        state = self._state
        generator: Any = state.rng.get_state()
        name, keys, position, has_gauss, gauss = generator
        return {
            "updates": state.iter,
            "errors": dict(state.error_dict),
            "p": dict(state.p_memory_dict),
            "q": dict(state.q_memory_dict),
            "generator": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self._state = self._new()
        if state is None:
            return
        self._state.iter = state["updates"]
        self._state.error_dict = dict(state["errors"])
        self._state.p_memory_dict = dict(state["p"])
        self._state.q_memory_dict = dict(state["q"])
        name, keys, position, has_gauss, gauss = state["generator"]
        self._state.rng.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
