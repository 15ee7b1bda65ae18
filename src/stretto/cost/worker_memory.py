"""The most memory of each worker: its list of actions walked through, with what each of them makes, keeps and frees.

Only a worker's own order counts: what arrives for it stays with its sender until it is asked for. Weights, optimizer's
state and versions of weights are there all the time, and so are the buffers of the runtime's messages: each channel's
sender keeps as many as may be under way there, and its receiver has one posted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.cost.layer_table import LayerCost, ModelCosts, Peaks
from stretto.cost.predict import optimizer_of
from stretto.methods import Method
from stretto.schedule import Action, Edge, Rules, Schedule

PREFIX = 64.0  # bytes before each message's value
SMALL = 64.0  # bytes of a value that says little: a loss
STEADY = 4  # turns after which everything is as ever after, once all micro-batches in flight have entered


NONE = Peaks((), (), (), 0.0)  # where nobody has looked


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage for micro-batches of one size.

    `kept` is what a forward leaves for its backward, the stage's input not included, `forward` the most that a forward
    takes beside its input. A backward frees what is kept as it goes: `first` and `again` are the most it takes beside
    what is kept, with no gradients before and with gradients to add to; `inputs` the same of its first half.
    """

    weights: float
    gradients: float
    state: float
    input: float
    output: float
    kept: float
    forward: float
    first: float
    again: float
    inputs: float
    update: float


def stage_memory(rows: Sequence[LayerCost], examples: float, optimizer: str, head: LayerCost | None) -> StageMemory:
    """Of the layers of a stage, loss included; `head` stands behind them."""
    whole = rows[0]
    for row in rows[1:]:
        whole = whole.then(row)
    given, made = whole.input.at(examples), whole.output.at(examples)
    own = [(row.activation - row.shared).at(examples) for row in rows]
    own[0] = (rows[0].activation - rows[0].input + rows[0].loose_input).at(examples)
    kept, before, forward = whole.held.at(examples) - given, 0.0, 0.0
    if rows[-1].type == "Loss":  # the model's output stays with the stage, whether or not the loss keeps it
        kept += rows[-2].loose_output.at(examples)
    for row, mine, loose in zip(rows, own, [0.0, *(r.loose_output.at(examples) for r in rows[:-1])], strict=True):
        forward = max(forward, before + loose + (row.peaks or NONE).at("forward", examples))
        before += mine
    stays = made - rows[-1].loose_output.at(examples)  # the output that the graph keeps: it lives until the end
    freed, grown = -stays, 0.0
    first = again = inputs = 0.0
    for row, mine in reversed(list(zip(rows, own, strict=True))):
        peaks = row.peaks or NONE
        first = max(first, peaks.at("backward", examples) + grown - freed)
        again = max(again, peaks.at("again", examples) - freed)
        inputs = max(inputs, peaks.at("again", examples))
        freed, grown = freed + mine, grown + row.gradient_bytes
    chosen = optimizer_of(optimizer)
    largest = max((row.peaks.largest for row in rows if row.peaks is not None), default=0.0)
    found = StageMemory(
        weights=whole.parameter_bytes, gradients=whole.gradient_bytes, state=chosen.states * whole.gradient_bytes,
        input=given, output=made, kept=kept, forward=max(forward, kept), first=first, again=again, inputs=inputs,
        update=2 * largest if chosen.states > 1 else 0.0,
    )  # fmt: skip
    return found if head is None else with_head(found, head, examples, chosen.states)


def with_head(stage: StageMemory, head: LayerCost, examples: float, states: int) -> StageMemory:
    """The stage with a head behind it."""
    kept = head.activation.at(examples) - (head.input - head.loose_input).at(examples)
    return StageMemory(
        weights=stage.weights + head.parameter_bytes,
        gradients=stage.gradients + head.gradient_bytes,
        state=stage.state + states * head.gradient_bytes,
        input=stage.input, output=stage.output, kept=stage.kept + kept,
        forward=max(stage.forward, stage.kept + kept),
        first=stage.first + head.gradient_bytes + stage.output - kept,
        again=stage.again + head.gradient_bytes + stage.output - kept,
        inputs=stage.inputs + head.gradient_bytes + stage.output,
        update=stage.update,
    )  # fmt: skip


def peak_bytes(
    method: Method,
    schedule: Schedule,
    rules: Rules,
    costs: ModelCosts,
    bounds: Sequence[int],
    examples: float,
    *,
    optimizer: str = "sgd",
    heads: Sequence[LayerCost | None] | None = None,
) -> tuple[float, ...]:
    """The most bytes of tensors on each worker, the user's own batches not included."""
    behind = heads or [None] * schedule.num_stages
    stages = [
        stage_memory(costs.layers[bounds[s] : bounds[s + 1]], examples, optimizer, behind[s])
        for s in range(schedule.num_stages)
    ]
    versions = method.versions(schedule)
    buffers = channel_bytes(method, schedule, rules, stages)
    peaks = []
    for worker in range(schedule.num_workers):
        own = [s for s, home in schedule.worker_of.items() if home == worker]
        always = sum(stages[s].weights + stages[s].state + (versions[s] - 1) * stages[s].gradients for s in own)
        peaks.append(always + buffers[worker] + MemoryWalk(schedule, rules, stages, worker).peak())
    return tuple(peaks)


def channel_bytes(
    method: Method, schedule: Schedule, rules: Rules, stages: Sequence[StageMemory]
) -> Mapping[int, float]:
    """Bytes of message buffers that each worker keeps."""
    from stretto.runtime.channels import SPARE, channels

    found = dict.fromkeys(range(schedule.num_workers), 0.0)
    for channel, depth in channels(schedule, rules, method.lag(schedule.num_stages)).items():
        sender, size = schedule.worker_of[channel.stage], PREFIX
        if channel.value in ("activation", "gradient"):
            size += stages[channel.stage].output if channel.value == "activation" else stages[channel.stage].input
        if sender != channel.worker:
            found[sender] += (depth + SPARE) * size
            found[channel.worker] += size
    return found


class MemoryWalk:
    """A worker goes through its list; `peak` is the most it held beside what is there all the time."""

    def __init__(self, schedule: Schedule, rules: Rules, stages: Sequence[StageMemory], worker: int) -> None:
        self._schedule, self._rules, self._stages, self._worker = schedule, rules, stages, worker
        self._held: dict[Edge | tuple[str, int], float] = {}

    def peak(self) -> float:
        """Walk until everything repeats."""
        most = 0.0
        for n in range(self._schedule.drain + STEADY):
            for action in self._schedule.turn(self._worker, n):
                most = max(most, self._run(action))
        return most

    def _run(self, action: Action) -> float:
        """Do an action; the most that was held during it."""
        needs = self._rules.needs(action)
        for edge in needs:
            if edge not in self._held:
                self._held[edge] = self._arriving(edge)
        most = sum(self._held.values()) + self._inside(action)
        for edge in self._rules.makes(action):
            self._held[edge] = self._made(edge)
        for edge in self._rules.frees(action, needs):
            self._held.pop(edge, None)
        grads = ("gradients", action.stage)
        if action.kind in "BW":
            self._held[grads] = self._stages[action.stage].gradients
        elif action.kind == "U":
            self._held.pop(grads, None)
        return most

    def _inside(self, action: Action) -> float:
        stage = self._stages[action.stage]
        again = ("gradients", action.stage) in self._held
        return {"F": stage.forward, "C": stage.forward, "I": stage.inputs, "U": stage.update}.get(
            action.kind, (stage.again if again else stage.first) if action.kind in "BW" else 0.0
        )

    def _arriving(self, edge: Edge) -> float:
        # Comes from another worker. What a stage takes stays for as long as its graph: it is counted there.
        if edge.value == "gradient" and edge.source.stage >= 0:
            return self._stages[edge.source.stage].input
        return 0.0

    def _made(self, edge: Edge) -> float:
        homes, stage = self._schedule.worker_of, self._stages[edge.source.stage]
        if edge.value == "graph":
            below = homes.get(edge.stage - 1)
            return stage.kept + (stage.input if below not in (None, self._worker) else 0.0)
        if edge.value == "input":
            return stage.input
        if edge.value == "gradient" and homes[edge.stage] == self._worker:
            return stage.input
        return 0.0
