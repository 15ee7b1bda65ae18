"""Processes that train by one plan, each group started once, and wait for their turn without using a core.

A group is what `stretto train --plan FILE` would start: the same settings, data, optimizer and Trainer.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from stretto.errors import StrettoError
from stretto.options.user_errors import error_place, exits_told
from stretto.plan.plan_file import training_settings
from stretto.plan.trials import Trial, TrialFailedError, whole
from stretto.runtime.launch import MEET, OF_LAUNCHER
from stretto.runtime.process_memory import peak_memory
from stretto.runtime.rendezvous.nodes import LocalRendezvous
from stretto.runtime.rendezvous.signed_store import VARIABLE, Secret
from stretto.runtime.world import take_place
from stretto.settings.runs import TrainSettings, known
from stretto.study.first_batches import refuse_other_sizes
from stretto.study.prepare import dataset, prepare, resolve, with_any_rate
from stretto.study.training_run import training_batches
from stretto.system.children import Child, end, exit_reason

TIMEOUT = 3600.0  # seconds that a worker waits for another: longer than all turns of all plans
GRACE = 5.0  # seconds for the others once one has failed
TURN, FEWEST, MOST = 0.4, 3, 400  # seconds of a turn, if that is at least and at most so many steps
Task = Callable[[Connection, Mapping[str, Any]], None]  # of each process: its end of a pipe, and its settings
COUNTED = 16  # steps of a full pipeline whose bytes are counted: how many messages wait depends on who is late
WARM, WARMING = 2, 0.1  # steps of a turn that are not timed, at least, and seconds: workers have been idle


class TrialGroup:
    """The processes of one plan. `turn` lets them train; use it as a context manager, which ends them.

    `training` are the settings of `stretto train` in the plan's file. Another `task` than training when it is their
    turn gives one answer, which `hear` returns.
    """

    def __init__(self, training: Mapping[str, Any], task: Task | None = None) -> None:
        workers = int(training.get("workers", 1))
        self._rendezvous = LocalRendezvous(Secret.new(), MEET)
        self._processes: list[Child] = []
        self._fill, self._pace = 0, 0.0  # steps until the pipeline is full; seconds of a step, as far as known
        try:
            for environment in self._environments(workers):
                self._processes.append(Child(work, environment, dict(training), task or train_when_asked))
        except BaseException:  # Ctrl-C while they start
            self.end(at_once=True)
            raise

    def __enter__(self) -> "TrialGroup":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.end(at_once=kind is not None)

    def _environments(self, workers: int) -> list[dict[str, str]]:
        # As launch gives them to its workers; a group of one does not meet anybody.
        shared = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHER)}
        shared |= {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
        if workers > 1:
            place = self._rendezvous.next_rendezvous().bootstrap_store_info
            assert place is not None, "a rendezvous of one machine says where its store is"
            shared |= {
                "MASTER_ADDR": place.master_addr,
                "MASTER_PORT": str(place.master_port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": self._rendezvous.get_run_id(),
                VARIABLE: self._rendezvous.secret.text,
            }
        return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(workers)]

    def await_ready(self) -> None:
        """Wait until the processes have built their trainers. Raises TrialFailedError if one of them fails."""
        self._fill = round(max(self.hear()))

    def fill(self) -> None:
        """Let the processes train until their pipeline is full. Raises TrialFailedError if one of them fails."""
        self._pace = self._ask(0, self._fill)

    def turn(self) -> float:
        """Let the processes train for about TURN seconds: the median seconds of a step, of the slowest worker.

        Raises TrialFailedError if one of them fails; all are ended then.
        """
        warm, timed = (round(seconds / self._pace) for seconds in (WARMING, TURN))
        self._pace = self._ask(min(max(warm, WARM), MOST), min(max(timed, FEWEST), MOST))
        return self._pace

    def _ask(self, warm: int, steps: int) -> float:
        for child in self._processes:
            child.send((warm, steps))
        return max(self.hear())

    def hear(self) -> list[float]:
        """One answer of each process. Raises TrialFailedError if one of them fails; all are ended then."""
        waiting = {child.pipe: child for child in self._processes}
        answers, causes = list[float](), list[str]()
        while waiting and (ready := wait([*waiting], GRACE if causes else None)):
            for pipe in (each for each in waiting.copy() if each in ready):
                child = waiting.pop(pipe)
                try:
                    answer, cause = child.receive()
                except EOFError:
                    answer, cause = None, died(child.process)
                if answer is None:
                    causes.insert(0 if (child.process.exitcode or 0) < 0 else len(causes), cause)
                else:
                    answers.append(answer)
        if causes:
            self.end(at_once=True)
            raise TrialFailedError(next(filter(None, causes), "its processes ended without a word"))
        return answers

    def end(self, *, at_once: bool = False) -> None:
        """End the processes: by themselves, as they clean up then, or at once."""
        end(self._processes, at_once=at_once)
        self._processes.clear()
        self._rendezvous.shutdown()


@contextlib.contextmanager
def ready(trials: Sequence[Trial], trained: Mapping[str, Any]) -> Iterator[Mapping[Trial, TrialGroup]]:
    """The processes of each trial that has not failed, with full pipelines; marks the trials whose processes fail.

    `trained` are the settings of their model.
    """
    with contextlib.ExitStack() as stack:
        groups = {t: stack.enter_context(TrialGroup(training_settings(t.plan, trained))) for t in whole(trials)}
        for step in (TrialGroup.await_ready, TrialGroup.fill):
            for trial in whole(trials):
                try:
                    step(groups[trial])
                except TrialFailedError as error:
                    trial.failure = f"{error}"
        yield groups


def settings_of(training: Mapping[str, Any]) -> TrainSettings:
    """The settings of `stretto train` in a plan's file, lists as tuples."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in training.items()
    }
    return TrainSettings(**values)


def died(process: BaseProcess) -> str:
    """Why a process died without reporting; empty if it exited normally: another of its group says why."""
    code = process.exitcode or 0
    return exit_reason(f"a worker (process id {process.pid})", code) if code < 0 else ""


def work(pipe: Connection, environment: Mapping[str, str], training: Mapping[str, Any], task: Task) -> None:
    """Run the task of one process, and send why it fails."""
    os.environ.clear()
    os.environ.update(environment)
    try:
        with exits_told():
            task(pipe, training)
    except SystemExit:  # another process of the group says why
        pipe.send((None, ""))
    except StrettoError as error:
        pipe.send((None, f"{error}"))
    except Exception as error:  # noqa: BLE001 - the other plans go on; the command tells the reason
        pipe.send((None, f"{type(error).__name__}: {error}{error_place(error)}"))


def take_place_and_resolve(training: Mapping[str, Any]) -> TrainSettings:
    """Take this process's place among the others; its settings, resolved."""
    requested = settings_of(training)
    take_place(requested.placement)
    torch.set_num_threads(requested.threads)  # as train does in its processes
    return with_any_rate(resolve(requested))


def train_when_asked(pipe: Connection, training: Mapping[str, Any]) -> None:
    """Answer each (warm-up steps, timed steps) with the median seconds of the timed ones.

    The first answer is the number of steps that fill the pipeline.
    """
    prepared = prepare(take_place_and_resolve(training), TIMEOUT)
    refuse_other_sizes(prepared)
    batches = training_batches(prepared)

    def step() -> float:
        x, y = next(batches)
        before = time.perf_counter()
        prepared.trainer.step(x, y)
        return time.perf_counter() - before

    with prepared.trainer.backend.abort_all_on_error():
        pipe.send((filling(prepared.settings), ""))
        while True:
            try:
                warm, steps = pipe.recv()
            except EOFError:
                return
            seconds = [step() for _ in range(warm + steps)][warm:]
            pipe.send((statistics.median(seconds), ""))


def filling(settings: TrainSettings) -> float:
    """Steps until a pipeline is full."""
    return 2.0 * known(settings.stages) + 2


def count_bytes(pipe: Connection, training: Mapping[str, Any]) -> None:
    """Answer with the most bytes that tensors took, data aside, from before the trainer was built to a full pipeline.

    The process is good for nothing else: torch's profiler watches it from the beginning.
    """
    settings = take_place_and_resolve(training)
    dataset(settings)
    with peak_memory() as peak:
        prepared = prepare(settings, TIMEOUT)
        batches = training_batches(prepared)
        peak.part_ends()
        for step in range(round(filling(settings)) + COUNTED):
            prepared.trainer.step(*next(batches))
            if step >= filling(settings):
                peak.part_ends()
    pipe.send((float(peak.bytes), ""))
    with contextlib.suppress(EOFError):  # others may still need what this process has to say
        pipe.recv()
