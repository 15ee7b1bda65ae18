"""FLOPs of every action, counted on the real modules by torch's own counter.

What a step of a method costs: in all, and along its critical path.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from stretto.emulate import Emulator
from stretto.errors import UsageError, nearest
from stretto.losses.minibatch_counts import Target
from stretto.methods.definition import Phases
from stretto.nn import deferred
from stretto.nn.batch import inputs_on, target_on
from stretto.nn.flop_counter import counting
from stretto.nn.seeding import ForwardSeeds, PreservedGenerator
from stretto.options.checks import of_kind, shown
from stretto.schedule import Action, Rules
from stretto.simulate import period
from stretto.stage.gradient_predictor import GradientPredictor
from stretto.stage.stage import PhaseSettings, Stage, StageParts
from stretto.stage.trainer_arguments import Specification
from stretto.trainer.trainer import Trainer
from stretto.weights import WEIGHTS

# Predicting and correcting weights is element-wise, and counts as nothing; a graph that lives through an update needs
# a stash to be counted on a copy whose optimizer never steps.
COUNTED_AS = {"current": "current", "stash": "stash", "double-buffered": "double-buffered", "live": "stash"}
Flops = Mapping[tuple[str, int], float]  # (kind, stage) -> FLOPs per example


def count(trainer: Trainer, x: Any, y: Any) -> Flops:
    """What each action of one minibatch costs, in FLOPs per example: forward and head, backward or its two halves.

    Counted while a copy of the stages and heads really runs the method's actions, so that what a method spares is
    spared: the input gradient at a detached input, or a second forward. The trainer, its statistics and the global
    generator are left alone. Element-wise work and optimizers count as nothing, as in torch's counter.
    """
    of, stages = trainer.specification, []
    alone = replace(trainer.rules, per_update=1)
    for index, (module, head) in enumerate(deferred.deep_copy(list(zip(trainer.stages, trainer.heads, strict=True)))):
        phase = PhaseSettings(WEIGHTS[COUNTED_AS[of.method.weights]](module), None)
        stages.append(Counted(parts_of(trainer, index, module, head), of, alone, phase))
    rules = replace(trainer.rules, ties=())  # the copies share weights among them as the originals do
    emulator = Emulator(trainer.schedule, rules, dict(enumerate(stages)), trainer.method.delays(trainer.schedule))
    inputs, target = trainer.precision.inputs(inputs_on(x, trainer.device)), target_on(y, trainer.device)
    with torch.enable_grad(), PreservedGenerator(trainer.device):
        emulator.step(0, [{"activation": inputs, "target": Target(target, inputs=inputs)}] * trainer.schedule.per_turn)
        emulator.drain(1)
    examples = inputs[0].shape[0]
    return {
        (kind, stage.index): flops / trainer.schedule.per_turn / examples
        for stage in stages
        for kind, flops in stage.flops.items()
    }


def parts_of(trainer: Trainer, index: int, module: nn.Module, head: nn.Module | None) -> StageParts:
    """A stage with its head, or with what predicts its gradient; nothing is stepped."""
    reach, of = trainer.rules.reach, trainer.specification
    if head is None or index not in reach.predicted:
        return StageParts(index=index, module=module, head=head)
    prediction = of.method.prediction
    assert prediction is not None, "the method says how predictions learn"
    predictor = GradientPredictor(
        module=head,
        seeds=ForwardSeeds(trainer.device, of.seed, index),
        labelled=reach.labelled,
        keeps_graph=prediction.keeps_graph,
    )
    return StageParts(index=index, module=module, predictor=predictor)


class Counted(Stage):
    """A stage that adds up what its actions cost."""

    def __init__(self, parts: StageParts, specification: Specification, rules: Rules, phase: PhaseSettings) -> None:
        super().__init__(parts, specification, rules, phase)
        self.flops: dict[str, int] = {}

    def run(
        self, kind: str, microbatch: int, operands: Mapping[str, Any], version: int | None = None
    ) -> dict[str, Any]:
        """Run the action under torch's counter."""
        with counting() as counter:
            made = super().run(kind, microbatch, operands, version)
        self.flops[kind] = self.flops.get(kind, 0) + counter.get_total_flops()
        return made


def paper(counted: Flops) -> Flops:
    """Charge what Laskin, Metz et al. 2020 charge: a backward is two forwards, whatever a method spares.

    A recompute is a forward, and what learns to predict a gradient costs what was counted (ours).
    """
    factor = {"F": 1, "C": 1, "B": 2, "I": 1, "W": 1, "A": 0, "R": 0, "U": 0, "M": 0}
    return {
        (kind, stage): count if kind == "L" else factor[kind] * counted["F", stage]
        for (kind, stage), count in counted.items()
    }


def durations(flops: Flops) -> Callable[[Action], float]:
    """FLOPs as times, for a simulation in which every worker computes at the same rate.

    A stage that recomputes in this schedule alone, not where it was counted, takes a forward for it.
    """
    forward = {("C", stage): each for (kind, stage), each in flops.items() if kind == "F"}
    times = {**forward, **flops}
    return lambda action: times.get((action.kind, action.stage), 0.0)


Accounting = Literal["counted", "paper"]

NOTES: dict[Accounting, str] = {
    "counted": (
        "Total compute is what torch's FLOP counter counts on the real modules, auxiliary heads included. Serial "
        "compute is the simulated time of a steady-state step with those counts as durations: one worker a stage "
        "unless said otherwise, free communication, the examples of a batch in parallel; a micro-batch takes its share "
        "of the batch's time."
    ),
    "paper": (
        "As in Laskin, Metz et al. (2020), a backward is charged as two forwards, whatever a method spares; forwards "
        "(heads included) are counted by torch's FLOP counter. Total compute is their sum. Serial compute is the "
        "simulated time of a steady-state step with those charges as durations: one worker a stage unless said "
        "otherwise, free communication, the examples of a batch in parallel; a micro-batch takes its share of the "
        "batch's time."
    ),
}


@dataclass(frozen=True)
class Costs:
    """FLOPs: `total` per example, `serial` per step whatever the batch size, since its examples run in parallel.

    `synchronous` is what a step of the method's synchronous phases takes instead of `serial`.
    """

    accounting: Accounting
    flops: Flops
    total: float
    serial: float
    synchronous: float = 0.0
    phases: Phases = field(default_factory=Phases)

    def serial_after(self, steps: int) -> float:
        """The time of the first so many steps: each at the pace of its phase."""
        flushed = self.phases.synchronous_among(steps)
        return flushed * self.synchronous + (steps - flushed) * self.serial


def measure(trainer: Trainer, x: Any, y: Any, accounting: str = "counted") -> Costs:
    """The costs of a step of `trainer` on minibatches like (x, y). Trains nothing.

    Reference: the table "Cost of a run" for `accounting="paper"`; see NOTES for what each accounting means.
    """
    of_kind("trainer", trainer, Trainer, "a stretto.Trainer")
    known: tuple[Accounting, ...] = get_args(Accounting)
    for name in known:
        if isinstance(accounting, str) and name == accounting:
            counted = count(trainer, x, y)
            flops = counted if name == "counted" else paper(counted)
            share = 1 / trainer.schedule.per_turn
            time = durations({action: share * amount for action, amount in flops.items()})
            costs = Costs(name, flops, sum(flops.values()), period(trainer.schedule, trainer.rules, time))
            if not trainer.method.phases:
                return costs
            schedule, rules = trainer.method.synchronous_plan(len(trainer.stages), trainer.schedule.num_workers)
            return replace(costs, synchronous=period(schedule, rules, time), phases=trainer.method.phases)
    raise UsageError(f"unknown accounting {shown(accounting)}: {nearest(str(accounting), known)}")
