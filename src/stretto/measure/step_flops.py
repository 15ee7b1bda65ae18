"""What a step of a method costs: in all, and along its critical path."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from stretto.errors import UsageError, nearest
from stretto.measure.flops import Flops, count, durations, paper
from stretto.methods.definition import Phases
from stretto.options.checks import of_kind, shown
from stretto.simulate import period
from stretto.trainer.trainer import Trainer

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
