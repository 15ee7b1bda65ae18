"""What a Trainer measures while it trains, on its way to the run's experiment trackers."""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from stretto.runtime.process_memory import most_held
from stretto.runtime.serialize import as_tensor, as_text
from stretto.schedule import Rules, Schedule, draw
from stretto.stage.trainer_arguments import Specification
from stretto.trackers.tracker import RunDescription, TrackedRun, Tracker
from stretto.trainer.backend import Backend

MOST_ACTIONS = 2500  # of a turn that is drawn and whose bubble is computed: some 0.1 s
TURNS = 4  # drawn of a schedule whose turn is one micro-batch
WIDTH = 200  # characters of a drawing


class TrainerLike(Protocol):
    """What `fit` and trackers use of a Trainer."""

    backend: Backend
    specification: Specification
    stages: list[nn.Module]
    schedule: Schedule
    rules: Rules
    lag: int
    listeners: list[Callable[[int, float], None]]

    @property
    def entered(self) -> int: ...
    @property
    def optimizers(self) -> list[torch.optim.Optimizer | None]: ...
    @property
    def lr(self) -> list[float | list[float] | None]: ...
    def step(self, x: Any, y: Any) -> float | None: ...
    def flush(self) -> list[float]: ...
    def evaluate(
        self, batches: Iterable[tuple[Any, Any]], metrics: Mapping[str, Callable[[Any, Any], Any]] | None
    ) -> dict[str, float]: ...
    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any]) -> None: ...
    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]: ...


class Tracking:
    """Sends losses, evaluations and what the processes measure to the trackers of one run.

    Every process has one and calls `step` after each step; the first process writes. Rates, norms and memory travel to
    it as messages that nobody waits for: it reads those of a step `lag` steps later, when all processes have made it.
    Gradients are measured at every update meanwhile. `tell` is called with a sentence where a tracker fails.
    """

    def __init__(
        self, trainer: TrainerLike, trackers: Sequence[Tracker], run: RunDescription, tell: Callable[[str], None]
    ) -> None:
        self._trainer, self._backend = trainer, trainer.backend
        self._measure_norms(on=bool(trackers))
        self._every = min((tracker.every for tracker in trackers), default=0)
        self._reported: deque[int] = deque()  # steps whose reports the first process has not read
        self._open: dict[int, dict[str, float]] = {}  # by steps whose loss is not known
        self._told = run.since  # the last step whose loss is logged
        self._run = TrackedRun(trackers, run, tell) if trackers and self._backend.rank == 0 else None

    def for_checkpoint(self) -> dict[str, str]:
        """Pass on all that is logged; returns what the run is called in each tracker, on the first process."""
        if self._run is None:
            return {}
        self._run.flush()
        return dict(self._run.ids)

    def step(self, number: int, examples_per_second: float) -> None:
        """Step `number`, counted from 1, has been made; its loss may come later."""
        if not self._every:
            return
        if number == 1 or number % self._every == 0:
            with self._backend.abort_all_on_error():
                self._backend.report(as_tensor(json.dumps(self._measured()).encode()))
            self._reported.append(number)
        if self._run is not None:
            self._open[number] = {"examples_per_second": examples_per_second}
            while self._reported and self._reported[0] + self._trainer.lag <= number:
                self._read()

    def loss(self, number: int, value: float) -> None:
        """The loss of a step, under its own number under every method; told again, or before the run, it is dropped."""
        if self._run is not None and number > self._told:
            self._told = number
            self._run.write(number, {"loss": value, **self._open.pop(number, {})})

    def evaluation(self, number: int, values: Mapping[str, float | None]) -> None:
        if self._run is not None:
            self._run.write(number, {key: float(value) for key, value in values.items() if value is not None})

    def add_file(self, path: Any) -> None:
        if self._run is not None:
            self._run.add_file(path)

    def settle(self) -> None:
        """Read what the other processes have sent; all have made the same steps."""
        while self._run is not None and self._reported:
            self._read()

    def close(self, *, finished: bool, settles: bool | None = None) -> None:
        """End the run. Where it has not `finished` other processes may be lost, and none is waited for.

        With `settles` it is known that all of them have stopped after the same step.
        """
        if finished if settles is None else settles:
            self.settle()
        self._measure_norms(on=False)
        if self._run is not None:
            self._run.close(finished=finished)

    def _read(self) -> None:
        assert self._run is not None
        with self._backend.abort_all_on_error():
            reports = [json.loads(as_text(report)) for report in self._backend.reports()]
        self._run.write(self._reported.popleft(), joined(reports))

    def _measure_norms(self, *, on: bool) -> None:
        for stage in self._backend.every_stage:
            stage.measures_norms = on

    def _measured(self) -> dict[str, Any]:
        # Of replicas, and of processes that share stages, only the first one tells rates and norms.
        tells = self._backend.writes
        norms = self._backend.grad_norms() if tells else {}
        rates = {f"stage_{index}": rate for index, rate in enumerate(self._trainer.lr if tells else [])}
        return {
            "lr": {
                name: max(rate) if isinstance(rate, list) else rate for name, rate in rates.items() if rate is not None
            },
            "norm": math.hypot(*norms.values()) if norms else None,
            "peak_memory": most_held(self._trainer.specification.device),
        }


def joined(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One row of the reports of all processes, by rank: learning rates, the norm of all gradients, peak memory."""
    row: dict[str, float] = {}
    rates = {name: rate for report in reports for name, rate in report["lr"].items()}
    if len(set(rates.values())) == 1:
        row["lr"] = next(iter(rates.values()))
    else:
        row |= {f"lr/{name}": rate for name, rate in rates.items()}
    norms = [report["norm"] for report in reports if report["norm"] is not None]
    if norms:
        row["grad_norm"] = math.hypot(*norms)
    for rank, report in enumerate(reports):
        if report["peak_memory"] is not None:
            row[f"peak_memory_bytes/rank_{rank}" if len(reports) > 1 else "peak_memory_bytes"] = report["peak_memory"]
    return row


def bubble_of(trainer: TrainerLike) -> float | None:
    """The trainer's `bubble`."""
    return bubble(trainer.schedule, trainer.rules)


def bubble(schedule: Schedule, rules: Rules) -> float | None:
    """The share of time in which workers wait in the steady state, with forwards of 1 and backwards of 2 units.

    None where it would take long to find.
    """
    actions = [action for row in schedule.body for action in row]
    if len(actions) > MOST_ACTIONS:
        return None
    from stretto.simulate import period, unit_costs

    time_of_turn = period(schedule, rules, unit_costs)
    return max(0.0, 1 - sum(map(unit_costs, actions)) / (time_of_turn * schedule.num_workers))


def drawing_of(trainer: TrainerLike) -> str:
    """The trainer's schedule in characters; empty where it is too long to be looked at."""
    from stretto.simulate import simulate

    schedule = trainer.schedule
    if sum(map(len, schedule.body)) > MOST_ACTIONS:
        return ""
    timeline = simulate(schedule, trainer.rules, TURNS if schedule.per_turn == 1 else 1)
    method = trainer.specification.method
    return f"{method}: {method.summary}\n\n{draw.text(timeline.spans, width=WIDTH)}"


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group that are numbers, texts and tuples."""
    return {key: value for key, value in group.items() if isinstance(value, bool | int | float | str | tuple)}


def settings_of(trainer: TrainerLike) -> dict[str, Any]:
    """What a Trainer was made of, as plain data."""
    of = trainer.specification
    optimizer = next((each for each in trainer.optimizers if each is not None), None)
    groups = [] if optimizer is None else [plain_options(group) for group in optimizer.param_groups]
    options = groups[0] if len(groups) == 1 else {f"group {number}": group for number, group in enumerate(groups)}
    return {
        "method": str(of.method),
        "stages": len(trainer.stages),
        "workers": trainer.schedule.num_workers,
        "processes": trainer.backend.size,
        "mesh": {"data": of.mesh.data, "tensor": of.mesh.tensor, "space": list(of.mesh.space)},
        "sync": str(of.sync),
        "precision": of.precision.name,
        "device": str(of.device),
        "seed": of.seed,
        "clip": of.clip,
        "optimizer": {"name": type(optimizer).__name__, **options} if optimizer is not None else "none",
        "bubble": bubble_of(trainer),
    }
