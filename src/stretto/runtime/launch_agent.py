"""torch's agent for the workers of this machine, where one that cannot be started is one that has failed."""

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler

from stretto.processes import fork_server

PERIOD = 0.1  # seconds between two looks at the workers
SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # where torch's agent looks for those that it takes over: none


class Agent(LocalElasticAgent):
    """Starts workers, looks after them, and starts them again; `folder` is for what they say when they fail."""

    def __init__(self, spec: WorkerSpec, folder: Path) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder)), start_method=fork_server.method())
        self._folder = folder
        self._unstarted: ProcessFailure | None = None

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
        told = {"message": message, "kind": "ForkServerLost", "timestamp": str(int(time.time()))}
        file.write_text(json.dumps(told), encoding="utf-8")
        return ProcessFailure(local_rank=0, pid=0, exitcode=1, error_file=str(file))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._unstarted is not None:
            first = worker_group.workers[0].global_rank
            return RunResult(state=WorkerState.FAILED, failures={first: self._unstarted})
        if self._pcontext is not None:
            living = {child.pid for child in multiprocessing.active_children()}
            if not living.issuperset(self._pcontext.pids().values()):
                self._wake()
        result: RunResult = super()._monitor_workers(worker_group)
        return result

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
    os.environ[SIGNALS] = ""
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
        os.environ.pop(SIGNALS, None)
