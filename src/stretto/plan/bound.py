"""What no way to cut the layers can go below: candidates that cannot win are not priced."""

from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from stretto.plan.places import Numbers
from stretto.plan.price import UPDATE, Prices, fills
from stretto.plan.space import Candidate

SLACK = 1 - 1e-9  # sums in another order differ in their last bits


class Least(NamedTuple):
    """Of a forward and a backward on the fastest machine: all layers, the largest one, an update of all."""

    whole: float
    largest: float
    late: float  # of the backward, weight gradients at most
    update: float


class Bounds:
    """Lower bounds of a problem's candidates."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.least = lru_cache(maxsize=None)(self._least)
        self.inside = lru_cache(maxsize=None)(self._inside)

    def _least(
        self, kinds: frozenset[object], tensor: int, space: tuple[int, int], examples: float, split: bool
    ) -> Least:
        rows = np.minimum.reduce([self.prices.rows(kind, tensor, space, examples) for kind in kinds])  # type: ignore
        forward, backward, inputs, weights = rows.T[:4]
        trained = np.flatnonzero(weights)
        lowest = int(trained[0]) if len(trained) else len(weights)
        down = np.minimum(backward, inputs + weights) if split else backward.copy()
        down[:lowest] = 0.0  # the first stage may hold them, and computes no gradient of the data
        if lowest < len(weights):
            down[lowest] = min(down[lowest], weights[lowest])
        each: Numbers = forward + down
        late = float(weights.max(initial=0.0) * len(weights) + backward.sum())
        return Least(float(each.sum()), float(each.max()), late, float(rows[:, UPDATE].sum()))

    def _inside(self, c: Candidate) -> float:
        """What processes that share stages tell each other for all layers, where links are best."""
        return min(
            float(sum(map(np.sum, self.prices.inside(c.mesh, c.pipeline, worker, c.examples))))
            for worker in self.representatives(c)
        )

    def representatives(self, c: Candidate) -> list[int]:
        """One worker for every sort of links inside stages."""
        place = self.prices.where(c)
        return list({tuple(map(id, links)): worker for worker, links in enumerate(place.parts)}.values())

    def seconds(self, c: Candidate) -> float:
        """A step takes at least that long."""
        place = self.prices.where(c)
        kinds = frozenset(kind for each in place.machines for kind in each)
        least = self.least(kinds, c.tensor, c.space, c.examples, c.clock.split)
        whole = least.whole + (self.inside(_key(c)) if c.mesh.inside > 1 else 0.0)
        turns = c.microbatches * c.clock.chunks + c.pipeline - 1 if c.clock.chunks > 1 else c.microbatches - fills(c)
        mean = (turns * whole + c.clock.chunks * self.ends(c, least)) / c.stages
        fill = 0.0
        if fills(c):
            fill = max(0.0, whole - 2 * least.late) if c.clock.late and c.stages > 1 else whole
        return float(fill + max(mean, turns * least.largest)) * SLACK

    def ends(self, c: Candidate, least: Least) -> float:
        """Updates and sums of gradients of all stages, without the latency of messages."""
        if c.shard != "none":
            return least.update / c.data
        among = c.data * c.space[0] * c.space[1]
        place = self.prices.where(c)
        slowest = [max((link.seconds_per_byte for link in links), default=0.0) for links in place.replicas]
        gradients = sum(layer.gradient_bytes for layer in self.prices.layers(c.tensor, c.space))
        return least.update + 2 * (among - 1) / among * gradients * min(slowest)

    def fits(self, c: Candidate) -> bool:
        """Whether weights, gradients and state would fit if they were spread evenly over all workers."""
        return self.bytes(c) * SLACK <= sum(self.prices.where(c).memory)

    def bytes(self, c: Candidate) -> float:
        """Weights, gradients and state of all stages."""
        layers = self.prices.layers(c.tensor, c.space)
        weights, gradients, state = _totals(self.prices, c.tensor, c.space, layers)
        if c.shard == "fully-shard":
            return weights + gradients + (weights + state) / c.data
        if c.shard != "none":
            return (weights + gradients + state) / c.data
        return weights + gradients + state


def _totals(prices: Prices, tensor: int, space: tuple[int, int], layers: object) -> tuple[float, float, float]:
    sizes = prices.sizes(tensor, space, 1.0)
    return float(sizes.parameters[0, -1]), float(sizes.gradients[0, -1]), float(sizes.state[0, -1])


def _key(c: Candidate) -> Candidate:
    """What the processes inside its stages do depends on no more than this."""
    share = c.examples
    return (
        Candidate(
            pipeline=c.pipeline, tensor=c.tensor, space=c.space, data=c.data, microbatches=c.microbatches, batch=c.batch
        )
        if share
        else c
    )


NEVER = inf
