"""Lower bounds of the bytes that a candidate needs: those that cannot fit are not priced."""

from collections.abc import Hashable, Iterator
from functools import lru_cache
from math import inf
from typing import NamedTuple, TypeVar

import numpy as np

from stretto.cost.layer_sums import Numbers, running_sums
from stretto.mesh import Mesh
from stretto.methods import StageAt
from stretto.plan.candidate_costs import Prices
from stretto.plan.counted_layers import least_by_count, least_sums
from stretto.plan.planned_methods import planned
from stretto.plan.problem import SHARD_OPTIMIZER, LayerForm
from stretto.plan.search_space import Candidate, CandidateGroup, MethodChoice, alone

Size = TypeVar("Size", float, Numbers)
SLACK = 1 - 1e-9  # of lower bounds: sums in another order differ in the last bits


class ModelBytes(NamedTuple):
    """Bytes of weights, gradients and optimizer state of all layers."""

    parameters: float
    gradients: float
    state: float


class MemoryBounds:
    """Lower bounds of the bytes of a problem's candidates."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.memory = lru_cache(maxsize=None)(self._memory)
        self.total = lru_cache(maxsize=None)(self._total)
        self.static = lru_cache(maxsize=64)(self._static)
        self.kept = lru_cache(maxsize=64)(self._kept)
        self.fewest = lru_cache(maxsize=None)(self._fewest)
        self.held = lru_cache(maxsize=None)(self._held)
        self.weights_by_count = lru_cache(maxsize=None)(self._weights_by_count)
        self.held_by_count = lru_cache(maxsize=None)(self._held_by_count)
        self.held_and_versions = lru_cache(maxsize=None)(self._held_and_versions)

    def _memory(self, mesh: Mesh, pipeline: int, placement: tuple[int, ...]) -> float:
        # Bytes of all workers of a pipeline.
        return sum(self.prices.places(mesh, pipeline, placement).memory)

    def _total(self, tensor: int) -> ModelBytes:
        sizes = self.prices.sizes(LayerForm(tensor), 1.0)
        return ModelBytes(*(float(table[0, -1]) for table in (sizes.parameters, sizes.gradients, sizes.state)))

    def that_fit(self, group: CandidateGroup, *, placed: bool = False) -> Iterator[CandidateGroup]:
        """A group without kinds of recomputation that fit with none of its candidates.

        Those that run whole stages again are a group of their own where none that recompute nothing fit. Without
        building places, so all of a group on workers that differ, unless it is `placed`.
        """
        axes, cluster = group.axes, self.prices.problem.cluster
        if placed:
            memory = self.memory(axes.mesh, axes.pipeline, axes.placement)
        elif cluster.is_uneven or axes.placement:
            yield group
            return
        else:
            memory = axes.pipeline * cluster.device(0).memory
        room = memory - self.least_static(group) * SLACK
        if room < 0:
            return
        known: dict[tuple[object, ...], tuple[tuple[str, ...], tuple[str, ...]]] = {}
        layers, stages = [], []
        for choice in group.choices:
            key = (self.fewest_of(axes, choice), choice.recompute, choice.sequences)
            if key not in known:
                known[key] = self.fitting(axes, room, *key)
            of_layers, of_stages = known[key]
            if of_layers:
                layers.append(choice if of_layers == choice.recompute else choice._replace(recompute=of_layers))
            if of_stages:
                stages.append(choice._replace(recompute=of_stages))
        if layers:
            yield group._replace(choices=layers)
        if stages:
            yield CandidateGroup(axes._replace(recompute="stage"), stages)

    def fitting(
        self, c: Candidate, room: float, fewest: float, recompute: tuple[str, ...], sequences: tuple[bool, ...]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The kinds of recomputation with which activations need no more than `room` bytes of all workers.

        Every stage keeps those of the `fewest` micro-batches at least, but where it runs whole forwards again. That
        kind stands apart, unless recomputing nothing is among the others.
        """
        tensor, space, examples = c.mesh.tensor, c.mesh.space, c.examples
        fitting = [
            kind
            for kind in recompute
            if kind == "stage"
            or any(
                fewest * self.held(LayerForm(tensor, space, each, kind), examples) * SLACK <= room for each in sequences
            )
        ]
        if "stage" not in fitting or "none" in fitting:
            return tuple(fitting), ()
        return tuple(kind for kind in fitting if kind != "stage"), ("stage",)

    def _fewest(self, method: str, per_worker: int, pipeline: int, microbatches: int, ahead: int) -> float:
        # The micro-batches that a stage keeps at least: the first one, or the last.
        planning = planned(method).planning_of(per_worker)
        stages = pipeline * planning.stages_per_worker
        return min(
            planning.held(StageAt(s, stages, microbatches, ahead, planning.stages_per_worker)) for s in (0, stages - 1)
        )

    def fewest_of(self, axes: Candidate, choice: MethodChoice) -> float:
        return self.fewest(choice.method, choice.per_worker, axes.pipeline, axes.microbatches, axes.ahead)

    def least_static(self, group: CandidateGroup) -> float:
        """The least bytes of weights, gradients and optimizer state of all stages, of a group's candidates."""
        total, data = self.total(group.axes.mesh.tensor), group.axes.mesh.data
        return min(static_bytes(*total, shard, data) for shard in group.shards)

    def of_group(self, group: CandidateGroup) -> float:
        """The least bytes of the fullest worker under any candidate of a group, as if all divided evenly.

        Without activations if some run whole stages again.
        """
        axes, held = group.axes, 0.0
        if not any("stage" in choice.recompute for choice in group.choices):
            fewest = min(self.fewest_of(axes, choice) for choice in group.choices)
            held = fewest * min(self.held(form, axes.examples) for form in group.forms)
        return (self.least_static(group) + held) * SLACK / axes.pipeline

    def of_candidate(self, c: Candidate) -> float:
        """A tighter bound, within 1 % of the least bytes with which the stages reach the last layer."""
        most = max(self.prices.places_of(c).memory)
        low = min(self.of_group(alone(c)), most)
        high = low
        while high < most and not self.reaches(c, high):
            low, high = high, 2 * high
        while high > 1.01 * low:
            middle = (low + high) / 2
            low, high = (low, middle) if self.reaches(c, middle) else (middle, high)
        return low

    def reaches(self, c: Candidate, limit: float = inf) -> bool:
        """Whether the stages reach the last layer if each worker holds what its memory allows, and a limit of bytes.

        Only activations that grow with every layer count, so that fewer layers never need more memory.
        """
        if c.planning.stages_per_worker > 1:
            return self.workers_reach(c, limit)
        last, memory = len(self.prices.problem.layers), self.allowed(c, limit)
        kept = self.kept(c.form, c.examples)
        stages = self.held_and_versions(c.method, c.stages, c.microbatches, c.ahead, c.per_worker, c.losses)
        held = [1.0 if c.recompute == "stage" and each > 1 else each for each, _ in stages]
        static = [self.static(c.mesh.tensor, c.shard, c.mesh.data, versions) for _, versions in stages]
        most = self.static(c.mesh.tensor, c.shard, c.mesh.data, max(versions for _, versions in stages))
        if reach((most + max(held) * kept) * SLACK, c.stages, min(memory)) >= last:
            return True
        start = 0
        for s in range(c.stages):
            needed = (static[s] + held[s] * kept) * SLACK
            start = int(needed.searchsorted(needed[start] + memory[s], side="right")) - 1
            if start >= last:
                return True
        return False

    def allowed(self, c: Candidate, limit: float) -> list[float]:
        """The bytes that each worker may hold: its memory, but no more than the limit."""
        return [min(each, limit) for each in self.prices.places_of(c).memory]

    def workers_reach(self, c: Candidate, limit: float) -> bool:
        """Whether workers of several stages can hold all layers, by the bytes that stages of n layers need at least."""
        memory, last = self.allowed(c, limit), c.stages - 1
        stages = self.held_and_versions(c.method, c.stages, c.microbatches, c.ahead, c.per_worker, c.losses)
        own: dict[int, list[tuple[float, float, bool, bool]]] = {}
        for s, (held, versions) in enumerate(stages):
            fewest = 0.0 if c.recompute == "stage" and held > 1 else held
            own.setdefault(c.worker_of(s), []).append((fewest, versions, s == 0, s == last))
        known: dict[Hashable, int] = {}
        total = 0
        for worker, kinds in own.items():
            key = memory[worker], *kinds
            if key not in known:
                needed = least_sums([self.least_bytes(c, *kind) for kind in kinds]) * SLACK
                fitting = np.flatnonzero(needed <= memory[worker])
                known[key] = int(fitting[-1]) if len(fitting) else 0
            if not known[key]:
                return False
            total += known[key]
        return total >= len(self.prices.problem.layers)

    def least_bytes(self, c: Candidate, held: float, versions: float, first: bool, last: bool) -> Numbers:
        """The least bytes of a stage with n layers, at n, that keeps so many micro-batches and versions of weights."""
        most = len(self.prices.problem.layers) - c.stages + 1
        weights = self.weights_by_count(c.mesh.tensor, c.shard, c.mesh.data, versions, most, first, last)
        return weights + held * self.held_by_count(c.form, c.examples, most, first, last) if held else weights

    def _weights_by_count(
        self, tensor: int, shard: str, data: int, versions: float, most: int, first: bool, last: bool
    ) -> Numbers:
        sums = self.static(tensor, shard, data, versions)
        return least_by_count(sums[None, :] - sums[:, None], most, first, last)

    def _held_by_count(self, form: LayerForm, examples: float, most: int, first: bool, last: bool) -> Numbers:
        return least_by_count(self.prices.sizes(form, examples).held, most, first, last)

    def _held_and_versions(
        self, method: str, stages: int, microbatches: int, ahead: int, per_worker: int, losses: int
    ) -> tuple[tuple[float, float], ...]:
        tried = planned(method)
        planning = tried.planning_of(per_worker)
        own = planning.stages_per_worker
        each = (StageAt(s, stages, microbatches, ahead, own, losses) for s in range(stages))
        return tuple((planning.held(at), tried.versions(at)) for at in each)

    def _static(self, tensor: int, shard: str, data: int, versions: float) -> Numbers:
        # Of the layers before each one; weights that layers share count at the first of them.
        sizes = self.prices.sizes(LayerForm(tensor), 1.0)
        return static_bytes(sizes.parameters[0], sizes.gradients[0], sizes.state[0], shard, data, versions)

    def _held(self, form: LayerForm, examples: float) -> float:
        # Of all layers.
        return float(self.kept(form, examples)[-1])

    def _kept(self, form: LayerForm, examples: float) -> Numbers:
        # Of the layers before each one.
        activation, shared = (self.prices.amount(form, key, examples) for key in ("activation", "shared"))
        return running_sums(np.maximum(0.0, activation - shared))


def static_bytes(weights: Size, gradients: Size, state: Size, shard: str, data: int, versions: float = 1.0) -> Size:
    """Bytes of weights, gradients and optimizer state, if `data` replicas shard them."""
    static = (weights + gradients + state) / data
    if shard == SHARD_OPTIMIZER:
        static = weights + gradients + state / data
    elif shard == "fully-shard":
        static = weights + gradients + (weights + state) / data
    elif shard == "none":
        static = versions * weights + gradients + state
    return static


def reach(needed: Numbers, stages: int, memory: float) -> int:
    """The layer that so many stages reach, if the layers before each one need so many bytes."""
    ends = needed.searchsorted(needed + memory, side="right").tolist()
    start = 0
    for _ in range(stages):
        start = ends[start] - 1
    return start
