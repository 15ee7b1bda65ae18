"""The closed forms of a step: what stages take together, each with costs of its own.

In the code, `c` is a candidate, `s` one of its stages, and a table has at [i, j] the value of a stage with the layers
[i, j). For stage s of S, with M micro-batches a turn on W workers:

    forward    = sum F                        + all-reduces of outputs inside the stage + halos + gathered weights
    backward   = sum B; W if the stage sends  + all-reduces of input gradients + halos + gathered weights, scattered
                 no gradient; I + W if split      gradients + forward if recomputed + accumulation if M > 1
                 both: + the runtime's own time of each action + sending and receiving its messages
    x          = the transit of a message to stage s + 1, as long as of one back: the time that keeps neither end busy
    end        = the replicas' all-reduce (or sharding's scatter and gather), a tensor axis's sum of norms' gradients
                 where it divides the sequence + update + a copy of weights still in use
                 + the runtime's own time of an action and, divided among a worker's stages, of a turn and its losses
    turn       = forward + backward + 2x      messages exposed: 1f1b, zb-h1, interleaved, pipedream and its kin
                 max(forward, x) + max(backward, x)      streamed: gpipe
                 max(forward + backward, x)              hidden: the PB clock, zb-h2, zb-v, dualpipe-v, methods with
                                                                 losses of their own

    step       = sum fill + max((M - 1) turn + end), fill = forward + backward + 2x      synchronous
                 sum bubble + 2x + max(M turn + end)                                    zb-h1, zb-h2; the bubble of all
                     stages but the first is the method's gap if M >= S, else forward + backward
                 max mean((M v + W - 1) turn + v end)                                   interleaved, v stages a worker
                 max mean(phase(forward) + phase(backward) + v end)                     looped-bfs
                     phase(t) = (v - 1) max(M max(t, x), W (t + x)) + (M - 1) max(t, x) + W t + (W - 1) x
                 max mean(2 M turn + (W - 1)(gap + 5x) + 2 end)                         zb-v, dualpipe-v
                     max mean: the largest of all workers' means over their own stages
                 max(M turn + end)                                                      without a drain
                 max over stages, (M - 1) turn + sum of the turns from it up to its chunk's end + end  chunked
                     turn = forward + backward + 2x within a chunk, hidden at its end
                 max(forward + 2x + W + end + forward and I of the stage above)         overlapping(delay=0)
                 max over stages and k, (turn + end + sum of the next k stages'         synthetic-gradients
                     forward + backward + L and the 2x below each) / (1 + k delay); its end includes L

A gap is the largest of a method's sums of F, I and W (`Planning.gap`), fitted to simulations and tested against them.
For equal stages the synchronous formulas are the schedules' exact times, (M + S - 1) turn + end; zb-h2's is the time
from step to step, since one begins before the last worker has ended the one before, and dualpipe-v's is longer by F at
most, and by a transit for each further worker. Unequal stages take no longer where a worker has one, but for messages
that wait for each other. Where it has several, their mean counts: a long one (the logits') makes others wait only while
it runs. Stages that differ by a tenth then take 4 % longer at most, or less. The formulas without a drain are exact for
any stages if messages take no longer than the work that hides them; those of chunked and overlapping are exact for any
messages. Where gradients are predicted, B includes a forward of the module that does, and L takes its backward and its
update; a stage waits where the gradient to learn from comes later than its own turns. That is exact for any stages, and
for any messages if the delay is 1, else for those that take no longer than a turn.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add, sub
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from stretto.cost.layer_sums import Table
from stretto.plan.partition import WaitForm
from stretto.plan.search_space import Candidate

TERMS = (
    "computing", "below peak", "memory traffic", "launches", "computing again", "inside stages", "gathering weights",
    "all-reduce", "update", "host", "runtime", "messages", "bubble", "correction",
)  # fmt: skip


class Passes(NamedTuple):
    """Seconds of a micro-batch's forward and backward; `deferrable` is the part of the backward that is W's."""

    forward: Table
    backward: Table
    deferrable: Table

    def of(self, kind: str) -> Table:
        """Seconds of an action of this kind."""
        of_input = self.backward - self.deferrable
        return {"F": self.forward, "B": self.backward, "I": of_input, "W": self.deferrable}.get(kind, 0 * of_input)


class StageTable(NamedTuple):
    """The costs of a stage that holds the layers [i, j), at [i, j].

    Seconds of a micro-batch: `forward` and `backward` include those of `passes` by term, which effects add to what the
    stage's layers compute: communication among processes that share the stage, gathering sharded weights and scattering
    gradients, waiting for the host that starts kernels; `recompute`, the second forward, of whole stages, or of layers
    once numbers stand instead of tables; `message_overhead`, sending and receiving; `action_overhead`, the runtime's
    own time. `deferrable` is the part of the backward that can fill a bubble: W.
    `transit` is the part of a message to the next stage that keeps neither end busy.

    Seconds of a turn: `learn`, learning to predict a gradient, `all_reduce` among replicas, and of norms' gradients on
    a divided sequence, `update`, `loss_overhead` (sending and receiving losses), and `turn_overhead`, the runtime's own
    time.

    Bytes: `static_bytes` always, `microbatch_bytes` for each micro-batch held, `recompute_bytes` for the one that is
    recomputed.
    """

    forward: Table
    backward: Table
    learn: Table
    recompute: Table
    message_overhead: Table
    action_overhead: Table
    deferrable: Table
    transit: Table
    all_reduce: Table
    update: Table
    loss_overhead: Table
    turn_overhead: Table
    static_bytes: Table
    microbatch_bytes: Table
    recompute_bytes: Table
    passes: Mapping[str, Passes]

    def longer(self, term: str, more: Passes) -> "StageTable":
        """The stage with longer passes; `more` counts as `term`, one of TERMS."""
        so_far = self.passes.get(term)
        return self._replace(
            forward=self.forward + more.forward,
            backward=self.backward + more.backward,
            deferrable=self.deferrable + more.deferrable,
            passes={**self.passes, term: more if so_far is None else each_table(add, so_far, more)},
        )

    @property
    def own_backward(self) -> Table:
        """Seconds of a micro-batch's backward without those of `passes`."""
        return reduce(sub, (more.backward for more in self.passes.values()), self.backward)

    @property
    def end(self) -> Table:
        """Seconds at the end of a turn."""
        return self.learn + self.all_reduce + self.update + self.loss_overhead + self.turn_overhead


class Row(NamedTuple):
    """A stage's tables for `partition`: seconds that it adds to the fill, seconds of its load, and its bytes.

    A worker has the `kept` bytes of all its stages at a time, the `passing` ones of one of them. `busy` are the seconds
    of a step in which it keeps its worker busy.
    Under methods whose stages wait for the one above them in every turn, `beside_wait` are a stage's seconds without
    that wait, `awaited` the seconds that the stage below waits for it, and `transits` those of the messages to and from
    the stage above where `beside_wait` does not have them; else None.
    """

    fill: Table
    load: Table
    kept: Table
    passing: Table
    busy: Table
    beside_wait: Table | None = None
    awaited: Table | None = None
    transits: Table | None = None

    @property
    def bytes(self) -> Table:
        """The bytes of a worker that has this stage alone."""
        return self.kept + self.passing


T = TypeVar("T")


def each_table(function: Callable[..., Any], *several: T) -> T:
    """`function` of the tables that several tuples of tables have at the same place, in such a tuple."""
    tables: tuple[Any, ...] = several
    made: Any
    if isinstance(tables[0], dict):
        made = {term: each_table(function, *(each[term] for each in tables)) for term in tables[0]}
    elif isinstance(tables[0], tuple):
        made = type(tables[0])(*(each_table(function, *each) for each in zip(*tables, strict=True)))
    else:
        made = function(*tables)
    return cast(T, made)


def stage_terms(c: Candidate, stage: StageTable) -> dict[str, Table]:
    """The seconds of a stage in a step by term; those in which it waits are left out, but for messages."""
    known = {
        "computing again": c.microbatches * stage.recompute,
        "all-reduce": stage.all_reduce,
        "update": stage.update,
        "runtime": c.microbatches * stage.action_overhead + stage.turn_overhead,
    }
    for term, more in stage.passes.items():
        known[term] = known.get(term, 0.0) + c.microbatches * (more.forward + more.backward)
    parts = {term: known[term] for term in TERMS if term in known}
    work = c.microbatches * (stage.forward + stage.backward) + stage.end
    computing = work - c.microbatches * stage.message_overhead - stage.loss_overhead
    exposed = microbatch_seconds(c, stage) - stage.forward - stage.backward
    messages = c.microbatches * (exposed + stage.message_overhead) + stage.loss_overhead
    return parts | {"computing": computing - sum(parts.values()), "messages": messages}


def busiest(c: Candidate, loads: Sequence[float]) -> tuple[int, float]:
    """The worker of the largest load, and that load: the mean of those of its stages."""
    means = [0.0] * c.pipeline
    for s, load in enumerate(loads):
        means[c.worker_of(s)] += load / c.planning.stages_per_worker
    worker = max(range(c.pipeline), key=lambda w: means[w])
    return worker, means[worker]


def adds_fill(c: Candidate) -> bool:
    """Whether a step includes the sum of fills; with several stages a worker, the load includes it."""
    return c.planned.drains and c.planning.stages_per_worker == 1


def microbatch_seconds(c: Candidate, stage: StageTable) -> Table:
    """Seconds of a micro-batch on a stage, with the transit that no computation hides."""
    work = stage.forward + stage.backward
    if c.planning.messages == "exposed":
        return work + 2 * stage.transit
    if c.planning.messages == "streamed":
        return np.maximum(stage.forward, stage.transit) + np.maximum(stage.backward, stage.transit)
    return np.maximum(work, stage.transit)


def wait_terms(c: Candidate, s: int, stage: StageTable) -> tuple[Table, Table, Table]:
    """A stage's `Row.beside_wait`, `awaited` and `transits`, under methods whose stages wait for the one above them."""
    work, in_flight = stage.forward + stage.backward, 2 * stage.transit
    if c.planning.waits == "hop":
        return stage.forward + in_flight + stage.deferrable + stage.end, work - stage.deferrable, 0.0 * work
    if c.planning.waits == "prediction":
        return work + stage.end, work + stage.learn, in_flight
    turn = np.maximum(work, stage.transit) if not c.receives_gradient(s) else work + in_flight
    return c.microbatches * turn + stage.end, turn, 0.0 * work


def wait_form(c: Candidate) -> WaitForm:
    """How the stages of a candidate wait for the stages above them."""
    prediction = c.planned.method.prediction if c.planning.waits == "prediction" else None
    is_waiting = [c.receives_gradient(s) for s in range(c.stages)]
    return WaitForm(is_waiting, c.planning.waits != "hop", 0 if prediction is None else prediction.delay)


def fill_and_load(c: Candidate, s: int, stage: StageTable) -> tuple[Table, Table]:
    """The fill and the load of a stage, by the formulas at the top of this file."""
    turn, end, work = microbatch_seconds(c, stage), stage.end, stage.forward + stage.backward
    if c.planning.waits == "prediction":  # gradients that come later than a turn are in its wait
        return work, np.maximum(work + end, stage.transit)
    if c.planning.fills_bubble:
        bubble = 0.0 * work if not s else gap_seconds(c, stage) if c.microbatches >= c.stages else work
        return bubble + 2 * stage.transit, c.microbatches * turn + end
    if c.planning.order == "v":
        filling = (c.pipeline - 1) * (gap_seconds(c, stage) + 5 * stage.transit)
        return work, 2 * c.microbatches * turn + filling + 2 * end
    stages_per_worker = c.planning.stages_per_worker
    if c.planning.order == "breadth first":
        forwards = breadth_first_phase(c, stage.forward, stage.transit)
        backwards = breadth_first_phase(c, stage.backward, stage.transit)
        return work, forwards + backwards + stages_per_worker * end
    if stages_per_worker > 1:
        return work, (c.microbatches * stages_per_worker + c.pipeline - 1) * turn + stages_per_worker * end
    num_turns = c.microbatches - 1 if c.planned.drains else c.microbatches
    return work + 2 * stage.transit, num_turns * turn + end


def gap_seconds(c: Candidate, stage: StageTable) -> Table:
    """The seconds that each further worker adds to a step where W fills the bubble: `Planning.gap` of the method."""
    parts = (stage.forward, stage.backward - stage.deferrable, stage.deferrable)
    gap: Table = reduce(np.maximum, (weighted(factors, parts) for factors in c.planning.gap))
    return gap


def weighted(factors: Sequence[int], tables: Sequence[Table]) -> Table:
    """The sum of tables times factors."""
    pairs = zip(factors, tables, strict=True)
    products = [table if factor == 1 else factor * table for factor, table in pairs if factor]
    return reduce(np.add, products or [np.zeros_like(tables[0])])


def breadth_first_phase(c: Candidate, work: Table, transit: Table) -> Table:
    """Seconds of all forwards, or all backwards, of looped-bfs.

    A worker runs all micro-batches of one of its stages, then of the next. `work` is of one micro-batch.
    """
    pace, loops = np.maximum(work, transit), c.planning.stages_per_worker - 1
    loop = np.maximum(c.microbatches * pace, c.pipeline * (work + transit))
    seconds: Table = loops * loop + (c.microbatches - 1) * pace + c.pipeline * work + (c.pipeline - 1) * transit
    return seconds
