"""What the replicas of a stage do when they meet: sum gradients, or merge weights."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.nn.sharded_modules import is_share
from stretto.nn.state_check import check_like
from stretto.replicas.optimizer_share import OptimizerShare, without_missing
from stretto.replicas.reducer import ReplicaReducer, Then
from stretto.replicas.sync_options import AllReduce, DiLoCo, FullyShard, LocalSGD, ShardOptimizer, Sync


class Agreement(ABC):
    """One replica's side of the meetings of a stage."""

    remembers = False  # whether a checkpoint must hold its state
    staleness: int | None = None  # staleness of the last update, in updates; None where updates are synchronous
    steps = False  # whether an update without gradients must still be sent to the other replicas

    def __init__(self, peers: ReplicaReducer) -> None:
        self._peers = peers

    @abstractmethod
    def meet(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """Meet before update number `updates` (A), or after so many updates (M); call `then` if weights change."""

    def sum(self, parameters: Sequence[Tensor], updates: int) -> None:
        """Sum gradients before update number `updates`, where replicas also meet after it (AM)."""
        self.meet(parameters, updates, lambda: None)

    def settle(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:  # noqa: B027 (most are equal)
        """Make the weights of all replicas equal for a pause of training; call `then` if weights change."""

    def norms(self, part_norms: Tensor) -> Tensor:
        """The gradients' norms [parameters], from the norms of the parts of them that this replica holds."""
        return part_norms

    def add_counts(self, counts: Sequence[Tensor], then: Then) -> None:
        """Sum counts over the replicas that share a minibatch, in place, then call `then`; here each has its own."""
        then()

    @property
    def is_next(self) -> bool:
        """Whether an update may be made now."""
        return True

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """What steps in place of the stage's own optimizer, in this process; None where that one steps."""
        return None

    def forget(self) -> None:
        """Abandon a meeting that has begun."""
        self._peers.forget()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of past meetings."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (most have no state)
        """Load what `state_dict` returned."""

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError, TypeError or KeyError unless `load_state_dict` can load `state`."""
        check_like(state, self.state_dict(), "state")

    def begin(self, parameters: Sequence[Tensor], updates: int) -> None:  # noqa: B027 (most have no state)
        """Start after `updates` updates with equal weights in all replicas, and without a state of past meetings."""


class SharedMinibatch(Agreement):
    """All replicas together train on one minibatch."""

    def add_counts(self, counts: Sequence[Tensor], then: Then) -> None:
        self._peers.add_up(counts, then)


class GradientSum(SharedMinibatch):
    """Every replica gets the sum of all replicas' gradients. Each loss is weighted by its share of the examples."""

    def __init__(self, peers: ReplicaReducer) -> None:
        super().__init__(peers)
        self.remembers = peers.remembers

    def state_dict(self) -> dict[str, Any]:
        return {"compression": self._peers.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._peers.load_state_dict(state["compression"])

    def begin(self, parameters: Sequence[Tensor], updates: int) -> None:
        self._peers.load_state_dict(None)

    @torch.no_grad()
    def meet(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """Sum the gradients. A missing gradient counts as 0; one that all replicas miss stays None.

        Raises UsageError for sparse gradients.
        """
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        if not trainable:
            return
        counts = without_missing(trainable)  # of replicas with a gradient, once summed

        def drop_missing() -> None:
            if not bool(counts.all()):
                for parameter, count in zip(trainable, counts.tolist(), strict=True):
                    if not count:
                        parameter.grad = None

        gradients = [parameter.grad for parameter in trainable if parameter.grad is not None]
        self._peers.add_up_gradients([*gradients, counts], drop_missing)


class ScatteredGradientSum(SharedMinibatch):
    """Each replica gets the sum of the gradients that its share of the optimizer takes."""

    def __init__(self, peers: ReplicaReducer, share: OptimizerShare) -> None:
        super().__init__(peers)
        self._share = share

    def meet(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        self._share.sum_gradients()
        then()


class ShardedGradientSum(SharedMinibatch):
    """Each replica's backward has already summed its shard of the gradients (`weights/weights.py`)."""

    def meet(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """Do nothing: the gradients are already summed."""

    def norms(self, part_norms: Tensor) -> Tensor:
        """The norms of the whole gradients, from those of this replica's shards."""
        squares = part_norms.square()
        self._peers.add_up([squares], lambda: None)
        return squares.sqrt()


class WeightAverage(Agreement):
    """After every `every` updates each replica gets the mean of all replicas' weights."""

    def __init__(self, peers: ReplicaReducer, every: int) -> None:
        super().__init__(peers)
        self._every = every
        self._last_updates = 0  # updates at the last meeting
        self.remembers = peers.count > 1

    def meet(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        if updates % self._every == 0:
            self.settle(parameters, updates, then)

    @torch.no_grad()
    def settle(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        if updates == self._last_updates or not trainable:
            return
        self._last_updates = updates
        mean = [parameter.detach().clone() for parameter in trainable]

        def apply_mean() -> None:
            for weights in mean:
                weights.div_(self._peers.count)
            # .data keeps version counters, so graphs in flight stay valid, as in an update.
            self._apply([parameter.data for parameter in trainable], mean)
            then()

        self._peers.add_up(mean, apply_mean)

    def _apply(self, weights: Sequence[Tensor], mean: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list(weights), list(mean))

    def state_dict(self) -> dict[str, Any]:
        return {"met": self._last_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_updates = state["met"]

    def begin(self, parameters: Sequence[Tensor], updates: int) -> None:
        self._last_updates = updates


class PostLocalAverage(WeightAverage):
    """The first `start` updates use the mean of all replicas' gradients, the others go as in `WeightAverage`."""

    def __init__(self, peers: ReplicaReducer, every: int, start: int) -> None:
        super().__init__(peers, every)
        self._start = self._last_updates = start  # replicas have equal weights up to this update
        self._gradients = GradientSum(peers)

    @torch.no_grad()
    def sum(self, parameters: Sequence[Tensor], updates: int) -> None:
        """Average the gradients before `start`. Raises UsageError for sparse gradients.

        Each replica's loss is the mean over its own examples.
        """
        if updates < self._start:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self._peers.count
            self._gradients.sum(parameters, updates)

    def meet(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """Average the weights after every `every` local updates."""
        if (updates - self._start) % self._every == 0:
            self.settle(parameters, updates, then)

    def settle(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        if updates > self._start:
            super().settle(parameters, updates, then)


class OuterStep(WeightAverage):
    """An outer step with Nesterov momentum, from the weights of the last meeting.

    Its gradient is those weights minus the mean of all replicas' weights.
    """

    def __init__(self, peers: ReplicaReducer, choice: DiLoCo, parameters: Sequence[Tensor]) -> None:
        super().__init__(peers, choice.every)
        self.remembers = True
        self._lr, self._momentum = choice.outer_lr, choice.outer_momentum
        self._last = [parameter.detach().clone() for parameter in parameters if parameter.requires_grad]
        self._velocity = [torch.zeros_like(weights) for weights in self._last]

    def _apply(self, weights: Sequence[Tensor], mean: Sequence[Tensor]) -> None:
        for weight, last, velocity, average in zip(weights, self._last, self._velocity, mean, strict=True):
            gradient = last - average
            velocity.mul_(self._momentum).add_(gradient)
            last.sub_(self._lr * (gradient + self._momentum * velocity))
            weight.copy_(last)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last": self._last, "velocity": self._velocity}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raises ValueError if the shapes of the parameters differ."""
        super().load_state_dict(state)
        for tensors, saved in ((self._last, state["last"]), (self._velocity, state["velocity"])):
            shapes, saved_shapes = ([tuple(tensor.shape) for tensor in side] for side in (tensors, saved))
            if shapes != saved_shapes:
                raise ValueError(f"the outer step has parameters of shapes {saved_shapes}, not {shapes}")
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)

    @torch.no_grad()
    def begin(self, parameters: Sequence[Tensor], updates: int) -> None:
        """Start the first outer step from the current weights, with velocity 0."""
        super().begin(parameters, updates)
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        for last, velocity, parameter in zip(self._last, self._velocity, trainable, strict=True):
            last.copy_(parameter)
            velocity.zero_()


def agreement(
    sync: Sync, peers: ReplicaReducer, parameters: Sequence[Tensor], share: OptimizerShare | None
) -> Agreement:
    """The agreement of one replica of a stage under `sync`; `parameters` are those that its optimizer steps.

    `share` is its share of the optimizer, where it steps no more.
    """
    if share is not None:
        return ScatteredGradientSum(peers, share)
    if isinstance(sync, FullyShard) and any(map(is_share, parameters)):
        return ShardedGradientSum(peers)
    if isinstance(sync, AllReduce | ShardOptimizer | FullyShard):  # emulated replicas have all, whatever is shared out
        return GradientSum(peers)
    if isinstance(sync, DiLoCo):
        return OuterStep(peers, sync, parameters)
    assert isinstance(sync, LocalSGD), f"{sync} has no agreement without servers"
    return WeightAverage(peers, sync.every) if sync.start is None else PostLocalAverage(peers, sync.every, sync.start)
