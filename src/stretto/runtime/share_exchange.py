"""Shares of gradients, of weights and of optimizer state, sent between the replicas of a stage."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.checkpoint.tree import empty_tensors, flatten, unflatten
from stretto.nn.buckets import buckets, joined, split_like
from stretto.replicas.reducer import ShareExchange
from stretto.runtime.serialize import as_tensor, as_text

if TYPE_CHECKING:
    from stretto.runtime.replica_group import ReplicaGroup

TAG = 1 << 29  # of shares; those of `collectives.all_reduce` are larger
LARGE = 1 << 20  # bytes of a tensor that is a message of its own


class GroupExchange(ShareExchange):
    """Each replica in a process of its own sends every other one what it wants, all messages at a time.

    gloo's own reduce-scatter sums everything on every replica (torch 2.13). Here sums are in the order of replicas, so
    that they are those of emulated replicas, of any number. On GPUs too the messages go through the host.
    """

    def __init__(self, replica_group: "ReplicaGroup") -> None:
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
        text = as_tensor(json.dumps(tree).encode())
        size = torch.tensor(len(text))
        dist.broadcast(size, group_src=replica, group=self._group)
        text = text if replica == self.me else torch.empty(int(size), dtype=text.dtype)
        dist.broadcast(text, group_src=replica, group=self._group)
        told = json.loads(as_text(text))
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
    """Tensors as flat messages on the CPU."""
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
