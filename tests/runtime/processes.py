"""Runs a function, or a script, in several processes that see the variables a launcher would set."""

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from torch.distributed import TCPStore

from runtime import worlds
from runtime.nursery import Forked
from runtime.worlds import reserved_port

keepers = []


def free_port():
    """A port that nobody else is given before this process ends, but that can be listened on."""
    keeper, port = reserved_port()
    keepers.append(keeper)
    return port


def launch(number, target, *args, extra=None, timeout=120, within=None, fresh=0, own=False):
    """Call `target` ("module:function") with args in each process; return what each one returned, in order of ranks.

    They are the processes of a world that has done other jobs and will do more, unless they need variables or networks
    of their `own`, or `fresh` processes, or leave behind what no other job may meet. Raises AssertionError with the
    processes' stderr if one of them fails.
    """
    if not (own or extra or within or fresh):
        try:
            return worlds.do(number, target, *args, seconds=timeout)
        except worlds.WorldError as error:
            raise AssertionError(f"{error}") from error
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "args").write_bytes(pickle.dumps(args))
        command = [sys.executable, __file__, target, folder]
        processes = start(number, command, extra=extra, within=within, fresh=fresh)
        statuses, said = ended(processes, timeout)
        assert statuses == [0] * number, f"{statuses}\n" + "\n".join(text[-3000:] for text in said)
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(number)]


def start(number, command, *, extra=None, within=None, fresh=0, whole=False):
    """The processes of one job; `within` are their network namespaces. The first `fresh` of them are no forks.

    Forks take the interpreter apart at their end if that is `whole`.
    """
    tests = Path(__file__).parents[1]
    common = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]), **(extra or {}),
    }  # fmt: skip
    started = []
    for rank in range(number):
        own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if rank < fresh:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, env=own, **pipes))
        else:
            network = None if within is None else within[rank]
            started.append(Forked(command, own, network=network, server=False, whole=whole))
    return started


def run(number, command, *, whole=False, killed=()):
    """Exit statuses of the processes of a job that fails, and what each said on stderr; see `ended`.

    They meet at a store of this process, as at a launcher's, which is there until all have ended. If they are `whole`,
    the first of them holds it: it has to be there for a while after its error.
    """
    store = None if whole else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    extra = {} if whole else {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return ended(start(number, command, extra=extra, whole=whole), killed=killed)


def ended(processes, timeout=120, killed=()):
    """Exit statuses, and what each process said on stderr. Those of `killed` are ended once the others have.

    Raises TimeoutExpired if another one does not end; no process is left then either.
    """
    try:
        for rank, process in enumerate(processes):
            if rank not in killed:
                process.wait(timeout)
    finally:
        for process in processes:
            process.kill()
        said = [process.communicate()[1] for process in processes]
    return [process.returncode for process in processes], said


def speakers(said, words):
    """The ranks of those that said so."""
    return [rank for rank, text in enumerate(said) if words in text]


if __name__ == "__main__":
    import importlib

    import torch

    torch.set_num_threads(1)
    target, folder = sys.argv[1], Path(sys.argv[2])
    module, function = target.split(":")
    args = pickle.loads((folder / "args").read_bytes())
    result = getattr(importlib.import_module(module), function)(*args)
    (folder / f"result{os.environ['RANK']}").write_bytes(pickle.dumps(result))
