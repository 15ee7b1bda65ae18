"""Starts the workers of a job on this machine, waits for them, and leaves nothing behind: torch's elastic launcher."""

import contextlib
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler

from stretto import interrupts
from stretto.errors import StrettoError, UsageError
from stretto.options.user_errors import exits_told
from stretto.runtime import job_member
from stretto.runtime.rendezvous.addresses import host_and_port
from stretto.runtime.rendezvous.nodes import LocalRendezvous, NodesRendezvous, say
from stretto.runtime.rendezvous.signed_store import VARIABLE, Secret
from stretto.system import children, fork_server
from stretto.system.temporary_folders import scratch

PERIOD = 0.1  # seconds between two looks at the workers
SIGNALS_OF_TORCH = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # where torch's agent looks for those that it takes over: none
SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT")  # those that interrupt while workers run, as Ctrl-C does
LOUD = ("torch.distributed.elastic", "torch.multiprocessing.spawn")  # loggers of torch's launcher
MEET = timedelta(minutes=15)  # for all nodes to come
SAID = "TORCHELASTIC_ERROR_FILE"  # where a worker leaves what went wrong
GRACE = 2.0  # seconds that a worker which ends because of another lets that one end first: the first is heard
OF_LAUNCHER = ("LOCAL_", "GROUP_", "ROLE_", "MASTER_", "RANK", "WORLD_SIZE", "TORCHELASTIC_")  # names begin so


class Agent(LocalElasticAgent):
    """Starts workers, looks after them, and starts them again; `folder` is for what they say when they fail."""

    def __init__(self, spec: WorkerSpec, folder: Path) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder)), start_method=fork_server.method())
        self._folder = folder
        self._unstarted: ProcessFailure | None = None
        self._failures: Mapping[int, ProcessFailure] = {}  # of the workers that run, or ran last

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._unstarted = None
        fork_server.prepare()  # the server that forked the former ones may have gone
        before = multiprocessing.active_children()
        try:
            of_script = any(getattr(each, "__module__", None) == "__main__" for each in worker_group.spec.args)
            keeping = contextlib.nullcontext() if of_script else fork_server.without_script()
            with keeping, temporary_files_in(self._folder):
                started: dict[int, Any] = super()._start_workers(worker_group)
        except fork_server.LOST:
            self._unstarted = self._failure()
            return {worker.local_rank: 0 for worker in worker_group.workers}
        except BaseException:
            for child in multiprocessing.active_children():  # torch does not know them yet
                if child not in before:
                    child.kill()
            raise
        return started

    def _failure(self) -> ProcessFailure:
        file = self._folder / "unstarted.json"
        message = "the process from which workers are forked has gone while one was started (killed, or out of memory?)"
        tell(file, message, "ForkServerLost")
        return ProcessFailure(local_rank=0, pid=0, exitcode=1, error_file=str(file))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._unstarted is not None:
            first = worker_group.workers[0].global_rank
            self._failures = {first: self._unstarted}
            return RunResult(state=WorkerState.FAILED, failures={first: self._unstarted})
        if self._pcontext is not None:
            living = {child.pid for child in multiprocessing.active_children()}
            if not living.issuperset(self._pcontext.pids().values()):
                self._wake()
        result: RunResult = super()._monitor_workers(worker_group)
        self._failures = result.failures
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        if self._failures:
            lines = f"{exit_reason(*first_of(self._failures))}".splitlines()
            why = ": ".join([*lines[:1], *lines[1:][-1:]])  # of a traceback, the error
            count = f"restart {spec.max_restarts - self._remaining_restarts} of {spec.max_restarts}"
        else:
            why, count = "workers of another node have failed", "that node's restart"
        say(f"{why}; {count}: all workers start again, from the newest checkpoint if there is one")
        super()._restart_workers(worker_group)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self._wake()
        super()._shutdown(*args, **kwargs)

    def _wake(self) -> None:
        # Who is stopped hears no SIGTERM: torch would wait for half a minute before it ends that worker.
        if self._pcontext is not None and hasattr(signal, "SIGCONT"):
            living = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
            for pid in living.intersection(self._pcontext.pids().values()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Have files for temporary use made there meanwhile: what an interrupt leaves of them goes with the folder.

    torch makes a file for each worker's error and removes it at once, to have its name.
    """
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def run(
    work: Callable[..., None],
    arguments: Sequence[Any],
    *,
    workers: int,
    restarts: int,
    handler: RendezvousHandler,
    folder: Path,
) -> dict[int, ProcessFailure]:
    """Call `work` in so many processes, which are started again if one fails; return what failed in the end.

    What a signal raises meanwhile ends all workers first. torch's own handlers are left out, whose exception is dropped
    where nobody can catch it, and by torch where it catches any Exception.
    """
    os.environ[SIGNALS_OF_TORCH] = ""
    spec = WorkerSpec(
        role="worker",
        local_world_size=workers,
        rdzv_handler=handler,
        entrypoint=work,
        args=tuple(arguments),
        max_restarts=restarts,
        monitor_interval=PERIOD,
    )
    try:
        result = Agent(spec, folder).run()
        return dict(result.failures) if result.is_failed() else {}
    finally:
        handler.shutdown()
        os.environ.pop(SIGNALS_OF_TORCH, None)


class WorkerFailedError(StrettoError):
    """A worker has failed; what it said is the message, `kind` the name of the error that it raised, if it did."""

    def __init__(self, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Where a job runs: `workers` processes, as many on each of `nodes` machines, which meet at `rendezvous`.

    Raises UsageError for what cannot be.
    """

    workers: int
    nodes: int = 1
    rendezvous: str | None = None  # "host:port", on the first machine; without it nobody listens but on the loopback
    restarts: int = 0
    timeout: float = 600  # seconds that a worker waits for another before it gives up
    secret: Secret | None = None  # of the job, the same on all nodes; without it the first makes one and says it

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("restarts", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}: choose {least} or more")
        if not 0 < self.timeout < math.inf:
            raise UsageError(f"timeout={self.timeout:g}: choose a number of seconds above 0")
        if self.workers % self.nodes:
            raise UsageError(f"workers={self.workers} on nodes={self.nodes}: each node takes as many as any other")
        if self.nodes > 1 and self.rendezvous is None:
            raise UsageError(f"nodes={self.nodes}: say where they meet, --rendezvous HOST:PORT on one of them")
        if self.rendezvous is not None:
            host_and_port(self.rendezvous)

    def handler(self) -> LocalRendezvous | NodesRendezvous:
        """How its launchers meet each other and their workers. Raises UsageError if they cannot."""
        if self.rendezvous is None:
            return LocalRendezvous(Secret.new(), MEET)
        return NodesRendezvous(self.rendezvous, self.nodes, self.secret, MEET)


def launch(work: Callable[..., None], arguments: Sequence[Any], place: LaunchSettings) -> None:
    """Call `work` in each worker's process, with the variables that torchrun sets; return when all have ended.

    It is a function that can be imported; what it raises, the launching process is told.

    A group of which one fails is started again, `restarts` times; then WorkerFailedError says why. Ctrl-C and SIGTERM
    are passed on to the workers, and raise KeyboardInterrupt once they have ended.
    """
    handler = place.handler()
    with scratch() as folder, silent(), interrupted_by(SIGNALS):
        failures = run(
            begin,
            [{**os.environ, VARIABLE: handler.secret.text}, work, *arguments],
            workers=place.workers // place.nodes,
            restarts=place.restarts,
            handler=handler,
            folder=folder,
        )
        if failures:
            raise exit_reason(*first_of(failures))


def begin(environment: Mapping[str, str], work: Callable[..., None], *arguments: Any) -> None:
    """What each process does: as if it had just been started by the one that launches."""
    fork_server.begin()
    own = {name: value for name, value in os.environ.items() if name.startswith(OF_LAUNCHER)}
    os.environ.clear()
    os.environ.update({**environment, **own})
    try:
        try:
            with exits_told():
                work(*arguments)
        except BaseException as error:
            job_member.fail(error)
            raise
    except SystemExit:
        if not Path(os.environ[SAID]).exists():
            time.sleep(GRACE)
        raise
    except KeyboardInterrupt as interrupt:
        fail(StrettoError(f"{interrupt}"))
    except Exception as error:  # noqa: BLE001 - whoever launched this process says it
        fail(error)


def fail(error: Exception) -> NoReturn:
    """Leave what went wrong where torch's launcher looks for it, and end."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    if isinstance(error, StrettoError):
        message = f"{error}{notes}"
    else:
        message = (
            f"worker {os.environ.get('RANK')} failed{notes}\n{''.join(traceback.format_exception(error))}".rstrip()
        )
    tell(Path(os.environ[SAID]), message, type(error).__name__)
    sys.exit(1)


def tell(file: Path, message: str, kind: str) -> None:
    """Write why a process failed as torch's launcher reads it."""
    told = {"message": message, "kind": kind, "timestamp": str(int(time.time()))}
    file.write_text(json.dumps(told), encoding="utf-8")


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep torch's launcher from telling what we tell ourselves."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(LOUD)]
    loggers = [logging.getLogger(name) for name in [*LOUD, *names]]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextlib.contextmanager
def interrupted_by(names: Sequence[str]) -> Iterator[None]:
    """Let those signals that nobody has taken raise KeyboardInterrupt; only a main thread may take any."""
    here = threading.current_thread() is threading.main_thread()
    found = [getattr(signal, name) for name in names if here and hasattr(signal, name)]
    taken = [number for number in found if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in taken:
            signal.signal(number, interrupts.interrupt)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def first_of(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank of the worker that failed first, and its failure."""
    return min(failures.items(), key=lambda item: item[1].timestamp)


def exit_reason(rank: int, failure: ProcessFailure) -> WorkerFailedError:
    """Why the job failed: what the first worker to fail said, else how it ended."""
    where = f"worker {rank} (process id {failure.pid})"
    data = failure.error_file_data
    told = str(data["message"]) if "timestamp" in data else ""  # it may be told to end after it has spoken
    return WorkerFailedError(told or children.exit_reason(where, failure.exitcode), data.get("kind"))
