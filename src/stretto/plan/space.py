"""Everything that is tried: data x pipeline x tensor x space x method x micro-batches x recompute x sharding."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from stretto.mesh import Mesh
from stretto.plan.clock import CLOCKS, At, Clock
from stretto.plan.problem import Problem


@dataclass(frozen=True, order=True, kw_only=True)
class Candidate:
    """One way to train, but for where the layers are cut. `pipeline` is the number of workers that hold stages."""

    pipeline: int = 1
    tensor: int = 1
    space: tuple[int, int] = (1, 1)
    data: int = 1
    method: str = "backprop"
    recompute: bool = False
    shard: str = "none"
    microbatches: int = 1  # of a turn
    batch: int = 1

    @property
    def clock(self) -> Clock:
        """What is known of its method."""
        return CLOCKS[self.method]

    @property
    def mesh(self) -> Mesh:
        """Its axes besides the pipeline."""
        return Mesh(data=self.data, tensor=self.tensor, space=self.space)

    @property
    def workers(self) -> int:
        """All of them."""
        return self.pipeline * self.mesh.data * self.mesh.inside

    @property
    def stages(self) -> int:
        """How many parts the model is cut into."""
        return self.pipeline * self.clock.chunks

    @property
    def examples(self) -> float:
        """Of a micro-batch of one replica."""
        return self.batch / (self.data * self.microbatches)

    def at(self, stage: int) -> At:
        """A stage."""
        return At(stage, self.stages, self.microbatches)

    def recomputes(self, stage: int) -> bool:
        """Whether a stage runs its forwards again: where it keeps more than one micro-batch, else nothing is gained."""
        return self.recompute and self.clock.held(self.at(stage)) > 1

    def __str__(self) -> str:
        """The method as `stretto.method` reads it."""
        cut = self.clock.cut
        options = [f"{cut}={self.microbatches}"] if cut else []
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
                    axes = Candidate(pipeline=pipeline, tensor=tensor, space=space, data=data, batch=batch)
                    yield from ways(problem, axes)


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
        for count in counts_of(problem, axes, method):
            for recompute, shard in product(problem.recompute, problem.shards):
                found = Candidate(
                    pipeline=axes.pipeline, tensor=axes.tensor, space=axes.space, data=axes.data, batch=axes.batch,
                    method=method, microbatches=count, recompute=recompute, shard=shard,
                )  # fmt: skip
                if allowed(found):
                    yield found


def suits(method: str, pipeline: int) -> bool:
    """One stage is plain training, whatever the method: only those are tried that are written for it."""
    if pipeline == 1:
        return method in ("backprop", "1f1b")
    return method != "backprop"


def counts_of(problem: Problem, axes: Candidate, method: str) -> Iterator[int]:
    """Into how many micro-batches a replica's share of a minibatch may be cut."""
    clock, share = CLOCKS[method], axes.batch // axes.data
    if clock.cut is None:
        yield 1
        return
    for count in divisors(share):
        if problem.microbatches is not None and count not in problem.microbatches:
            continue
        if count == 1 and axes.pipeline == 1 and "backprop" in problem.names:
            continue  # backprop, by another name
        if method == "pipedream-2bw" and count < axes.pipeline:
            continue  # two versions would not do
        if method == "interleaved" and count % max(1, count // axes.pipeline):
            continue  # rounds must be equally long
        yield count


def allowed(found: Candidate) -> bool:
    """Whether recomputing gains anything, and sharding has something to share and weights that stand still."""
    if found.recompute and not (found.clock.drains and found.recomputes(0)):
        return False
    return found.shard == "none" or (found.data > 1 and found.clock.drains and found.space == (1, 1))


def divisors(number: int) -> list[int]:
    """All of them, rising."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return [*small, *(number // each for each in reversed(small) if each * each != number)]
