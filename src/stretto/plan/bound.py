"""What no way to cut the layers can go below: candidates that cannot win, or cannot fit, are not priced.

Two bounds: one from sums over all layers, which takes microseconds, and one from the layers' exact bottleneck without
messages, for candidates that pass the first.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from stretto.mesh import Mesh
from stretto.plan.candidate_costs import UPDATE, Prices, Table, between, fills
from stretto.plan.partition import least_bottleneck
from stretto.plan.places import DeviceKind, Numbers, message, receiving, sending
from stretto.plan.search_space import Candidate

SLACK = 1 - 1e-9  # sums in another order differ in their last bits


class Axes(NamedTuple):
    """What bounds need of a mesh and its pipeline: kinds of machines, memory, workers that stand for all, a byte.

    And the runtime's own time on the luckiest machine.
    """

    kinds: tuple[DeviceKind, ...]
    memory: float
    workers: tuple[int, ...]  # one for each sort of links inside stages
    seconds_per_byte: float  # among replicas of the luckiest stage
    per_action: float
    per_step: float


class Told(NamedTuple):
    """Of a micro-batch, one way through all stages: what processes that share stages tell each other (both ways).

    And what of messages between workers is on its way, and what keeps their ends busy.
    """

    inside: float
    travel: float
    ends: float


class Least(NamedTuple):
    """Of all layers on the fastest machine: a forward and a backward, a forward, an update.

    `split` is a forward with I and W on their own but for the first stage's I, at least: a stage's W goes whole through
    its layers with weights, but for `gap` at most. `forward_share` and `input_share` are the largest shares of a
    forward, and of an input gradient, in a layer's forward and backward.
    """

    whole: float
    forward: float
    update: float
    separate: float
    split: float
    gap: float
    forward_share: float
    input_share: float


class Total(NamedTuple):
    """Bytes of all layers."""

    parameters: float
    gradients: float
    state: float


Passes = Literal["whole", "split", "late"]  # the backward of a stage above the first: B, I and W, at least W


def returns(c: Candidate) -> bool:
    """Whether every stage but the first sends a gradient down."""
    return c.gradients.everywhere


class Bounds:
    """Lower bounds of a problem's candidates."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.axes = lru_cache(maxsize=None)(self._axes)
        self.least = lru_cache(maxsize=None)(self._least)
        self.told = lru_cache(maxsize=None)(self._told)
        self.total = lru_cache(maxsize=None)(self._total)
        self.bottleneck = lru_cache(maxsize=None)(self._bottleneck)
        self.static = lru_cache(maxsize=64)(self._static)
        self.kept = lru_cache(maxsize=64)(self._kept)

    def _axes(self, mesh: Mesh, pipeline: int) -> Axes:
        place = self.prices.places(mesh, pipeline)
        slowest = [max((link.seconds_per_byte for link in links), default=0.0) for links in place.replicas]
        kinds = tuple(sorted({kind for each in place.machines for kind in each}))
        devices = [self.prices.problem.cluster.devices[kind.device] for kind in kinds]
        return Axes(
            kinds,
            sum(place.memory),
            tuple({tuple(map(id, links)): worker for worker, links in enumerate(place.parts)}.values()),
            min(slowest),
            min(device.per_action for device in devices),
            min(device.per_step for device in devices),
        )

    def _least(self, kinds: tuple[DeviceKind, ...], tensor: int, space: tuple[int, int], examples: float) -> Least:
        rows = np.minimum.reduce([self.prices.rows(kind, tensor, space, examples) for kind in kinds])
        forward, backward, inputs, weights = rows.T[:4]
        trained = np.flatnonzero(weights)
        lowest = int(trained[0]) if len(trained) else len(weights)
        down = backward.copy()
        down[:lowest] = 0.0  # the first stage may hold them, and computes no gradient of the data
        if lowest < len(weights):
            down[lowest] = min(down[lowest], weights[lowest])
        each = forward + down
        trains = weights > 0
        separate = forward + np.where(trains, np.minimum(down, weights), 0.0)
        halves = np.where(np.arange(len(weights)) > lowest, inputs, 0.0)
        return Least(
            float(each.sum()), float(forward.sum()), float(rows[:, UPDATE].sum()), float(separate.sum()),
            float((forward + np.where(trains, down, 0.0) + halves).sum()),
            float((backward - weights)[trains].max(initial=0.0)), share(forward, each),
            share(halves, forward + np.where(trains, down, 0.0)),
        )  # fmt: skip

    def _told(self, mesh: Mesh, pipeline: int, examples: float) -> Told:
        axes, place = self.axes(mesh, pipeline), self.prices.places(mesh, pipeline)
        inside = 0.0
        if mesh.inside > 1:
            every = (self.prices.inside(mesh, pipeline, worker, examples) for worker in axes.workers)
            inside = min(float(ups.sum() + downs.sum()) for ups, downs in every)
        sizes, links = self.prices.sizes(mesh.tensor, mesh.space, examples), place.ahead[:-1]
        shortest = np.array([min(sizes.output[1:].min(), sizes.input[:-1].min())])
        travel = sum(message(link, shortest)[0] for link in links)
        ends = sum(sending(link, shortest)[0] + receiving(link, shortest)[0] for link in links)
        return Told(inside, float(travel), float(ends))

    def _total(self, tensor: int) -> Total:
        sizes = self.prices.sizes(tensor, (1, 1), 1.0)
        return Total(*(float(table[0, -1]) for table in (sizes.parameters, sizes.gradients, sizes.state)))

    def seconds(self, c: Candidate) -> float:
        """A step takes at least that long: stages as even as their sums allow."""
        mesh, planning, axes, stages = c.mesh, c.planning, self.axes(c.mesh, c.pipeline), c.stages
        least = self.least(axes.kinds, mesh.tensor, mesh.space, c.examples)
        inside, travel, _ = self.told(mesh, c.pipeline, c.examples)
        whole, parts, own = (least.whole if returns(c) else least.separate) + inside, float(stages), self.own(c, axes)
        if planning.split and stages > 1:
            parts_with_inputs = parts + least.input_share
            together = (least.split - stages * least.gap) / parts_with_inputs
            if together > least.separate / parts:
                whole, parts = least.split - stages * least.gap + inside, parts_with_inputs
            else:
                whole = least.separate + inside
        if c.recompute:  # of all stages but perhaps the last
            whole, parts = whole + least.forward, parts + least.forward_share
        if c.shard == "fully-shard(reshard=True)":
            whole += 3 * (mesh.data - 1) / mesh.data * self.total(mesh.tensor).gradients * axes.seconds_per_byte
        turn = whole + own + (2 * travel * planning.stages_per_worker if planning.messages == "exposed" else 0.0)
        turns = count(c)
        mean = (turns * turn + planning.stages_per_worker * self.ends(c, axes, least)) / parts
        if planning.waits == "chunk":  # some chunk has its share of everything
            mean = max(mean, turn / c.losses)
        if planning.fills_bubble and stages > 1:  # all but the first wait for a forward at least, and that one runs M
            mean = max(mean, least.forward + (1 - 1 / c.microbatches) * mean)
        return (self.fill(c, least.whole + inside + own, travel) + mean) * SLACK

    def own(self, c: Candidate, axes: Axes) -> float:
        """What the runtime takes at least for a micro-batch on all stages together: its actions, ends of messages."""
        ends = self.told(c.mesh, c.pipeline, c.examples).ends
        ways = 2 if returns(c) else 1
        return 2 * c.stages * axes.per_action + ways * c.planning.stages_per_worker * ends

    def fill(self, c: Candidate, whole: float, travel: float) -> float:
        """At least what filling the pipeline takes."""
        if not fills(c):
            return 0.0
        return 2 * travel if c.planning.fills_bubble and c.stages > 1 else whole + 2 * travel

    def tighter(self, c: Candidate) -> float:
        """The same from the exact bottleneck of computing alone, which knows how large layers are."""
        mesh, axes = c.mesh, self.axes(c.mesh, c.pipeline)
        least = self.least(axes.kinds, mesh.tensor, mesh.space, c.examples)
        inside, travel, _ = self.told(mesh, c.pipeline, c.examples)
        passes: Passes = "split" if c.planning.split and c.stages > 1 else "whole" if returns(c) else "late"
        largest = self.bottleneck(axes.kinds, mesh.tensor, mesh.space, c.examples, c.stages, passes, c.recompute)
        largest += 2 * axes.per_action
        load = count(c) * largest
        if c.planning.fills_bubble and c.stages > 1:
            load = max(load, least.forward + (c.microbatches - 1) * largest)
        return (self.fill(c, least.whole + inside + self.own(c, axes), travel) + load) * SLACK

    def _bottleneck(
        self, kinds: tuple[DeviceKind, ...], tensor: int, space: tuple[int, int], examples: float, stages: int,
        passes: Passes, recompute: bool,
    ) -> float:  # fmt: skip
        times = [self.prices.times(kind, tensor, space, examples) for kind in kinds]
        forward, backward, inputs, weights = (np.minimum.reduce([each[i] for each in times]) for i in range(4))
        plain = np.where(self.prices.valid, forward + backward, np.inf)
        above = {"whole": forward + backward, "split": forward + inputs + weights, "late": forward + weights}[passes]
        upper = np.where(self.prices.valid, above, np.inf)
        again = forward if recompute else np.zeros_like(forward)
        every = [plain + again, *[upper + again] * (stages - 2), upper]
        return least_bottleneck(every[-stages:] if stages > 1 else [plain]) or 0.0

    def ends(self, c: Candidate, axes: Axes, least: Least) -> float:
        """Updates and sums of gradients of all stages, without the latency of messages."""
        own = c.stages * axes.per_action + c.pipeline * axes.per_step
        if c.shard == "fully-shard(reshard=True)":
            return least.update / c.mesh.data + own
        among = c.mesh.data * c.mesh.space[0] * c.mesh.space[1]
        total = self.total(c.mesh.tensor)
        summed = 2 * (among - 1) / among * min(total.gradients, total.parameters) * axes.seconds_per_byte
        return least.update / (1 if c.shard == "none" else c.mesh.data) + summed + own

    def fits(self, c: Candidate) -> bool:
        """Whether weights, gradients and state would fit if they were spread evenly over all workers."""
        return self.bytes(c) * SLACK <= self.axes(c.mesh, c.pipeline).memory

    def bytes(self, c: Candidate) -> float:
        """Weights, gradients and state of all stages."""
        total, data = self.total(c.mesh.tensor), c.mesh.data
        if c.shard == "fully-shard":
            return total.parameters + total.gradients + (total.parameters + total.state) / data
        return sum(total) / (1 if c.shard == "none" else data)

    def reaches(self, c: Candidate) -> bool:
        """Whether stages that each take as many layers as their memory holds reach the last one.

        Of activations only what grows with every layer counts, so that fewer layers never need more.
        """
        last, memory = len(self.prices.problem.layers), self.prices.where(c).memory
        kept = self.kept(c.mesh.tensor, c.mesh.space, c.examples)
        method, planning, start = c.planned, c.planning, 0
        for s in range(c.stages):
            at = c.at(s)
            held = 1.0 if c.recomputes(s) else planning.held(at)
            static = self.static(c.mesh.tensor, c.shard, c.mesh.data, method.versions(at))
            room = memory[c.home(s)] / planning.stages_per_worker
            taken = (static[start, start:] + held * kept[start, start:]) * SLACK
            start += int(np.searchsorted(taken, room, side="right")) - 1
            if start >= last:
                return True
        return False

    def _static(self, tensor: int, shard: str, data: int, versions: float) -> Table:
        sizes = self.prices.sizes(tensor, (1, 1), 1.0)
        weights, gradients, state = sizes.parameters, sizes.gradients, sizes.state
        if shard == "fully-shard":
            return weights + gradients + (weights + state) / data
        return versions * weights + gradients + state if shard == "none" else (weights + gradients + state) / data

    def _kept(self, tensor: int, space: tuple[int, int], examples: float) -> Table:
        layers = self.prices.layers(tensor, space)
        return between(np.array([max(0.0, (x.activation - x.shared).at(examples)) for x in layers]))


def share(part: Numbers, whole: Numbers) -> float:
    """The largest share of a part, infinite where there is nothing but it."""
    found = np.divide(part, whole, out=np.full_like(part, np.inf), where=whole > 0)
    return float(np.where(part > 0, found, 0.0).max(initial=0.0))


def count(c: Candidate) -> float:
    """How many turns of the busiest stage a step has, but for what fills it."""
    if c.planning.order == "v":
        return c.microbatches * c.planning.stages_per_worker + (c.pipeline - 1) / 3  # the longest of F, I and W
    if c.planning.stages_per_worker > 1:
        return c.microbatches * c.planning.stages_per_worker + c.pipeline - 1
    return c.microbatches - (fills(c) and not c.planning.fills_bubble)
