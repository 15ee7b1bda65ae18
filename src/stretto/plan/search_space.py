"""Everything that is tried: data x pipeline x tensor x space x method x micro-batches x recompute x sharding."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from stretto.cost.cluster import Link
from stretto.mesh import Mesh
from stretto.plan.clock import CLOCKS, At, Clock
from stretto.plan.places import Places
from stretto.plan.problem import Problem


class Candidate(NamedTuple):
    """One way to train, but for where the layers are cut. `pipeline` is the number of workers that hold stages.

    `microbatches` are those of a turn, `batch` the examples of a step; `losses` train a chunk of the stages each.
    """

    pipeline: int
    mesh: Mesh
    batch: int
    method: str = "backprop"
    microbatches: int = 1
    recompute: bool = False
    shard: str = "none"
    losses: int = 1

    @property
    def clock(self) -> Clock:
        """What is known of its method."""
        return CLOCKS[self.method]

    @property
    def workers(self) -> int:
        """All of them."""
        return self.pipeline * self.mesh.data * self.mesh.inside

    @property
    def stages(self) -> int:
        """How many parts the model is cut into."""
        return self.pipeline * CLOCKS[self.method].chunks

    @property
    def examples(self) -> float:
        """Of a micro-batch of one replica."""
        return self.batch / (self.mesh.data * self.microbatches)

    @property
    def order(self) -> tuple[object, ...]:
        """What decides between equals: fewer workers, shorter pipelines, simpler ways."""
        return (self.workers, *self._replace(mesh=self.mesh.tensor), self.mesh.space)  # type: ignore[arg-type]

    def at(self, stage: int) -> At:
        """A stage."""
        return At(stage, self.stages, self.microbatches, self.losses)

    def home(self, stage: int) -> int:
        """The worker that a stage lives on."""
        if self.clock.order == "v" and stage >= self.pipeline:
            return 2 * self.pipeline - 1 - stage
        return stage % self.pipeline

    def way(self, stage: int) -> int | None:
        """The worker behind which lies the link from a stage to the next one; None where both live on one worker."""
        here, there = self.home(stage), self.home(stage + 1)
        return None if here == there else min(here, there) if self.clock.order == "v" else here

    def link(self, stage: int, places: Places) -> Link | None:
        """What lies between a stage and the next one; None where both live on one worker, or where there is none."""
        if not 0 <= stage < self.stages - 1:
            return None
        way = self.way(stage)
        return None if way is None else places.ahead[way]

    def returns(self, stage: int) -> bool:
        """Whether a gradient comes to a stage from the one above it."""
        ends = self.clock.waits == "chunk" and self.at(stage).ends_chunk
        return 0 <= stage < self.stages - 1 and self.clock.returns and not ends

    def backwards(self, stage: int) -> int:
        """How many actions the backward of a micro-batch is."""
        return 2 if self.clock.split and (stage or not self.clock.drains) else 1

    def recomputes(self, stage: int) -> bool:
        """Whether a stage runs its forwards again: where it keeps more than one micro-batch, else nothing is gained."""
        return self.recompute and self.clock.held(self.at(stage)) > 1

    def __str__(self) -> str:
        """The method as `stretto.method` reads it."""
        cut = self.clock.cut
        options = [f"{cut}={self.microbatches}"] if cut else []
        options += [f"chunks={self.losses}"] if self.clock.waits == "chunk" else []
        options += [self.clock.options] if self.clock.options else []
        options += ["recompute=True"] if self.recompute else []
        return f"{self.method}({', '.join(options)})" if options else self.method


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
        clock = CLOCKS[method]
        stages = axes.pipeline * clock.chunks
        if stages > len(problem.layers) or not suits(method, axes.pipeline):
            continue
        if problem.stages is not None and stages not in problem.stages:
            continue
        apart = stages == 1 or not problem.costs.ties  # no weights that several stages use
        shards = (
            problem.shards
            if clock.drains and apart and shareable(axes.mesh)
            else [x for x in problem.shards if x == "none"]
        )
        chunks = range(2, stages) if clock.waits == "chunk" else (1,)  # one is backprop, as many as stages greedy
        for count, losses in product(counts_of(problem, axes, method), chunks):
            found = axes._replace(method=method, microbatches=count, losses=losses)
            gains = clock.drains and found._replace(recompute=True).recomputes(0)
            for recompute, shard in product(problem.recompute, shards):
                if gains or not recompute:
                    yield found._replace(recompute=recompute, shard=shard)


def shareable(mesh: Mesh) -> bool:
    """Whether replicas have something to share: weights that stand still while they are used, whole in each of them."""
    return mesh.data > 1 and mesh.space == (1, 1)


def suits(method: str, pipeline: int) -> bool:
    """One stage is plain training, whatever the method: only those are tried that are written for it."""
    if pipeline == 1:
        return method in ("backprop", "1f1b")
    return method != "backprop"


def counts_of(problem: Problem, axes: Candidate, method: str) -> Iterator[int]:
    """Into how many micro-batches a replica's share of a minibatch may be cut."""
    clock, share = CLOCKS[method], axes.batch // axes.mesh.data
    if clock.cut is None:
        yield 1
        return
    for count in divisors(share):
        if problem.microbatches is not None and count not in problem.microbatches:
            continue
        if count == 1 and axes.pipeline == 1 and "backprop" in problem.names:
            continue  # backprop, by another name
        if count < clock.least(axes.pipeline):
            continue
        if method == "interleaved" and count % max(1, count // axes.pipeline):
            continue  # rounds must be equally long
        yield count


def divisors(number: int) -> list[int]:
    """All of them, rising."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return [*small, *(number // each for each in reversed(small) if each * each != number)]
