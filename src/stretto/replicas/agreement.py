"""What the copies of a stage do when they meet: add up gradients, or merge weights."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.nn.sharded_modules import is_share
from stretto.nn.state_check import check_like
from stretto.replicas.reduction import ReplicaReducer, Then
from stretto.replicas.strategies import AllReduce, DiLoCo, FullyShard, LocalSGD, Sync


class Agreement(ABC):
    """One copy of a stage's part in it."""

    remembers = False  # whether it knows anything of the past that a checkpoint must hold
    staleness: int | None = None  # how many updates of others came before the last one, where it is asynchronous
    steps = False  # whether an update without gradients has to be told to others all the same

    def __init__(self, peers: ReplicaReducer) -> None:
        self._peers = peers

    @abstractmethod
    def meet(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """Before update number `updates` (A), or when so many have been made (M); `then` follows changed weights."""

    def sum(self, parameters: Sequence[Tensor], updates: int) -> None:
        """Before update number `updates`, where replicas also meet after it (AM)."""
        self.meet(parameters, updates, lambda: None)

    def settle(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:  # noqa: B027 (they are)
        """Training pauses: copies are the same from here on."""

    def norms(self, own: Tensor) -> Tensor:
        """The norms of gradients, from those of what this copy has of each."""
        return own

    def add_counts(self, counts: Sequence[Tensor], then: Then) -> None:
        """Make counts of a minibatch's parts those of the whole, in place, then call `then`; here a part is a whole."""
        then()

    @property
    def is_next(self) -> bool:
        """Whether an update may be made now."""
        return True

    def forget(self) -> None:
        """A meeting that has begun will not come to its end."""
        self._peers.forget()

    def state_dict(self) -> dict[str, Any]:
        """What is known of past meetings."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (most know nothing)
        """Go on from `state_dict`."""

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError, TypeError or KeyError for what is no state of this one."""
        check_like(state, self.state_dict(), "state")

    def begin(self, parameters: Sequence[Tensor], updates: int) -> None:  # noqa: B027 (most know nothing)
        """Go on where copies have been the same through so many updates, and nothing is known of past meetings."""


class Summed(Agreement):
    """All copies together train on one minibatch."""

    def add_counts(self, counts: Sequence[Tensor], then: Then) -> None:
        """Over all copies."""
        self._peers.add_up(counts, then)


class Gradients(Summed):
    """Every copy gets the sum of all copies' gradients. Each loss carries its share of the minibatch's examples."""

    def __init__(self, peers: ReplicaReducer) -> None:
        super().__init__(peers)
        self.remembers = peers.remembers

    def state_dict(self) -> dict[str, Any]:
        """What compression has left out so far."""
        return {"compression": self._peers.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._peers.load_state_dict(state["compression"])

    def begin(self, parameters: Sequence[Tensor], updates: int) -> None:
        """Nothing was."""
        self._peers.load_state_dict(None)

    @torch.no_grad()
    def meet(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """A parameter without a gradient in all copies has none afterwards; without one in some it counts as 0 there.

        Raises UsageError for sparse gradients.
        """
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        if not trainable:
            return
        there = torch.tensor([float(parameter.grad is not None) for parameter in trainable])
        for parameter in trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:
                raise UsageError(
                    f"a sparse gradient {tuple(parameter.grad.shape)}: all-reduce adds up dense ones; build the "
                    "embedding with sparse=False"
                )
        found = there.to(trainable[0])

        def drop() -> None:
            if not bool(found.all()):
                for parameter, count in zip(trainable, found.tolist(), strict=True):
                    if not count:
                        parameter.grad = None

        gradients = [parameter.grad for parameter in trainable if parameter.grad is not None]
        self._peers.add_up_gradients([*gradients, found], drop)


class Shares(Summed):
    """Each copy has the sum of its share of the gradients already: backwards have left it (`weights/sharded.py`)."""

    def meet(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """Nothing is left to do."""

    def norms(self, own: Tensor) -> Tensor:
        """Over all shares."""
        squares = own.square()
        self._peers.add_up([squares], lambda: None)
        return squares.sqrt()


class Average(Agreement):
    """After every `every` updates each copy gets the mean of all copies' weights."""

    def __init__(self, peers: ReplicaReducer, every: int) -> None:
        super().__init__(peers)
        self._every = every
        self._met = 0  # updates at the last meeting
        self.remembers = peers.count > 1

    def meet(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """If it is time."""
        if updates % self._every == 0:
            self.settle(parameters, updates, then)

    @torch.no_grad()
    def settle(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """If there were updates since the last meeting."""
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        if updates == self._met or not trainable:
            return
        self._met = updates
        mean = [parameter.detach().clone() for parameter in trainable]

        def take() -> None:
            for weights in mean:
                weights.div_(self._peers.count)
            # As .data: graphs in flight do not notice, as they do not notice an update.
            self._take([parameter.data for parameter in trainable], mean)
            then()

        self._peers.add_up(mean, take)

    def _take(self, weights: Sequence[Tensor], mean: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list(weights), list(mean))

    def state_dict(self) -> dict[str, Any]:
        """When copies last met."""
        return {"met": self._met}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._met = state["met"]

    def begin(self, parameters: Sequence[Tensor], updates: int) -> None:
        """As if they had just met."""
        self._met = updates


class PostLocal(Average):
    """The first `start` updates are made with the mean of all copies' gradients, the others as in `Average`."""

    def __init__(self, peers: ReplicaReducer, every: int, start: int) -> None:
        super().__init__(peers, every)
        self._start = self._met = start  # until then copies are the same
        self._gradients = Gradients(peers)

    @torch.no_grad()
    def sum(self, parameters: Sequence[Tensor], updates: int) -> None:
        """Each loss is the mean over this copy's examples. Raises UsageError for sparse gradients."""
        if updates < self._start:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self._peers.count
            self._gradients.sum(parameters, updates)

    def meet(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """If it is time."""
        if (updates - self._start) % self._every == 0:
            self.settle(parameters, updates, then)

    def settle(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """If there were local updates since the last meeting."""
        if updates > self._start:
            super().settle(parameters, updates, then)


class Outer(Average):
    """The mean is where an outer step with Nesterov momentum goes; the step begins where the last one ended."""

    def __init__(self, peers: ReplicaReducer, choice: DiLoCo, parameters: Sequence[Tensor]) -> None:
        super().__init__(peers, choice.every)
        self.remembers = True
        self._lr, self._momentum = choice.outer_lr, choice.outer_momentum
        self._last = [parameter.detach().clone() for parameter in parameters if parameter.requires_grad]
        self._velocity = [torch.zeros_like(weights) for weights in self._last]

    def _take(self, weights: Sequence[Tensor], mean: Sequence[Tensor]) -> None:
        for now, last, velocity, merged in zip(weights, self._last, self._velocity, mean, strict=True):
            gradient = last - merged
            velocity.mul_(self._momentum).add_(gradient)
            last.sub_(self._lr * (gradient + self._momentum * velocity))
            now.copy_(last)

    def state_dict(self) -> dict[str, Any]:
        """Where the last step ended, and its velocity."""
        return {**super().state_dict(), "last": self._last, "velocity": self._velocity}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises ValueError if it is of other parameters."""
        super().load_state_dict(state)
        for mine, saved in ((self._last, state["last"]), (self._velocity, state["velocity"])):
            if [tuple(each.shape) for each in mine] != [tuple(each.shape) for each in saved]:
                raise ValueError("the outer step is one of other parameters")
            for tensor, value in zip(mine, saved, strict=True):
                tensor.copy_(value)

    @torch.no_grad()
    def begin(self, parameters: Sequence[Tensor], updates: int) -> None:
        """The first outer step begins where the weights are."""
        super().begin(parameters, updates)
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        for last, velocity, parameter in zip(self._last, self._velocity, trainable, strict=True):
            last.copy_(parameter)
            velocity.zero_()


def agreement(sync: Sync, peers: ReplicaReducer, parameters: Sequence[Tensor]) -> Agreement:
    """The choice's; `parameters` are what the stage's optimizer steps."""
    if isinstance(sync, FullyShard) and any(map(is_share, parameters)):
        return Shares(peers)
    if isinstance(sync, AllReduce | FullyShard):  # emulated, a replica has all of them
        return Gradients(peers)
    if isinstance(sync, DiLoCo):
        return Outer(peers, sync, parameters)
    assert isinstance(sync, LocalSGD), f"{sync} has no meetings"
    return Average(peers, sync.every) if sync.start is None else PostLocal(peers, sync.every, sync.start)
