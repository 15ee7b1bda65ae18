"""Runs on two processes, which find each other by the variables that torchrun sets and do one run after another."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SECONDS = 300  # for all of them

if __name__ == "__main__":
    sys.path[:0] = [str(TESTS)]

from recorded.runs import RUNS, Run  # noqa: E402
from recorded.training import Digests, train  # noqa: E402


def do(runs: Sequence[Run]) -> Iterator[tuple[Run, Digests]]:
    """Runs and their digests. One that fails has "error" instead; the others go on in new processes."""
    while runs:
        with tempfile.TemporaryDirectory() as folder:
            for run in runs:
                write_order(run, Path(folder))
            said = start(runs, folder)
            file = Path(folder) / "digests.jsonl"
            done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        yield from zip(runs, done, strict=False)
        if len(done) < len(runs):
            yield runs[len(done)], {"error": said}
        runs = runs[len(done) + 1 :]


def start(runs: Sequence[Run], folder: str) -> str:
    """Both processes, until they have ended; the last that they say on stderr."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, __file__, folder, *(run.name for run in runs)]
    files = [Path(folder) / f"stderr-{rank}" for rank in range(2)]
    started = []
    try:
        for rank, file in enumerate(files):
            own = {**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with file.open("w") as stderr:
                started.append(subprocess.Popen(command, env=own, stderr=stderr))
        for process in started:
            process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        files[0].write_text(f"{files[0].read_text()}\nnot ended after {SECONDS} s")
    finally:
        for process in started:
            process.kill()
            process.wait()
    return "\n".join(file.read_text()[-1500:] for file in files)


def write_order(run: Run, folder: Path) -> None:
    """With a parameter server the order of updates is chance: processes keep the one of an emulated run."""
    if run.sync.startswith("parameter-server"):
        with tempfile.TemporaryDirectory() as checkpoints:
            order = train(replace(run, processes=1), checkpoints)[1].order()
        assert order is not None
        order.write(order_file(run, folder))


def order_file(run: Run, folder: Path) -> Path:
    """Where it stands."""
    return folder / f"order-{RUNS.index(run)}.json"


def serve(folder: Path, names: Sequence[str]) -> None:
    """Be one of the two processes."""
    runs = {run.name: run for run in RUNS}
    for number, name in enumerate(names):
        here, order = folder / str(number), order_file(runs[name], folder)
        digests, _ = train(runs[name], str(here), str(order) if order.exists() else None)
        if digests is not None:
            with (folder / "digests.jsonl").open("a") as file:
                file.write(json.dumps(digests) + "\n")


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    status = 0
    try:
        serve(Path(sys.argv[1]), sys.argv[2:])
    except BaseException:  # noqa: BLE001 (told, and this process ends)
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # without waiting for the other's connections
