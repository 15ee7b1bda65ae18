"""Everything that is tried: data x pipeline x tensor x space x method x micro-batches x recompute x sharding."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from stretto.cost.cluster import Link
from stretto.mesh import Mesh
from stretto.methods import BASELINE, Planning, StageAt
from stretto.plan.places import Places
from stretto.plan.planned_methods import GradientFlow, PlannedMethod, gradients, planned
from stretto.plan.problem import Problem


class Candidate(NamedTuple):
    """One way to train, but for where the layers are cut. `pipeline` is the number of workers that hold stages.

    `microbatches` are those of a turn, `batch` the examples of a step; `losses` train a chunk of the stages each.
    """

    pipeline: int
    mesh: Mesh
    batch: int
    method: str = BASELINE
    microbatches: int = 1
    recompute: bool = False
    shard: str = "none"
    losses: int = 1

    @property
    def planned(self) -> PlannedMethod:
        """Its method."""
        return planned(self.method)

    @property
    def planning(self) -> Planning:
        """The closed forms of its method."""
        return planned(self.method).planning

    @property
    def gradients(self) -> GradientFlow:
        """How far gradients travel."""
        return gradients(planned(self.method), self.pipeline, self.losses)

    @property
    def workers(self) -> int:
        """All of them."""
        return self.pipeline * self.mesh.data * self.mesh.inside

    @property
    def stages(self) -> int:
        """How many parts the model is cut into."""
        return self.pipeline * self.planning.stages_per_worker

    @property
    def examples(self) -> float:
        """Of a micro-batch of one replica."""
        return self.batch / (self.mesh.data * self.microbatches)

    @property
    def order(self) -> tuple[object, ...]:
        """What decides between equals: fewer workers, shorter pipelines, simpler ways."""
        return (self.workers, *self._replace(mesh=self.mesh.tensor), self.mesh.space)  # type: ignore[arg-type]

    def at(self, stage: int) -> StageAt:
        """What closed forms are asked about."""
        return StageAt(stage, self.stages, self.microbatches)

    def home(self, stage: int) -> int:
        """The worker that a stage lives on."""
        if self.planning.order == "v" and stage >= self.pipeline:
            return 2 * self.pipeline - 1 - stage
        return stage % self.pipeline

    def way(self, stage: int) -> int | None:
        """The worker behind which lies the link from a stage to the next one; None where both live on one worker."""
        here, there = self.home(stage), self.home(stage + 1)
        return None if here == there else min(here, there) if self.planning.order == "v" else here

    def link(self, stage: int, places: Places) -> Link | None:
        """What lies between a stage and the next one; None where both live on one worker, or where there is none."""
        if not 0 <= stage < self.stages - 1:
            return None
        way = self.way(stage)
        return None if way is None else places.ahead[way]

    def returns(self, stage: int) -> bool:
        """Whether a gradient comes to a stage from the one above it."""
        return stage >= 0 and self.gradients.arrive[stage]

    def backwards(self, stage: int) -> int:
        """How many actions the backward of a micro-batch is."""
        return 2 if self.planning.split and (stage or not self.planned.drains) else 1

    def recomputes(self, stage: int) -> bool:
        """Whether a stage runs its forwards again: where it keeps more than one micro-batch, else nothing is gained."""
        return self.recompute and self.planning.held(self.at(stage)) > 1

    def __str__(self) -> str:
        """The method as `stretto.method` reads it."""
        chosen = {self.planning.cut: self.microbatches, self.planning.losses: self.losses}
        options = [f"{option}={value}" for option, value in chosen.items() if option is not None]
        return self.planned.written(*options, *(["recompute=True"] if self.recompute else []))


def candidates(problem: Problem) -> Iterator[Candidate]:
    """All of them, each once."""
    counts = [problem.workers] if problem.all_workers else divisors(problem.workers)
    for workers in counts:
        for tensor, space in inner(problem, workers):
            outer = workers // (tensor * space[0] * space[1])
            for pipeline, batch in product(divisors(outer), problem.batch_sizes):
                data = outer // pipeline
                if batch % data == 0:
                    mesh = Mesh(data=data, tensor=tensor, space=space)
                    yield from ways(problem, Candidate(pipeline, mesh, batch))


def inner(problem: Problem, workers: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """How processes may share a stage: its weights or its images."""
    most = max(group.workers for group in problem.cluster.groups)
    for tensor in problem.tensors:
        if workers % tensor == 0 and (tensor <= most or tensor == 1):
            yield tensor, (1, 1)
    for height, width in problem.spaces if problem.sides else ():
        if height * width > 1 and workers % (height * width) == 0:
            yield 1, (height, width)


def ways(problem: Problem, axes: Candidate) -> Iterator[Candidate]:
    """The methods on given axes, with their options."""
    for method in problem.names:
        tried = planned(method)
        stages = axes.pipeline * tried.planning.stages_per_worker
        if stages > len(problem.layers) or not tried.suits(axes.pipeline):
            continue
        if problem.stages is not None and stages not in problem.stages:
            continue
        apart = stages == 1 or not problem.costs.ties  # no weights that several stages use
        shards = (
            problem.shards
            if tried.drains and apart and shareable(axes.mesh)
            else [x for x in problem.shards if x == "none"]
        )
        chunks = range(2, stages) if tried.planning.losses else (1,)  # one is backprop, as many as stages greedy
        for count, losses in product(counts_of(problem, axes, method), chunks):
            found = axes._replace(method=method, microbatches=count, losses=losses)
            gains = tried.drains and found._replace(recompute=True).recomputes(0)
            for recompute, shard in product(problem.recompute, shards):
                if gains or not recompute:
                    yield found._replace(recompute=recompute, shard=shard)


def shareable(mesh: Mesh) -> bool:
    """Whether replicas have something to share: weights that stand still while they are used, whole in each of them."""
    return mesh.data > 1 and mesh.space == (1, 1)


def counts_of(problem: Problem, axes: Candidate, method: str) -> Iterator[int]:
    """Into how many micro-batches a replica's share of a minibatch may be cut."""
    planning, share = planned(method).planning, axes.batch // axes.mesh.data
    if planning.cut is None:
        yield 1
        return
    for count in divisors(share):
        if problem.microbatches is not None and count not in problem.microbatches:
            continue
        if count == 1 and axes.pipeline == 1 and any(planned(name).planning.cut is None for name in problem.plain):
            continue  # plain training, by another name
        if planning.allows(count, axes.pipeline):
            yield count


def divisors(number: int) -> list[int]:
    """All of them, rising."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return [*small, *(number // each for each in reversed(small) if each * each != number)]
