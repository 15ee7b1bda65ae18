"""Lower bounds of a candidate over all partitions: candidates that cannot win, or cannot fit, are not priced.

There are two bounds: one from sums over all layers and from the worker that has most to do, which takes microseconds,
and one from the exact bottleneck of the work inside stages, for candidates that pass the first.
"""

from collections.abc import Collection, Hashable
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from stretto.cost.cluster import Link
from stretto.cost.communication import message, receiving, sending
from stretto.cost.layer_sums import Numbers, Table, range_sums, running_sums
from stretto.mesh import Mesh
from stretto.plan.candidate_costs import Prices
from stretto.plan.layer_prices import ACCUMULATE, UPDATE
from stretto.plan.memory_bound import SLACK, MemoryBounds
from stretto.plan.method_shape import MethodShape, filling
from stretto.plan.objective import Rates
from stretto.plan.partition import least_bottleneck
from stretto.plan.places import Bill, DeviceKind, Places
from stretto.plan.problem import LayerForm
from stretto.plan.search_space import Candidate

ENDS = ("input", "output")  # what may be a message


class MeshSummary(NamedTuple):
    """The facts of a mesh and its pipeline that bounds need.

    `workers` has one worker for each set of links inside stages, `per_action` and `per_step` are the runtime's own
    seconds on the fastest device. `all_reduce` are the least seconds of sums of gradients among replicas, of all
    stages, and `resharding` of gathering sharded weights twice in a micro-batch and scattering gradients, both without
    latencies.
    """

    kinds: tuple[DeviceKind, ...]
    workers: tuple[int, ...]
    per_action: float
    per_step: float
    all_reduce: float
    resharding: float


class LeastMessages(NamedTuple):
    """The least seconds of a micro-batch's communication.

    `inside` is communication inside all stages, forward and backward, and `of_layers` each layer's. `transit` and
    `overhead` are of the messages of one pass through all stages: the time that keeps neither end busy, and the time of
    sending and receiving.
    """

    inside: float
    of_layers: Numbers
    transit: float
    overhead: float


class LeastWork(NamedTuple):
    """The least seconds of all layers on the fastest device.

    `whole` is a forward and a backward, `forward` a forward, `update` an update, `separate` a forward and the least
    weight gradients, `accumulate` adding gradients to earlier ones. `split` is a forward with I and W as separate
    actions, without the first stage's I; the W of a stage takes at least as long as the backwards of its layers with
    weights, minus `gap`. `forward_share` and `input_share` are the largest shares that a forward, and an input
    gradient, have in one layer's total. `wholes`, `separates` and `accumulates` are those of each layer.
    """

    whole: float
    forward: float
    update: float
    separate: float
    split: float
    gap: float
    forward_share: float
    input_share: float
    accumulate: float
    wholes: Numbers
    separates: Numbers
    accumulates: Numbers


class LeastStep(NamedTuple):
    """The least seconds of a step, and those in which workers are `busy` in it, summed over them.

    `busy` is with a second forward in all stages: the last one may spare at most `spared` seconds of them, which are at
    most a `share` of what its worker is busy for.
    """

    seconds: float
    busy: float
    spared: float = 0.0
    share: float = 0.0

    def value(self, rates: Rates) -> float:
        """A lower bound of the objective's value."""
        if not rates.busy:
            return rates.step * self.seconds
        more = min(rates.busy)
        if not self.spared:
            return rates.step * self.seconds + more * self.busy

        def if_spared(seconds: float) -> float:
            step = max(self.seconds, seconds / self.share * SLACK)
            return rates.step * step + more * (self.busy - seconds)

        return min(if_spared(min(self.seconds * self.share, self.spared)), if_spared(self.spared))


class OnAxes(NamedTuple):
    """What bounds of all methods on the same axes have in common."""

    axes: MeshSummary
    least: LeastWork
    messages: LeastMessages


Place = tuple[Mesh, int, tuple[int, ...]]  # a mesh, the workers of its pipeline, and their placement
Passes = Literal["whole", "split", "weights"]  # the backward of a stage but the first: B, I and W, or at least W


class Bounds:
    """Lower bounds of the candidates of a problem."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices = prices.least
        self.axes = lru_cache(maxsize=None)(self._axes)
        self.kinds = lru_cache(maxsize=None)(self._kinds)
        self.least = lru_cache(maxsize=None)(self._least)
        self.messages = lru_cache(maxsize=None)(self._messages)
        self.message = lru_cache(maxsize=None)(self._message)
        self.memory = MemoryBounds(prices)
        self.total = self.memory.total
        self.bottleneck = lru_cache(maxsize=None)(self._bottleneck)
        self.fullest = lru_cache(maxsize=None)(self._fullest)
        self.on_axes = lru_cache(maxsize=None)(self._on_axes)

    def _axes(self, mesh: Mesh, pipeline: int, placement: tuple[int, ...]) -> MeshSummary:
        place = self.prices.places(mesh, pipeline, placement)
        seconds_per_byte = [max(map(least_seconds_per_byte, links), default=0.0) for links in place.replicas]
        kinds = tuple(sorted({kind for machines in place.machines for kind in machines}))
        inside = [(*weights, None, *slabs) for weights, slabs in zip(place.weights, place.slabs, strict=True)]
        devices = [self.prices.problem.cluster.devices_by_kind[kind.worker] for kind in kinds]
        return MeshSummary(
            kinds,
            tuple({tuple(map(id, links)): worker for worker, links in enumerate(inside)}.values()),
            min(least(device.per_action, device.alone_per_action) for device in devices),
            min(least(device.per_step, device.alone_per_step) for device in devices),
            self.all_reduce(mesh, min(seconds_per_byte)),
            3 * (mesh.data - 1) / mesh.data * self.total(mesh.tensor).gradients * min(seconds_per_byte),
        )

    def _least(self, kinds: tuple[DeviceKind, ...], forms: tuple[LayerForm, ...], examples: float) -> LeastWork:
        rows = np.minimum.reduce([self.prices.least_rows(kind, form, examples) for kind in kinds for form in forms])
        forward, backward, inputs, weights = rows.T[:4]
        with_weights = np.flatnonzero(weights)
        lowest = int(with_weights[0]) if len(with_weights) else len(weights)
        least_backward = backward.copy()
        least_backward[:lowest] = 0.0  # the first stage may hold these layers, and computes no gradient of its input
        if lowest < len(weights):
            least_backward[lowest] = min(least_backward[lowest], weights[lowest])
        both = forward + least_backward
        has_weights = weights > 0
        separate = forward + np.where(has_weights, np.minimum(least_backward, weights), 0.0)
        accumulates = rows[:, ACCUMULATE]
        input_gradients = np.where(np.arange(len(weights)) > lowest, inputs, 0.0)
        return LeastWork(
            float(both.sum()), float(forward.sum()), float(rows[:, UPDATE].sum()), float(separate.sum()),
            float((forward + np.where(has_weights, least_backward, 0.0) + input_gradients).sum()),
            float((backward - weights)[has_weights].max(initial=0.0)), share(forward, both),
            share(input_gradients, forward + np.where(has_weights, least_backward, 0.0)),
            float(accumulates.sum()), both, separate, accumulates,
        )  # fmt: skip

    def _messages(
        self, mesh: Mesh, pipeline: int, placement: tuple[int, ...], forms: tuple[LayerForm, ...], examples: float
    ) -> LeastMessages:
        axes, place = self.axes(mesh, pipeline, placement), self.prices.places(mesh, pipeline, placement)
        inside, of_layers = 0.0, np.zeros(len(self.prices.problem.layers))
        if mesh.inside > 1:
            communication = [
                forward + backward
                for worker in axes.workers
                for form in forms
                for forward, backward in [
                    self.prices.intra_stage(
                        mesh, pipeline, placement, worker, form, examples, self.prices.hides_exchanges
                    )
                ]
            ]
            inside, of_layers = min(float(each.sum()) for each in communication), np.minimum.reduce(communication)
        least_bytes, links = np.array([min(self.message(form, examples) for form in forms)]), place.ahead[:-1]
        transit = overhead = 0.0
        for link in {id(link): link for link in links}.values():
            number = sum(other is link for other in links)
            transit += number * float(message(link, least_bytes)[0])
            overhead += number * float(sending(link, least_bytes)[0] + receiving(link, least_bytes)[0])
        return LeastMessages(inside, of_layers, transit, overhead)

    def _message(self, form: LayerForm, examples: float) -> float:
        # The bytes of the smallest message between stages.
        return self.prices.message_share(form) * min(
            float(self.prices.amount(form, key, examples).min()) for key in ENDS
        )

    def _on_axes(
        self, mesh: Mesh, pipeline: int, placement: tuple[int, ...], forms: tuple[LayerForm, ...], examples: float
    ) -> OnAxes:
        axes = self.axes(mesh, pipeline, placement)
        least = self.least(axes.kinds, forms, examples)
        return OnAxes(axes, least, self.messages(mesh, pipeline, placement, forms, examples))

    def bill(self, c: Candidate) -> Places | Bill:
        """What a candidate's workers cost; without building their places, where workers are alike."""
        cluster = self.prices.problem.cluster
        if cluster.is_uneven or c.placement:
            return self.prices.places_of(c)
        return Bill.of(cluster, c.pipeline, c.mesh.data * c.mesh.inside)

    def _kinds(self, workers: int) -> tuple[DeviceKind, ...]:
        cluster = self.prices.problem.cluster
        return tuple(sorted({DeviceKind(cluster.kinds[0], crowded) for crowded in cluster.crowded(range(workers))}))

    def computing(
        self, c: Candidate, forms: tuple[LayerForm, ...], *, whole: bool, shards: Collection[str]
    ) -> "LeastStep":
        """A step of candidates on the same axes, with as many micro-batches and these shardings: computing alone.

        Where `whole`, of methods whose stages all run a whole backward. Where c runs whole stages again, all do.
        """
        even = not (self.prices.problem.cluster.is_uneven or c.placement)
        kinds = self.kinds(c.workers) if even else self.axes(c.mesh, c.pipeline, c.placement).kinds
        least, again = self.least(kinds, forms, c.examples), c.recompute == "stage"
        turn = (least.whole if whole else least.separate) + self.share_added(c, shards) * least.accumulate
        turn += again * least.forward
        busy = (c.microbatches * turn + least.update / c.mesh.data) * SLACK
        share = again * (least.forward_share if whole else 1.0)
        return LeastStep(busy / (c.pipeline + share), busy, again * c.microbatches * least.forward, share)

    def working(
        self, c: Candidate, forms: tuple[LayerForm, ...], *, whole: bool, shards: Collection[str]
    ) -> "LeastStep":
        """The same with the communication inside stages and among replicas, and of the worker that has most to do."""
        axes, _, messages = self.on_axes(c.mesh, c.pipeline, c.placement, forms, c.examples)
        computing = self.computing(c, forms, whole=whole, shards=shards)
        busy = computing.busy + (c.microbatches * messages.inside + axes.all_reduce) * SLACK
        added = self.share_added(c, shards)
        fullest = self.fullest((c.mesh, c.pipeline, c.placement), forms, c.examples, whole, added)
        workers = c.pipeline + computing.share
        return computing._replace(seconds=max(busy / workers, c.microbatches * fullest * SLACK), busy=busy)

    def share_added(self, c: Candidate, shards: Collection[str]) -> float:
        """The least share of its gradients that a process adds to those of earlier micro-batches."""
        if c.microbatches == 1:
            return 0.0
        shared = self.prices.as_large_models and any(shard.startswith("fully") for shard in shards)
        return 1 / c.mesh.data if shared else 1.0

    def _fullest(self, place: Place, forms: tuple[LayerForm, ...], examples: float, whole: bool, added: float) -> float:
        # The least seconds of a micro-batch of the worker that has most to do, communication inside it included.
        (_, pipeline, _), (_, least, messages) = place, self.on_axes(*place, forms, examples)
        seconds = (least.wholes if whole else least.separates) + added * least.accumulates + messages.of_layers
        return least_of_fullest(seconds, pipeline)

    def seconds(self, c: Candidate, forms: tuple[LayerForm, ...] = ()) -> float:
        """A lower bound of a step's seconds, from sums over all layers: as if they divided evenly among stages.

        With `forms`, of the candidate with its layers run in any of them: on layers that take the least time of all.
        """
        forms, shape = forms or (c.form,), MethodShape.of(c)
        axes, least, messages = self.on_axes(c.mesh, c.pipeline, c.placement, forms, c.examples)
        inside, transit, per_worker = messages.inside, messages.transit, shape.per_worker
        added = self.share_added(c, (c.shard,))
        whole, parts = (least.whole if shape.receives else least.separate) + inside, float(shape.stages)
        overhead, accumulate = self.overhead(shape, axes, messages), added * least.accumulate
        if self.goes_back_twice(shape):
            parts_with_inputs = parts + per_worker * least.input_share
            per_part = (least.split - shape.stages * least.gap) / parts_with_inputs
            if per_part > least.separate / parts:
                whole, parts = least.split - shape.stages * least.gap + inside, parts_with_inputs
            else:
                whole = least.separate + inside
        whole += accumulate
        if c.recompute == "stage":  # in all stages but perhaps the last
            whole, parts = whole + least.forward, parts + per_worker * least.forward_share
        if c.shard == "fully-shard(reshard=True)":
            whole += axes.resharding
        turn = whole + overhead + (2 * transit * per_worker if shape.exposes else 0.0)
        gaps = shape.gap_forwards * least.forward
        mean = (shape.turns * turn + gaps + per_worker * self.ends(c, axes, least)) / parts
        if shape.waits_in_chunks:  # one chunk has at least its share of the work
            mean = max(mean, turn / c.losses)
        if shape.ends_after_a_forward:  # the first stage runs M forwards, the others wait for one at least
            mean = max(mean, least.forward + (1 - 1 / c.microbatches) * mean)
        place, whole_backward = (c.mesh, c.pipeline, c.placement), self.goes_back_whole(shape)
        fullest = self.fullest(place, forms, c.examples, whole_backward, added)
        load = max(mean, shape.turns * (fullest / per_worker + 2 * axes.per_action))
        return (filling(shape, least.whole + inside + overhead + accumulate, transit) + load) * SLACK

    def goes_back_whole(self, shape: MethodShape) -> bool:
        """Whether all stages run a backward as long as a whole one at least."""
        return shape.receives and not self.goes_back_twice(shape)

    def goes_back_twice(self, shape: MethodShape) -> bool:
        """Whether stages run I and W, each backward through all operators."""
        return shape.splits and not self.prices.problem.weight_products

    def value(self, c: Candidate, rates: Rates, seconds: float, forms: tuple[LayerForm, ...] = ()) -> float:
        """A lower bound of the objective's value where a step takes so many `seconds` at least, without correction.

        With `forms`, of the candidate with its layers run in any of them.
        """
        if not rates.busy:
            return rates.step * seconds
        common = self.on_axes(c.mesh, c.pipeline, c.placement, forms or (c.form,), c.examples)
        least, busy = common.least, self.busy(c, common)
        if c.recompute != "stage" or c.recomputes(c.stages - 1):
            return LeastStep(seconds, busy).value(rates)
        return LeastStep(seconds, busy, c.microbatches * least.forward, least.forward_share).value(rates)

    def busy(self, c: Candidate, common: OnAxes) -> float:
        """The least seconds of a step in which workers are busy, summed over them, if all stages run forwards again."""
        axes, least, messages = common
        shape = MethodShape.of(c)
        whole = least.whole if shape.receives else least.separate
        if self.goes_back_twice(shape):
            whole = max(least.separate, least.split - shape.stages * least.gap)
        whole += least.forward if c.recompute == "stage" else 0.0
        if c.shard == "fully-shard(reshard=True)":
            whole += axes.resharding
        added = self.share_added(c, (c.shard,)) * least.accumulate
        turn = whole + messages.inside + added + self.overhead(shape, axes, messages)
        return (c.microbatches * turn + self.ends(c, axes, least)) * SLACK

    def overhead(self, shape: MethodShape, axes: MeshSummary, messages: LeastMessages) -> float:
        """The least seconds of the runtime and of sending and receiving for a micro-batch, summed over all stages."""
        directions = 2 if shape.receives else 1
        return 2 * shape.stages * axes.per_action + directions * shape.per_worker * messages.overhead

    def tighter(self, c: Candidate) -> float:
        """A tighter bound of a step's seconds: from the exact bottleneck of the work inside stages over all partitions.

        Of the work of a stage, or of that of one of a worker's stages, whose others may take no time.
        """
        axes, least, messages = self.on_axes(c.mesh, c.pipeline, c.placement, (c.form,), c.examples)
        shape, added = MethodShape.of(c), self.share_added(c, (c.shard,))
        passes: Passes = "split" if self.goes_back_twice(shape) else "whole" if shape.receives else "weights"
        workers = tuple(c.worker_of(s) for s in range(c.stages))
        bottleneck = self.bottleneck(
            (c.mesh, c.pipeline, c.placement), workers, c.form, c.examples, passes, c.recompute == "stage", added
        )
        bottleneck += 2 * axes.per_action
        load = shape.turns * bottleneck / shape.per_worker
        if shape.ends_after_a_forward:
            load = max(load, least.forward + (c.microbatches - 1) * bottleneck)
        turn = least.whole + messages.inside + self.overhead(shape, axes, messages) + added * least.accumulate
        return (filling(shape, turn, messages.transit) + load) * SLACK

    def _bottleneck(
        self,
        place: Place,
        workers: tuple[int, ...],
        form: LayerForm,
        examples: float,
        passes: Passes,
        recomputes: bool,
        added: float,
    ) -> float:
        places, last = self.prices.places(*place), len(workers) - 1
        hides_exchanges = self.prices.hides_exchanges and passes != "split"
        known: dict[Hashable, Table] = {}
        tables = []
        for s, worker in enumerate(workers):
            machines, again = places.machines[worker], recomputes and s < last
            links = (tuple(map(id, links[worker])) for links in (places.weights, places.slabs))
            key = (machines, *links, s == 0, again)
            if key not in known:
                inside = self.prices.intra_stage(*place, worker, form, examples, hides_exchanges)
                times = [self.prices.times(kind, form, examples) for kind in machines]
                forward, backward, inputs, weights, _, accumulate = (
                    np.maximum.reduce([kind_times[i] for kind_times in times]) for i in range(6)
                )
                forward = forward + range_sums(inside[0])
                seconds = {"whole": backward, "split": inputs + weights, "weights": weights}[
                    "weights" if s == 0 else passes
                ]
                seconds = (1 + again) * forward + seconds + range_sums(inside[1]) + added * accumulate
                known[key] = np.where(self.prices.valid, seconds, np.inf)
            tables.append(known[key])
        return least_bottleneck(tables) or 0.0

    def ends(self, c: Candidate, axes: MeshSummary, least: LeastWork) -> float:
        """The least seconds of updates and all-reduces of all stages, without latencies."""
        overhead = c.stages * axes.per_action + c.pipeline * axes.per_step
        if c.shard == "fully-shard(reshard=True)":
            return least.update / c.mesh.data + overhead
        update = least.update / (1 if c.shard == "none" else c.mesh.data)
        return update + axes.all_reduce + overhead

    def all_reduce(self, mesh: Mesh, seconds_per_byte: float) -> float:
        """The least seconds of sums of gradients among replicas, of all stages, without latencies.

        `seconds_per_byte` is the least, over workers, of the slowest link among a worker's replicas.
        """
        replicas = mesh.data * mesh.space[0] * mesh.space[1]
        total = self.total(mesh.tensor)
        return 2 * (replicas - 1) / replicas * min(total.gradients, total.parameters) * seconds_per_byte


def least(seconds: float, alone: float | None) -> float:
    """The smaller one of two figures, of which the second may not be known."""
    return seconds if alone is None else min(seconds, alone)


def least_of_fullest(seconds: Numbers, workers: int) -> float:
    """The least seconds of the worker that has most to do, whoever has which layers, each of so many seconds.

    Of the k W + 1 longest layers, one of W workers has k + 1.
    """
    if workers == 1:
        return float(seconds.sum())
    sums = running_sums(np.sort(seconds)[::-1])
    each = np.arange(1, (len(seconds) - 1) // workers + 2)
    longest = (each - 1) * workers + 1
    return float((sums[longest] - sums[longest - each]).max())


def least_seconds_per_byte(link: Link) -> float:
    """Seconds a byte of a link in any collective at least: none where collectives were measured, at rates of theirs."""
    if link.collectives:
        return 0.0
    ways = [*link.rings.values(), *([] if link.tree is None else [link.tree])]
    return 1 / max((way.bandwidth for way in ways), default=link.bandwidth)


def share(part: Numbers, whole: Numbers) -> float:
    """The largest share that `part` has of `whole` in one layer; infinite if `whole` is 0 and the part is not."""
    shares = np.divide(part, whole, out=np.full_like(part, np.inf), where=whole > 0)
    return float(np.where(part > 0, shares, 0.0).max(initial=0.0))
