"""What a candidate costs for every way to cut its layers: tables for `partition`, and the terms of one way.

For stage s of S with the layers [i, j), M micro-batches a turn:

    forward    = sum F                        + sums of outputs inside the stage + halos + gathered weights
    backward   = sum B, W where no            + sums of input gradients + halos + gathered weights, scattered gradients
                 gradient goes on, I + W split;   + forward where it is run again; + adding up, if M > 1
                 both: + the runtime's own time of each action + its ends of the messages that it takes and sends
    x          = what is left of a message to stage s + 1, as long as one back
    end        = replicas' all-reduce (or what sharding makes of it) + update + a copy of weights that are still needed
                 + the runtime's own time of an action and, shared by a worker's stages, of a turn and its losses
    turn       = forward + backward + 2x      messages exposed: 1f1b, zb-h1, interleaved, pipedream and its kin
                 max(forward, x) + max(backward, x)      streamed: gpipe
                 max(forward + backward, x)              hidden: the PB clock, zb-v, methods with losses of their own

    step       = sum fill + max((M - 1) turn + end), fill = forward + backward + 2x      synchronous
                 sum bubble + 2x + max(M turn + end)                                    zb-h1; the bubble of all stages
                     but the first is max(F, I, F + I - W) if M >= S, else forward + backward
                 max((M v + W - 1) turn + v end)                                        interleaved, v stages a worker
                 max(phase(forward) + phase(backward) + v end)                          looped-bfs
                     phase(t) = (v - 1) max(M max(t, x), W (t + x)) + (M - 1) max(t, x) + W t + (W - 1) x
                 max(2 M turn + (W - 1)(gap + 5x) + 2 end)                              zb-v
                     gap = max(F, I, W, 2F - I, 2 (max(F, I) - W))
                 max(M turn + end)                                                      without a drain
                 max over stages, sum of the turns from it up to its chunk's end + end  chunked
                     turn = forward + backward + 2x within a chunk, hidden at its end
                 max(forward + 2x + W + end + forward and I of the stage above)         overlapping(delay=0)

For equal stages the synchronous lines are the schedules' exact times, (M + S - 1) turn + end; unequal stages never
take longer but for messages that wait for each other, and zb-v's weight gradients, which come in an order that is
fixed for equal stages. The lines without a drain are exact for any stages while messages take no longer than the work
that hides them: those of chunked and overlapping whatever they take. Memory of a stage:

    versions x weights + gradients + optimizer's state (shared among replicas where sharded) + held x activations
"""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.cost.layer_table import LayerCost, ModelCosts
from stretto.cost.predict import LayerTimes, Machine, layer_times, with_head
from stretto.mesh import Mesh
from stretto.plan.partition import Partition, partition, partition_waiting
from stretto.plan.places import (
    DeviceKind,
    Numbers,
    Places,
    all_reduce,
    gathering,
    message,
    receiving,
    scattering,
    sending,
)
from stretto.plan.problem import Problem
from stretto.plan.search_space import Candidate
from stretto.plan.share import halo_seconds, shared, sums_of

Table = NDArray[np.float64]
Times = LayerTimes[Table]  # of the layers [i, j) as one stage, at [i, j]; of a micro-batch, but for `update`


class Sizes(NamedTuple):
    """Bytes of the layers [i, j) at [i, j]; `input` at i, `output` at j."""

    parameters: Table
    gradients: Table
    state: Table
    held: Table
    largest: Table  # weights of one layer
    input: Numbers
    output: Numbers


class StageTable(NamedTuple):
    """A stage that holds [i, j), at [i, j]: seconds of one micro-batch (of a turn from `reduce` on), and bytes.

    Parts of forward and backward: `ups` and `downs` is what processes that share the stage tell each other; `gather`
    and `regather` what sharding gathers and scatters; `again` what is run again, `talking` the ends of messages, `own`
    the runtime's time. Of the backward `late` is what fills a bubble. `telling` are the ends of messages with losses,
    `stepping` the runtime's time of a turn. `each` bytes are kept of every micro-batch that is held, `once` bytes of
    one.
    """

    forward: Table
    backward: Table
    ups: Table
    downs: Table
    gather: Table
    regather: Table
    again: Table
    talking: Table
    own: Table
    late: Table
    message: Table
    reduce: Table
    update: Table
    telling: Table
    stepping: Table
    static: Table
    each: Table
    once: Table

    @property
    def end(self) -> Table:
        """What ends a turn."""
        return self.reduce + self.update + self.telling + self.stepping


class Row(NamedTuple):
    """A stage's tables: seconds it adds to the fill and to the load, bytes it takes.

    `before` and `after` are of stages that wait for others: what each takes beside its wait, and what its lower
    neighbour waits for; None for those that do not.
    """

    fill: Table
    load: Table
    bytes: Table
    before: Table | None = None
    after: Table | None = None


def between(values: Numbers) -> Table:
    """Sums over [i, j) at [i, j]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    table: Table = sums[None, :] - sums[:, None]
    return table


class Prices:
    """Prices of all candidates of a problem; what several of them share is worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dtype = problem.dtype or problem.costs.dtype
        self.sides = problem.sides or (0,) * len(problem.layers)
        self.places = lru_cache(maxsize=None)(self._places)
        self.layers = lru_cache(maxsize=None)(self._layers)
        self.rows = lru_cache(maxsize=None)(self._rows)
        self.inside = lru_cache(maxsize=1024)(self._inside)
        self.times = lru_cache(maxsize=256)(self._times)
        self.sizes = lru_cache(maxsize=256)(self._sizes)
        self.losses = lru_cache(maxsize=None)(self._losses)
        self.valid = np.triu(np.ones((len(problem.layers) + 1,) * 2, dtype=bool), 1)

    def _places(self, mesh: Mesh, pipeline: int) -> Places:
        return Places.of(self.problem.cluster, mesh, pipeline)

    def where(self, c: Candidate) -> Places:
        """The machines and links of a candidate."""
        return self.places(c.mesh, c.pipeline)

    def _layers(self, tensor: int, space: tuple[int, int]) -> list[LayerCost]:
        return shared(self.problem.layers, tensor, space, self.sides)

    def seconds(self, layers: Sequence[LayerCost], kinds: Sequence[DeviceKind], examples: float) -> Table:
        """Times of layers on the slowest of some machines: [layers, 6] as `LayerTimes` has them."""
        costs, cluster = ModelCosts(tuple(layers), self.dtype), self.problem.cluster
        machines = [Machine(cluster.devices[kind.device], self.dtype, kind.crowded) for kind in kinds]
        times = [layer_times(costs, machine, examples, optimizer=self.problem.optimizer) for machine in machines]
        rows: Table = np.maximum.reduce([np.array(each) for each in times])
        rows[:, UPDATE] *= 2 if self.problem.masters else 1  # float32 numbers beside weights of two bytes
        return rows

    def _rows(self, kind: DeviceKind, tensor: int, space: tuple[int, int], examples: float) -> Table:
        return self.seconds(self.layers(tensor, space), [kind], examples)

    def _times(self, kind: DeviceKind, tensor: int, space: tuple[int, int], examples: float) -> Times:
        forward, backward, inputs, weights, update, accumulate = self.rows(kind, tensor, space, examples).T
        late, costs = late_weights(weights, backward), self.problem.costs
        whole, halves = between(backward), between(inputs)
        whole[0], halves[0] = late[0], 0.0  # nobody waits for the gradient of the data

        def begun(table: Table, more: float) -> Table:
            return np.where(table > 0, table + more, table)

        return Times(
            between(forward), begun(whole, costs.start), begun(halves, costs.start), begun(late, costs.start),
            begun(between(update), costs.step), between(accumulate),
        )  # fmt: skip

    def slowest(self, c: Candidate, worker: int) -> Times:
        """Times on the slowest machine of a worker's replicas."""
        kinds = self.where(c).machines[worker]
        every = [self.times(kind, c.mesh.tensor, c.mesh.space, c.examples) for kind in kinds]
        return every[0] if len(every) == 1 else Times(*map(np.maximum.reduce, zip(*every, strict=True)))

    def _losses(self, mesh: Mesh, pipeline: int, last: int) -> tuple[float, ...]:
        workers = self.places(mesh, pipeline).workers
        return tuple(workers.losses(worker, last) for worker in range(pipeline))

    def _sizes(self, tensor: int, space: tuple[int, int], examples: float) -> Sizes:
        layers = self.layers(tensor, space)

        def amounts(key: str) -> Numbers:
            return np.array([getattr(layer, key).at(examples) for layer in layers])

        weights = np.array([layer.parameter_bytes for layer in layers])
        held = between(amounts("activation") - amounts("shared"))
        held += np.append(amounts("shared") + amounts("loose_input"), 0.0)[:, None]
        held += np.concatenate([[0.0], amounts("loose_output")])[None, :]
        return Sizes(
            between(weights),
            between(np.array([layer.gradient_bytes for layer in layers])),
            between(np.array([self.problem.state(layer) for layer in layers])),
            held,
            running_max(weights),
            np.append(amounts("input"), 0.0),
            np.concatenate([[0.0], amounts("output")]),
        )

    def _inside(self, mesh: Mesh, pipeline: int, worker: int, examples: float) -> tuple[Numbers, Numbers]:
        place = self.places(mesh, pipeline)
        layers, links = self.problem.layers, place.parts[worker]
        times = np.array([sums_of(layer) if mesh.tensor > 1 else 0 for layer in layers], dtype=float)
        outputs, inputs = (np.array([getattr(x, key).at(examples) for x in layers]) for key in ("output", "input"))
        forward = times * all_reduce(links, mesh.tensor, outputs, place.gamma)
        backward = times * all_reduce(links, mesh.tensor, inputs, place.gamma)
        if mesh.space != (1, 1):
            halos = halo_seconds(layers, self.sides, mesh.space, links, examples)
            forward, backward = forward + halos, backward + halos
        return forward, backward

    def stage(self, c: Candidate, s: int) -> StageTable:
        """Stage s for all [i, j)."""
        worker, place, versions = c.home(s), self.where(c), c.planned.versions(c.at(s))
        workers, stages_per_worker = place.workers, c.planning.stages_per_worker
        t, z = self.slowest(c, worker), self.sizes(c.mesh.tensor, c.mesh.space, c.examples)
        static, gradients, each = z.parameters * versions + z.state, z.gradients, z.held
        if s and not c.returns(s - 1):
            t = t._replace(backward=t.weight_gradient)
        if s in c.gradients.heads:
            head = self.head(c, worker)
            t = with_head(t, head.times)
            static, gradients, each = static + head.static, gradients + head.gradients, each + head.held
        ups, downs = (between(values) for values in self.inside(c.mesh, c.pipeline, worker, c.examples))
        backward = t.input_gradient + t.weight_gradient if c.planning.split and s else t.backward
        if c.microbatches > 1:
            backward = backward + t.accumulate
        none, action = np.zeros_like(ups), workers.per_action(worker)
        again, once = (t.forward + ups, each) if c.recomputes(s) else (none, none)
        update = t.update + (workers.copying(worker, 1.0) * gradients if versions > 1 else 0.0)
        among, links = c.mesh.data * c.mesh.space[0] * c.mesh.space[1], place.replicas[worker]
        links = links if c.mesh.space == (1, 1) else (*links, *place.parts[worker])
        made = StageTable(
            t.forward + ups, backward + downs + again, ups, downs, none, none, again, none, none, t.weight_gradient,
            none + message(c.link(s, place), z.output), all_reduce(links, among, gradients, place.gamma), update,
            none + self.losses(c.mesh, c.pipeline, c.home(c.stages - 1))[worker] / stages_per_worker,
            none + action + workers.per_step(worker) / stages_per_worker, static + gradients,
            none + z.input[:, None] if c.recomputes(s) else each, once,
        )  # fmt: skip
        return self.run(c, s, made if c.shard == "none" else self.sharded(c, s, made))

    def run(self, c: Candidate, s: int, bare: StageTable) -> StageTable:
        """The stage with what the runtime takes for its actions, and for their messages."""
        place, z = self.where(c), self.sizes(c.mesh.tensor, c.mesh.space, c.examples)
        action, below, above = place.workers.per_action(c.home(s)), c.link(s - 1, place), c.link(s, place)
        ups = receiving(below, z.input)[:, None] + sending(above, z.output)
        given = sending(below, z.input)[:, None] * c.returns(s - 1)
        taken = receiving(above, z.input) * c.returns(s)
        several = c.backwards(s)
        back = several + c.recomputes(s)
        later = taken if several == 2 and not c.planned.drains else 0.0  # who has it from its own head sends it before
        return bare._replace(
            forward=bare.forward + ups + action, backward=bare.backward + given + taken + back * action,
            talking=bare.talking + ups + given + taken, own=bare.own + (1 + back) * action,
            late=bare.late + later + (action if several == 2 else 0.0),
        )  # fmt: skip

    def sharded(self, c: Candidate, s: int, whole: StageTable) -> StageTable:
        """The stage with weights, gradients and state shared among replicas."""
        worker, place, z = c.home(s), self.where(c), self.sizes(c.mesh.tensor, c.mesh.space, c.examples)
        gather = gathering(place.replicas[worker], c.mesh.data, z.parameters)
        scatter = scattering(place.replicas[worker], c.mesh.data, z.gradients, place.gamma)
        update = whole.update / c.mesh.data
        if c.shard == "fully-shard":
            static = z.parameters + z.gradients + (z.parameters + z.state) / c.mesh.data
            return whole._replace(reduce=gather + scatter, update=update, static=static)
        once_more = gather * c.recomputes(s)
        return whole._replace(
            forward=whole.forward + gather, backward=whole.backward + gather + scatter + once_more, gather=gather,
            regather=gather + scatter, again=whole.again + once_more, reduce=np.zeros_like(update), update=update,
            static=(z.parameters + z.gradients + z.state) / c.mesh.data + 2 * z.largest,
        )  # fmt: skip

    def head(self, c: Candidate, worker: int) -> "Head":
        """What a head behind layer j - 1 adds, at [0, j]."""
        heads = self.problem.heads
        assert heads is not None, "methods with heads are tried only where their costs are known"
        rows = self.seconds(heads, self.where(c).machines[worker], c.examples)

        def behind(values: Sequence[float] | Numbers) -> Table:
            table: Table = np.concatenate([[0.0], np.asarray(values)])[None, :]
            return table

        return Head(
            Times(*map(behind, rows.T)),
            behind([head.parameter_bytes + self.problem.state(head) for head in heads]),
            behind([head.gradient_bytes for head in heads]),
            behind([head.activation.at(c.examples) for head in heads]),
        )

    def tables(self, c: Candidate) -> list[Row]:
        """Fill, load and bytes of every stage; loads are infinite where a worker's memory is too small."""
        place, method, heads, rows = self.where(c), c.planned, c.gradients.heads, []
        planning, last = method.planning, c.stages - 1
        losses = self.losses(c.mesh, c.pipeline, c.home(last))
        known: dict[Hashable, tuple[StageTable, Table, Table]] = {}
        for s in range(c.stages):
            worker, at = c.home(s), c.at(s)
            key = (
                place.machines[worker], *(tuple(map(id, links[worker])) for links in (place.replicas, place.parts)),
                id(c.link(s - 1, place)), id(c.link(s, place)), c.returns(s - 1), c.returns(s),
                losses[worker], s == 0, s == last, method.versions(at), c.recomputes(s), s in heads,
            )  # fmt: skip
            if key not in known:
                stage = self.stage(c, s)
                fill, load = times_of(c, s, stage)
                known[key] = stage, np.where(self.valid, fill, inf), np.where(self.valid, load, inf)
            stage, fill, load = known[key]
            taken = stage.static + planning.held(at) * stage.each + stage.once
            room = place.memory[worker] / planning.stages_per_worker
            both = waits_of(c, s, stage) if planning.waits else (None, None)
            rows.append(Row(fill, np.where(taken <= room, load, inf), taken, *both))
        return rows

    def cut(self, c: Candidate, rows: Sequence[Row]) -> Partition | None:
        """The fastest way to cut the layers; None if none fits."""
        load = [row.load for row in rows]
        if c.planning.waits:
            before = [row.before for row in rows if row.before is not None]
            after = [row.after for row in rows if row.after is not None]
            return partition_waiting(load, before, after, waiting(c), onward=c.planning.waits == "chunk")
        return partition(load, [row.fill for row in rows] if fills(c) else None)

    def least_memory(self, rows: Sequence[Row]) -> Partition | None:
        """The way to cut the layers that needs least memory, whether or not it fits."""
        return partition([np.where(self.valid, row.bytes, inf) for row in rows])

    def at(self, c: Candidate, bounds: Sequence[int]) -> list[StageTable]:
        """Every stage where the layers are cut: numbers instead of tables."""
        return [StageTable(*(table[i, j] for table in self.stage(c, s))) for s, (i, j) in enumerate(pairwise(bounds))]

    def terms(self, c: Candidate, bounds: Sequence[int]) -> dict[str, float]:
        """What a step's seconds are made of: those of the busiest stage, and the bubble that filling makes.

        Messages are their ends, and what of them nothing hides.
        """
        own = self.at(c, bounds)
        priced = [times_of(c, s, stage) for s, stage in enumerate(own)]
        busiest = max(range(len(own)), key=lambda s: priced[s][1])
        x, load = own[busiest], priced[busiest][1]
        turns, ends = c.microbatches * c.planning.stages_per_worker, c.planning.stages_per_worker
        parts = dict.fromkeys(TERMS, 0.0) | {
            "computing again": turns * x.again,
            "inside stages": turns * (x.ups + x.downs),
            "gathering weights": turns * (x.gather + x.regather),
            "all-reduce": ends * x.reduce,
            "update": ends * x.update,
            "runtime": turns * x.own + ends * x.stepping,
        }
        total = load + (sum(each for each, _ in priced) if fills(c) else 0.0)
        if c.planning.waits:
            total = max(load, waited([waits_of(c, s, stage) for s, stage in enumerate(own)], waiting(c), c))
        work = turns * (x.forward + x.backward) + ends * x.end
        parts["messages"] = turns * (turn_of(c, x) - x.forward - x.backward + x.talking) + ends * x.telling
        parts["computing"] = work - turns * x.talking - ends * x.telling - sum(parts.values()) + parts["messages"]
        parts["bubble"] = total - sum(parts.values())
        return {name: float(value) for name, value in parts.items()}


class Head(NamedTuple):
    """What a head adds to a stage."""

    times: Times
    static: Table
    gradients: Table
    held: Table


TERMS = (
    "computing", "computing again", "inside stages", "gathering weights", "all-reduce", "update", "runtime", "messages",
    "bubble",
)  # fmt: skip
UPDATE = 4  # the column of `LayerTimes`


def fills(c: Candidate) -> bool:
    """Whether the sum of fills is part of a step; interleaved has it in its load."""
    return c.planned.drains and c.planning.stages_per_worker == 1


def turn_of(c: Candidate, x: StageTable) -> Table:
    """What a micro-batch keeps a stage busy for, messages that nothing hides included."""
    work = x.forward + x.backward
    if c.planning.messages == "exposed":
        return work + 2 * x.message
    if c.planning.messages == "streamed":
        return np.maximum(x.forward, x.message) + np.maximum(x.backward, x.message)
    return np.maximum(work, x.message)


def waiting(c: Candidate) -> list[bool]:
    """Of each stage, whether it waits for the one above it in every turn."""
    return [c.returns(s) for s in range(c.stages)]


def waits_of(c: Candidate, s: int, x: StageTable) -> tuple[Table, Table]:
    """Of a stage that may wait for the one above it: what it takes beside, and what the one below it waits for."""
    work = x.forward + x.backward
    if c.planning.waits == "hop":
        return x.forward + 2 * x.message + x.late + x.end, work - x.late
    turn = np.maximum(work, x.message) if not c.returns(s) else work + 2 * x.message
    return turn + x.end, turn


def waited(stages: Sequence[tuple[Table, Table]], waits: Sequence[bool], c: Candidate) -> Table:
    """The longest that a stage takes from one turn to the next, those included that it waits for."""
    longest = wait = np.zeros(())
    for (before, after), is_waiting in reversed(list(zip(stages, waits, strict=True))):
        given = wait if is_waiting else np.zeros(())
        longest = np.maximum(longest, before + given)
        wait = after + (given if c.planning.waits == "chunk" else 0.0)
    return longest


def times_of(c: Candidate, s: int, x: StageTable) -> tuple[Table, Table]:
    """Fill and load of a stage, as the text above has them."""
    turn, end, work = turn_of(c, x), x.end, x.forward + x.backward
    if c.planning.fills_bubble:
        inputs = x.backward - x.late
        least = np.maximum.reduce([x.forward, inputs, x.forward + inputs - x.late])
        bubble = 0.0 * work if not s else least if c.microbatches >= c.stages else work
        return bubble + 2 * x.message, c.microbatches * turn + end
    if c.planning.order == "v":
        ahead = (c.pipeline - 1) * (gap(x) + 5 * x.message)
        return work, 2 * c.microbatches * turn + ahead + 2 * end
    several = c.planning.stages_per_worker
    if c.planning.order == "breadth first":
        return work, phase(c, x.forward, x.message) + phase(c, x.backward, x.message) + several * end
    if several > 1:
        return work, (c.microbatches * several + c.pipeline - 1) * turn + several * end
    count = c.microbatches - 1 if c.planned.drains else c.microbatches
    return work + 2 * x.message, count * turn + end


def gap(x: StageTable) -> Table:
    """What each further worker adds to the idle time of zb-v, for equal stages and 2W-1 micro-batches or more.

    Read off simulations, and tested against them.
    """
    f, i, w = x.forward, x.backward - x.late, x.late
    found: Table = np.maximum.reduce([f, i, w, 2 * f - i, 2 * (np.maximum(f, i) - w)])
    return found


def phase(c: Candidate, each: Table, message: Table) -> Table:
    """All forwards, or all backwards, of looped-bfs: a worker takes up its next stage when the first one is through."""
    beat, loops = np.maximum(each, message), c.planning.stages_per_worker - 1
    again = np.maximum(c.microbatches * beat, c.pipeline * (each + message))
    found: Table = loops * again + (c.microbatches - 1) * beat + c.pipeline * each + (c.pipeline - 1) * message
    return found


def late_weights(weights: Numbers, backward: Numbers) -> Table:
    """W of [i, j): that of the lowest layer with something to train, and whole backwards of those above it."""
    layers = len(weights)
    lowest = np.full(layers + 1, layers)
    for layer in reversed(range(layers)):
        lowest[layer] = layer if weights[layer] else lowest[layer + 1]
    sums = np.concatenate([[0.0], np.cumsum(backward)])
    begin = np.append(weights, 0.0)[lowest]
    above = sums[None, :] - sums[np.minimum(lowest + 1, layers)][:, None]
    columns = np.arange(layers + 1)
    found: Table = np.where(lowest[:, None] < columns[None, :], begin[:, None] + above, 0.0)
    return found


def running_max(values: Numbers) -> Table:
    """The largest of [i, j) at [i, j]."""
    layers = len(values)
    table = np.zeros((layers + 1, layers + 1))
    for i in range(layers):
        table[i, i + 1 :] = np.maximum.accumulate(values[i:])
    return table
