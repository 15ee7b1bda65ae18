"""Runs on two processes, one run after another."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from recorded.runs import RUNS, Run
from recorded.training import Digests, train
from runtime import worlds

SECONDS = 300  # for one run


def do(runs: Sequence[Run]) -> Iterator[tuple[Run, Digests]]:
    """Runs and their digests. One that fails has "error" instead; the others go on in new processes."""
    for run in runs:
        with tempfile.TemporaryDirectory() as folder:
            write_order(run, Path(folder))
            try:
                yield run, worlds.do(2, "recorded.processes:digests", run.name, folder, seconds=SECONDS)[0]
            except worlds.WorldError as error:
                yield run, {"error": f"{error}"[-1500:]}


def write_order(run: Run, folder: Path) -> None:
    """With a parameter server the order of updates is chance: processes keep the one of an emulated run."""
    if run.sync.startswith("parameter-server"):
        with tempfile.TemporaryDirectory() as checkpoints:
            order = train(replace(run, processes=1), checkpoints)[1].order()
        assert order is not None
        order.write(order_file(folder))


def order_file(folder: Path) -> Path:
    """Where it stands."""
    return folder / "order.json"


def digests(name: str, folder: str) -> Digests | None:
    """Those of a run, on the first of the two processes."""
    (run,) = (each for each in RUNS if each.name == name)
    order = order_file(Path(folder))
    return train(run, str(Path(folder) / "checkpoints"), str(order) if order.exists() else None)[0]
