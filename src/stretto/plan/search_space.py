"""The search space: data x pipeline x tensor (x sequence) x space x method x micro-batches x recompute x sharding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from stretto.cost.cluster import Link
from stretto.mesh import Mesh
from stretto.methods import BASELINE, Planning, StageAt
from stretto.optimizers import optimizer_of
from stretto.plan.places import IN_ORDER, Places, placements
from stretto.plan.planned_methods import GradientFlow, PlannedMethod, gradients, planned
from stretto.plan.problem import RECOMPUTE, SHARD_OPTIMIZER, SHARDS, LayerForm, Problem, usual_tensors


@cache
def planning_of(method: str, per_worker: int) -> Planning:
    """The closed forms of a method with so many stages a worker; 0 for its own."""
    return planned(method).planning_of(per_worker)


@cache
def flow_of(method: str, stages: int, losses: int) -> GradientFlow:
    """The gradient flow of a method on so many stages, with so many losses."""
    return gradients(planned(method), stages, losses)


class Candidate(NamedTuple):
    """One way to train, before its layers are divided among stages.

    `pipeline` is the number of workers in a replica's pipeline, `batch` the number of examples a step, `microbatches`
    the number a turn. The model is trained by `losses` losses, each of which trains one chunk of the stages. Process p
    is the worker `placement[p]` of the cluster; worker p if that is empty. `ahead` is the number of forwards before the
    first backward beyond the method's own, for each worker above. `recompute` is a member of RECOMPUTE: "selective" and
    "full" recompute parts of each layer, or each layer from its input; "stage" whole stages, as the method's option
    does. With `sequence` the processes that share weights divide the sequence outside cut layers. `per_worker` is the
    number of stages of each worker of the pipeline; 0 for the method's own.
    """

    pipeline: int
    mesh: Mesh
    batch: int
    method: str = BASELINE
    microbatches: int = 1
    recompute: str = "none"
    shard: str = "none"
    losses: int = 1
    placement: tuple[int, ...] = ()
    ahead: int = 0
    sequence: bool = False
    per_worker: int = 0

    @property
    def form(self) -> LayerForm:
        """How its layers are run."""
        kind = "none" if self.recompute == "stage" else self.recompute
        return LayerForm(self.mesh.tensor, self.mesh.space, self.sequence, kind)

    @property
    def planned(self) -> PlannedMethod:
        """The method, with what plans know of it."""
        return planned(self.method)

    @property
    def planning(self) -> Planning:
        """The closed forms of the method."""
        return planning_of(self.method, self.per_worker)

    @property
    def gradients(self) -> GradientFlow:
        """Which stages have heads, and which get gradients from the stage above."""
        return flow_of(self.method, self.stages, self.losses)

    @property
    def workers(self) -> int:
        """The number of workers: pipeline x replicas x processes that share a stage."""
        return self.pipeline * self.mesh.data * self.mesh.inside

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.pipeline * self.planning.stages_per_worker

    @property
    def examples(self) -> float:
        """Examples of one replica's micro-batch."""
        return self.batch / (self.mesh.data * self.microbatches)

    @property
    def order(self) -> tuple[object, ...]:
        """A sort key among plans of equal value: fewer workers first, then shorter pipelines, then simpler ways."""
        kind, shard = RECOMPUTE.index(self.recompute), SHARDS.index(self.shard)
        simple = self._replace(mesh=self.mesh.tensor, recompute=kind, shard=shard)  # type: ignore[arg-type]
        return (self.workers, *simple, self.mesh.space)

    def stage_at(self, stage: int) -> StageAt:
        """The stage, as an argument of the method's closed forms."""
        per_worker = self.planning.stages_per_worker
        return StageAt(stage, self.stages, self.microbatches, self.ahead, per_worker, self.losses)

    def worker_of(self, stage: int) -> int:
        """The worker of the pipeline that holds a stage."""
        if self.planning.order == "v" and stage >= self.pipeline:
            return 2 * self.pipeline - 1 - stage
        return stage % self.pipeline

    def link_index(self, stage: int) -> int | None:
        """The index into `Places.ahead` of the link from a stage to the next; None if one worker holds both."""
        sender, receiver = self.worker_of(stage), self.worker_of(stage + 1)
        return None if sender == receiver else min(sender, receiver) if self.planning.order == "v" else sender

    def link(self, stage: int, places: Places) -> Link | None:
        """The link from a stage to the next; None if one worker holds both, or if there is no such stage."""
        if not 0 <= stage < self.stages - 1:
            return None
        index = self.link_index(stage)
        return None if index is None else places.ahead[index]

    def receives_gradient(self, stage: int) -> bool:
        """Whether a stage receives a gradient from the stage above it."""
        return stage >= 0 and self.gradients.arrive[stage]

    def num_backward_actions(self, stage: int) -> int:
        """The number of actions that a stage's backward of a micro-batch consists of: B, or I and W."""
        return 2 if self.planning.split and (stage or not self.planned.drains) else 1

    def recomputes(self, stage: int) -> bool:
        """Whether a stage runs whole forwards again: only if it holds several micro-batches, else it saves nothing."""
        return self.recompute == "stage" and holds_several(self.method, self.per_worker, self.stage_at(stage))

    def __str__(self) -> str:
        """The method with its options, as `stretto.method` reads it."""
        chosen = {self.planning.cut: self.microbatches, self.planning.losses: self.losses}
        options = [f"{option}={value}" for option, value in chosen.items() if option is not None]
        options += [f"{self.planning.ahead}={self.ahead}"] if self.ahead else []
        return self.planned.written(*options, *(["recompute=True"] if self.recompute == "stage" else []))


@cache
def forms(
    tensor: int, space: tuple[int, int], recompute: tuple[str, ...], sequences: tuple[bool, ...]
) -> tuple[LayerForm, ...]:
    """The forms of layers with these choices, each once."""
    kinds = dict.fromkeys("none" if kind == "stage" else kind for kind in recompute)
    return tuple(LayerForm(tensor, space, sequence, kind) for kind, sequence in product(kinds, sequences))


class MethodChoice(NamedTuple):
    """Candidates that have a method with its options in common, and axes: all combinations of the other choices."""

    method: str
    per_worker: int
    losses: int
    shards: tuple[str, ...]
    recompute: tuple[str, ...]
    sequences: tuple[bool, ...]

    @property
    def number(self) -> int:
        """How many candidates there are."""
        return len(self.shards) * len(self.recompute) * len(self.sequences)


class CandidateGroup(NamedTuple):
    """Candidates on the same axes with the same micro-batches; those of a choice are made when they are asked for."""

    axes: Candidate
    choices: Sequence[MethodChoice]

    @property
    def number(self) -> int:
        """How many candidates there are."""
        return sum(choice.number for choice in self.choices)

    @property
    def shards(self) -> set[str]:
        """The shardings of any of them."""
        return {shard for choice in self.choices for shard in choice.shards}

    @property
    def forms(self) -> tuple[LayerForm, ...]:
        """How layers are run in any of them."""
        mesh, found = self.axes.mesh, dict[LayerForm, None]()
        for recompute, sequences in dict.fromkeys((choice.recompute, choice.sequences) for choice in self.choices):
            found |= dict.fromkeys(forms(mesh.tensor, mesh.space, recompute, sequences))
        return tuple(found)

    def alternatives(self) -> Iterator["CandidateGroup"]:
        """The candidates, together with those that differ in recomputation and sequence alone.

        The `axes` of such a group have all else: they recompute nothing, or whole stages if all do, and do not divide
        the sequence. They need not be one of the candidates.
        """
        for choice in self.choices:
            axes = self.axes._replace(method=choice.method, losses=choice.losses, per_worker=choice.per_worker)
            for shard in choice.shards:
                yield CandidateGroup(axes._replace(shard=shard), (choice._replace(shards=(shard,)),))

    def each(self) -> Iterator[Candidate]:
        """The candidates, one by one."""
        for group in self.alternatives():
            for recompute, sequence in product(group.choices[0].recompute, group.choices[0].sequences):
                yield group.axes._replace(recompute=recompute, sequence=sequence)

    def among(self, chosen: Callable[[Candidate], bool]) -> "CandidateGroup":
        """The candidates that satisfy a condition, each without alternatives."""
        return self._replace(choices=[alone(c).choices[0] for c in self.each() if chosen(c)])


def alone(c: Candidate) -> CandidateGroup:
    """A candidate without alternatives."""
    return CandidateGroup(
        c, (MethodChoice(c.method, c.per_worker, c.losses, (c.shard,), (c.recompute,), (c.sequence,)),)
    )


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Every candidate of a problem, each once."""
    for alternatives in all_alternatives(problem):
        yield from alternatives.each()


def all_alternatives(problem: Problem) -> Iterator[CandidateGroup]:
    """Every candidate of a problem, each once, together with those that differ in recomputation and sequence alone."""
    for axes in all_axes(problem):
        for count, choice in choices_on(problem, axes):
            yield from CandidateGroup(axes._replace(microbatches=count), (choice,)).alternatives()


def all_groups(problem: Problem) -> Iterator[CandidateGroup]:
    """Every candidate of a problem, each once, in groups on the same axes with the same micro-batches."""
    for axes in all_axes(problem):
        found: dict[int, list[MethodChoice]] = {}
        for count, choice in choices_on(problem, axes):
            found.setdefault(count, []).append(choice)
        for count, choices in found.items():
            yield CandidateGroup(axes._replace(microbatches=count), choices)


def all_axes(problem: Problem) -> Iterator[Candidate]:
    """The axes of a problem's candidates, of no method yet."""
    counts = [problem.workers] if problem.all_workers else divisors(problem.workers)
    for workers in counts:
        for tensor, space in inner_axes(problem, workers):
            outer = workers // (tensor * space[0] * space[1])
            for pipeline in divisors(outer):
                data = outer // pipeline
                if not (allows(problem.pipelines, pipeline) and allows(problem.data_parallels, data)):
                    continue
                mesh = Mesh(data=data, tensor=tensor, space=space)
                batches = [batch for batch in problem.batch_sizes if batch % data == 0]
                placed = placements(problem.cluster, mesh, pipeline) if problem.places_workers else (IN_ORDER,)
                for batch, placement in product(batches, placed):
                    yield Candidate(pipeline, mesh, batch, placement=placement)


def allows(limit: Sequence[int] | None, value: int) -> bool:
    """Whether a limit lists a value; None lists all."""
    return limit is None or value in limit


def inner_axes(problem: Problem, workers: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """The (tensor, space) axes that may divide a stage's weights, and its images."""
    for tensor, space in product(tensors_of(problem), dict.fromkeys(problem.spaces)):
        cuttable = space == (1, 1) or (problem.sides and not problem.too_small(space))
        if cuttable and workers % (tensor * space[0] * space[1]) == 0:
            yield tensor, space


def tensors_of(problem: Problem) -> tuple[int, ...]:
    """The numbers of processes that may share a stage's weights: those named, or the usual ones within a node."""
    if problem.tensors is not None:
        return tuple(dict.fromkeys(problem.tensors))
    return (1,) if problem.whole_layers else usual_tensors(problem.cluster)


def choices_on(problem: Problem, axes: Candidate) -> Iterator[tuple[int, MethodChoice]]:
    """The candidates on given axes, methods with all their options, and the number of micro-batches of each choice."""
    sequences = tuple(each for each in problem.sequences if problem.has(LayerForm(axes.mesh.tensor, sequence=each)))
    if not sequences:
        return
    layerwise = layerwise_on(problem, axes.mesh, sequences)
    for method, per_worker in loops_on(problem, axes):
        tried = planned(method)
        stages = axes.pipeline * (per_worker or tried.planning.stages_per_worker)
        if stages > len(problem.layers) or not tried.suits(axes.pipeline):
            continue
        if axes.mesh.tensor > 1 and tried.turns_whole_matrices:
            continue
        if tried.predicts_gradients and axes.mesh.data * axes.mesh.inside > 1:
            continue
        if not allows(problem.stages, stages):
            continue
        untied = stages == 1 or not problem.costs.ties  # no stages share weights
        shards = tuple(
            shard
            for shard in dict.fromkeys(problem.shards)
            if shard == "none" or (tried.drains and shareable(shard, axes.mesh, problem, untied=untied))
        )
        if not shards:
            continue
        # A single loss is backprop, one for each stage is greedy.
        chunks = range(2, stages) if tried.planning.losses else (1,)
        for count, losses in product(counts_of(problem, axes, method), chunks):
            first = StageAt(0, stages, count, axes.ahead, stages // axes.pipeline, losses)
            several = holds_several(method, per_worker, first)
            kinds = recomputable(problem, tried, layerwise, several=several)
            if kinds:
                yield count, MethodChoice(method, per_worker, losses, shards, kinds, sequences)


@cache
def holds_several(method: str, per_worker: int, at: StageAt) -> bool:
    """Whether a stage holds several micro-batches for their backward."""
    return planning_of(method, per_worker).held(at) > 1


def layerwise_on(problem: Problem, mesh: Mesh, sequences: tuple[bool, ...]) -> Mapping[str, bool]:
    """Whether each kind of recomputation of single layers is possible on some axes.

    `stretto train` recomputes no layers on parts of images.
    """
    possible = mesh.space == (1, 1) or not problem.trained
    counted = all(problem.has(LayerForm(mesh.tensor, (1, 1), each, "selective")) for each in sequences)
    return {"selective": possible and counted, "full": possible}


def recomputable(
    problem: Problem, tried: PlannedMethod, layerwise: Mapping[str, bool], *, several: bool
) -> tuple[str, ...]:
    """What may be recomputed: what a problem lists, and `stretto train` can run of networks that it trains.

    It recomputes whole layers only on the weights that their forward saw, and whole stages only where the first one
    holds `several` micro-batches.
    """
    keeps_weights = tried.drains or tried.family == "local" or tried.method.weights != "live"
    possible = {
        "none": True,
        "selective": layerwise["selective"],
        "full": layerwise["full"] and keeps_weights,
        "stage": tried.drains and several,
    }
    return tuple(kind for kind in problem.recompute if possible[kind])


def loops_on(problem: Problem, axes: Candidate) -> Iterator[tuple[str, int]]:
    """The methods of a problem, each with numbers of stages a worker: its own (0), and others that are named."""
    for method in problem.names:
        yield method, 0
        planning = planned(method).planning
        if planning.any_per_worker:
            numbers = {stages // axes.pipeline for stages in problem.stages or () if stages % axes.pipeline == 0}
            yield from ((method, number) for number in sorted(numbers - {0, 1, planning.stages_per_worker}))


def shareable(shard: str, mesh: Mesh, problem: Problem, *, untied: bool) -> bool:
    """Whether there are replicas that can share out their optimizer's state, or weights, too, as `shard` says.

    Weights only where no stages share them; `stretto train` shards whole weights only. SOAP cannot step a share of a
    matrix; Muon gathers them.
    """
    if mesh.data == 1 or mesh.space != (1, 1):
        return False
    steps_shares = optimizer_of(problem.optimizer).on_matrices != "rotate"
    return shard == SHARD_OPTIMIZER or (steps_shares and untied and (mesh.tensor == 1 or not problem.trained))


def counts_of(problem: Problem, axes: Candidate, method: str) -> Iterator[int]:
    """The numbers of micro-batches that a replica's share of a minibatch may be divided into."""
    planning, share = planned(method).planning, axes.batch // axes.mesh.data
    if planning.cut is None:
        yield 1
        return
    for count in divisors(share):
        if not allows(problem.microbatches, count):
            continue
        if count == 1 and axes.pipeline == 1 and any(planned(name).planning.cut is None for name in problem.plain):
            continue  # the same as plain training
        if planning.allows(count, axes.pipeline):
            yield count


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return [*small, *(number // divisor for divisor in reversed(small) if divisor * divisor != number)]
