"""The peak memory of each worker: walk through its actions, with the bytes that each of them allocates and frees.

Only a worker's own order of actions counts, as a message stays with its sender until the receiver asks for it. Weights,
versions of weights and optimizer state are always allocated, and so are message buffers: the sender of a channel keeps
one for each message that may be in flight, the receiver one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.cost.cure_costs import feedback_tensors, matrix_bytes, scratch_bytes, soap_scratch
from stretto.cost.head_costs import StageHeads
from stretto.cost.layer_table import Affine, LayerCost, ModelCosts, Peaks
from stretto.methods import Method
from stretto.methods.cure import StepCure, WeightCopies
from stretto.optimizers import Optimizer, Stepping, optimizer_of
from stretto.schedule import Action, Edge, Rules, Schedule

PREFIX = 64.0  # bytes of the header of each message
SMALL = 64.0  # bytes of a small value: a loss
STEADY = 4  # turns until the walk repeats, after those that fill the pipeline


NONE = Peaks((), (), (), 0.0)  # for layers whose peaks were not measured
NO_COPIES = WeightCopies()


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage for micro-batches of one size.

    `kept` is what a forward keeps for its backward, `forward` the peak of a forward, both without the stage's input. A
    backward frees the kept tensors as it goes: `first_backward` and `later_backward` are its peaks above them, without
    and with existing gradients to add to; `input_gradient` is the peak of I, `update` of an update.
    `prediction` is what a predicted gradient keeps until L, `learn` the peak of L. `seen` are the predicted weights
    that forwards see, kept until the next update.
    """

    weights: float
    gradients: float
    state: float
    input: float
    output: float
    kept: float
    forward: float
    first_backward: float
    later_backward: float
    input_gradient: float
    update: float
    prediction: float = 0.0
    learn: float = 0.0
    seen: float = 0.0


def stage_memory(
    rows: Sequence[LayerCost], examples: float, optimizer: str, head: LayerCost | None, copies: WeightCopies = NO_COPIES
) -> StageMemory:
    """The memory of a stage of these layers, loss included, with `head` behind them and `copies` of its weights.

    A backward that sees other weights makes those of a layer as it comes to it.
    """
    whole = rows[0]
    for row in rows[1:]:
        whole = whole.then(row)
    input_bytes, output_bytes = whole.input.at(examples), whole.output.at(examples)
    kept_by = [(row.activation - row.shared).at(examples) for row in rows]
    kept_by[0] = (rows[0].activation - rows[0].input + rows[0].loose_input).at(examples)
    kept, before, forward = whole.held.at(examples) - input_bytes, 0.0, 0.0
    if rows[-1].type == "Loss":  # the stage keeps the model's output, whether or not the loss does
        kept += rows[-2].loose_output.at(examples)
    loose_inputs = [0.0, *(row.loose_output.at(examples) for row in rows[:-1])]
    for row, row_kept, loose in zip(rows, kept_by, loose_inputs, strict=True):
        forward = max(forward, before + loose + (row.peaks or NONE).at("forward", examples))
        before += row_kept
    kept_output = output_bytes - rows[-1].loose_output.at(examples)  # the graph keeps it until the end of the backward
    freed, gradients, sent = -kept_output, 0.0, 0.0  # gradients of layers above, and those of borrowed weights
    first = later = inputs = 0.0
    for row, row_kept in reversed(list(zip(rows, kept_by, strict=True))):
        peaks = row.peaks or NONE
        made = sent + copies.backward * (gradients + row.gradient_bytes)
        first = max(first, peaks.at("backward", examples) + gradients + made - freed)
        later = max(later, peaks.at("again", examples) + made - freed)
        inputs = max(inputs, peaks.at("again", examples))
        freed, gradients, sent = freed + row_kept, gradients + row.gradient_bytes, sent + row.sent_gradients
    first, later = max(first, gradients + sent - freed), max(later, sent - freed)
    chosen = optimizer_of(optimizer)
    largest = max((row.peaks.largest for row in rows if row.peaks is not None), default=0.0)
    scratch = max([chosen.scratch * largest, *(matrix_scratch(row, chosen) for row in rows)])
    memory = StageMemory(
        weights=whole.parameter_bytes,
        gradients=whole.gradient_bytes,
        state=whole.state_bytes(chosen) + copies.always * whole.gradient_bytes,
        input=input_bytes,
        output=output_bytes,
        kept=kept,
        forward=max(forward, kept),
        first_backward=first,
        later_backward=later,
        input_gradient=inputs,
        update=scratch + copies.updating * whole.gradient_bytes,
        seen=copies.forward * whole.gradient_bytes,
    )
    return memory if head is None else with_head(memory, head, examples, chosen)


def matrix_scratch(layer: LayerCost, optimizer: Optimizer) -> float:
    """Bytes that a step of SOAP has beside its state for the matrix of the layer that takes most."""
    if optimizer.on_matrices != "rotate" or not layer.parameters:
        return 0.0
    numbers = max((soap_scratch(*shape) for shape in layer.matrix_shapes), default=0.0)
    return numbers * layer.parameter_bytes / layer.parameters


def with_shared_once(stage: StageMemory, repeated: float, gradients: float, optimizer: Optimizer) -> StageMemory:
    """The memory of a stage without the bytes of weights, and of gradients, that its layers share and repeat."""
    return replace(
        stage,
        weights=stage.weights - repeated,
        gradients=stage.gradients - gradients,
        state=stage.state - optimizer.states * gradients,
    )


def with_head(stage: StageMemory, head: LayerCost, examples: float, optimizer: Optimizer) -> StageMemory:
    """The memory of a stage with a head behind it."""
    kept = head.activation.at(examples) - (head.input - head.loose_input).at(examples)
    return StageMemory(
        weights=stage.weights + head.parameter_bytes,
        gradients=stage.gradients + head.gradient_bytes,
        state=stage.state + head.state_bytes(optimizer),
        input=stage.input,
        output=stage.output,
        kept=stage.kept + kept,
        forward=max(stage.forward, stage.kept + kept),
        first_backward=stage.first_backward + head.gradient_bytes + stage.output - kept,
        later_backward=stage.later_backward + head.gradient_bytes + stage.output - kept,
        input_gradient=stage.input_gradient + head.gradient_bytes + stage.output,
        update=stage.update,
        seen=stage.seen,
    )


def with_step_cure(
    stage: StageMemory, cure: StepCure, rows: Sequence[LayerCost], head: LayerCost | None, optimizer: str
) -> StageMemory:
    """The memory of a stage with what a cure of its optimizer's step keeps, and takes for the time of an update."""
    stepping, stepped = Stepping(optimizer), rows if head is None else [*rows, head]
    last = feedback_tensors(cure, stepping) * stage.gradients
    kept = last + sum(matrix_bytes(cure, row, stepping) for row in stepped)
    scratch = max(scratch_bytes(cure, row, stepping) for row in stepped)
    return replace(stage, state=stage.state + kept, update=max(stage.update, scratch) + last)


def peak_bytes(
    method: Method,
    schedule: Schedule,
    rules: Rules,
    costs: ModelCosts,
    bounds: Sequence[int],
    examples: float,
    *,
    optimizer: str = "sgd",
    behind: StageHeads = StageHeads([]),  # noqa: B008 - never changed
) -> tuple[float, ...]:
    """The peak bytes of tensors on each worker, with the heads `behind` stages, without the user's own batches."""
    predicted, heads, weights = rules.reach.predicted, behind.rows, behind.weights
    stage_heads = [None if s in predicted or not heads else heads[s] for s in range(schedule.num_stages)]
    copies = method.weight_copies(schedule)
    stages = [
        with_shared_once(
            stage_memory(costs.layers[bounds[s] : bounds[s + 1]], examples, optimizer, stage_heads[s], copies[s]),
            costs.repeated(bounds[s], bounds[s + 1]),
            costs.repeated(bounds[s], bounds[s + 1], gradients=True),
            optimizer_of(optimizer),
        )
        for s in range(schedule.num_stages)
    ]
    versions, cures = method.versions(schedule), method.step_cures(schedule)
    stashes = [method.weights == "stash" and number > 1 for number in versions]
    stages = [
        with_step_cure(stage, cure, costs.layers[bounds[s] : bounds[s + 1]], stage_heads[s], optimizer)
        for s, (stage, cure) in enumerate(zip(stages, cures, strict=True))
    ]
    if heads and method.prediction is not None:
        chosen, keeps = optimizer_of(optimizer), method.prediction.keeps_graph
        stages = [
            stage
            if head is None or s not in predicted
            else with_predictor(stage, head, examples, chosen, keeps_graph=keeps)
            for s, (stage, head) in enumerate(zip(stages, heads, strict=True))
        ]
    buffers = channel_bytes(method, schedule, rules, stages, weights)
    peaks = []
    for worker in range(schedule.num_workers):
        held_stages = [s for s, holder in schedule.worker_of.items() if holder == worker]
        permanent = sum(
            stages[s].weights
            + stages[s].state
            + (versions[s] - 1) * stages[s].gradients
            + originals(costs, (bounds[s], bounds[s + 1]), s, rules, schedule)
            for s in held_stages
        )
        walk = MemoryWalk(schedule, rules, stages, worker, weights, stashes)
        peaks.append(permanent + buffers[worker] + walk.peak())
    return tuple(peaks)


def originals(costs: ModelCosts, ends: tuple[int, int], stage: int, rules: Rules, schedule: Schedule) -> float:
    """Bytes of borrowed weights that a stage's modules keep beside the versions that it computes with.

    Only where another worker owns them: else they are the owner's.
    """
    homes = schedule.worker_of
    if all(homes[tie.owner] == homes[stage] for tie in rules.ties if tie.user == stage and tie.shares):
        return 0.0
    return sum(tie.bytes for tie in costs.ties if tie.borrowed and any(ends[0] <= at < ends[1] for at in tie.layers))


def channel_bytes(
    method: Method,
    schedule: Schedule,
    rules: Rules,
    stages: Sequence[StageMemory],
    weights: Mapping[tuple[int, int], float],
) -> Mapping[int, float]:
    """Bytes of each worker's message buffers."""
    from stretto.runtime.channel import SPARE, channels

    buffers = dict.fromkeys(range(schedule.num_workers), 0.0)
    for channel, depth in channels(schedule, rules, method.lag(schedule.num_stages)).items():
        sender, size = schedule.worker_of[channel.stage], PREFIX
        if channel.value in ("activation", "gradient"):
            size += stages[channel.stage].output if channel.value == "activation" else stages[channel.stage].input
        here = [stage for stage, worker in schedule.worker_of.items() if worker == channel.worker]
        if channel.value == "tied-weight":  # readers on one worker get one message
            size += max(weights.get((channel.stage, reader), 0.0) for reader in here)
        elif channel.value == "tied-gradient":
            size += sum(weights.get((owner, channel.stage), 0.0) for owner in here)
        if sender != channel.worker:
            buffers[sender] += (depth + SPARE) * size
            buffers[channel.worker] += size
    return buffers


class MemoryWalk:
    """A walk through a worker's actions; `peak` gives the peak bytes above those that are always allocated.

    `weights` are as in `StageHeads`; `stashes` says of which stages an update keeps the weights of graphs in flight.
    """

    def __init__(
        self,
        schedule: Schedule,
        rules: Rules,
        stages: Sequence[StageMemory],
        worker: int,
        weights: Mapping[tuple[int, int], float],
        stashes: Sequence[bool],
    ) -> None:
        self._schedule, self._rules, self._stages, self._worker = schedule, rules, stages, worker
        self._weights, self._stashes = weights, stashes
        self._held: dict[Edge | tuple[str, int], float] = {}
        homes = schedule.worker_of
        self._newest: dict[int, int] = {}  # the micro-batch of each stage's last forward
        self._borrowed = [tie for tie in rules.ties if tie.shares and homes[tie.user] == worker]

    def peak(self) -> float:
        """The peak bytes of the walk, which goes on until its turns repeat."""
        peak, behind = 0.0, max((max(tie.behind) for tie in self._borrowed), default=0)
        first_full = self._schedule.drain + -(-behind // self._schedule.per_turn)  # all versions in flight differ
        for turn in range(first_full + STEADY):
            for action in self._schedule.turn(self._worker, turn):
                peak = max(peak, self._run(action))
        return peak

    def _run(self, action: Action) -> float:
        """Run an action and return the peak bytes during it."""
        needs = self._rules.needs(action)
        for edge in needs:
            if edge not in self._held:
                self._held[edge] = self._received_bytes(edge)
        if action.kind == "F":
            self._newest[action.stage] = action.microbatch
            self._held["seen", action.stage] = self._stages[action.stage].seen
        elif action.kind == "U":
            self._held.pop(("seen", action.stage), None)
        extra = max(self._extra_bytes(action), self._sum_bytes(action.stage, needs))
        peak = sum(self._held.values()) + self._older_versions() + extra
        for edge in self._rules.makes(action):
            self._held[edge] = self._made_bytes(edge)
        for edge in self._rules.frees(action, needs):
            self._held.pop(edge, None)
        gradients_key = ("gradients", action.stage)
        if action.kind in "BW":
            self._held[gradients_key] = self._stages[action.stage].gradients
        elif action.kind == "U":
            self._held.pop(gradients_key, None)
        return peak

    def _sum_bytes(self, stage: int, needs: Sequence[Edge]) -> float:
        # A sum of two gradients of a lent weight is a new tensor. It is gone before an update that stashes weights.
        arrived = (self._received_bytes(edge) for edge in needs if edge.value == "tied-gradient")
        return max(arrived, default=0.0) - self._stages[stage].gradients * self._stashes[stage]

    def _older_versions(self) -> float:
        # Bytes of borrowed weights that graphs in flight hold, beside the newest.
        older = 0.0
        for tie in self._borrowed:
            seen_by = [self._newest.get(tie.user, 0)]
            seen_by += [
                edge.source.microbatch
                for edge in self._held
                if isinstance(edge, Edge) and edge.value in ("graph", "version") and edge.stage == tie.user
            ]
            versions = {max(-1, tie.newest(microbatch)) for microbatch in seen_by}
            older += (len(versions) - 1) * self._weights.get((tie.owner, tie.user), 0.0)
        return older

    def _extra_bytes(self, action: Action) -> float:
        stage = self._stages[action.stage]
        has_gradients = ("gradients", action.stage) in self._held
        return {
            "F": stage.forward,
            "C": stage.forward,
            "I": stage.input_gradient,
            "U": stage.update,
            "L": stage.learn,
        }.get(
            action.kind,
            (stage.later_backward if has_gradients else stage.first_backward) if action.kind in "BW" else 0.0,
        )

    def _received_bytes(self, edge: Edge) -> float:
        # The size of a message from another worker. A stage's input is kept as long as its graph and counted with it.
        if edge.value == "gradient" and edge.source.stage >= 0:
            return self._stages[edge.source.stage].input
        if edge.value == "tied-gradient":  # all of a minibatch, until they are added up
            return self._weights.get((edge.stage, edge.source.stage), 0.0)
        return 0.0

    def _made_bytes(self, edge: Edge) -> float:
        worker_of, stage = self._schedule.worker_of, self._stages[edge.source.stage]
        if edge.value == "graph":
            worker_below = worker_of.get(edge.stage - 1)
            return stage.kept + (stage.input if worker_below not in (None, self._worker) else 0.0)
        if edge.value == "input":
            return stage.input
        if edge.value == "prediction":
            return stage.prediction
        if edge.value not in ("gradient", "tied-weight", "tied-gradient") or worker_of[edge.stage] != self._worker:
            return 0.0
        if edge.value == "gradient":
            return stage.input
        together = [
            other
            for other in self._rules.makes(edge.source)
            if other.value == edge.value and worker_of[other.stage] == self._worker
        ]
        if edge != together[0]:  # several stages get the same tensors
            return 0.0
        pair = edge.source.stage, edge.stage
        return self._weights.get(pair if edge.value == "tied-weight" else pair[::-1], 0.0)


def with_predictor(
    stage: StageMemory, head: LayerCost, examples: float, optimizer: Optimizer, *, keeps_graph: bool
) -> StageMemory:
    """The memory of a stage with what predicts its gradient.

    From B to L it keeps the stage's output, and the module's graph if that `keeps_graph`.
    """
    graph = graph_of(head).at(examples)
    prediction = stage.output  # of the size of what it predicts the gradient of
    return replace(
        stage,
        weights=stage.weights + head.parameter_bytes,
        state=stage.state + head.state_bytes(optimizer),
        first_backward=stage.first_backward + graph + prediction,
        later_backward=stage.later_backward + graph + prediction,
        prediction=stage.output + (graph if keeps_graph else 0.0),
        learn=head.gradient_bytes + prediction + (0.0 if keeps_graph else graph),
    )


def graph_of(head: LayerCost) -> Affine:
    """Bytes that the graph of a prediction keeps beside the stage's output."""
    return head.activation - (head.input - head.loose_input)
