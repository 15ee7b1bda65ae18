"""Calibration of a machine on processes: `python -m stretto.study.machine FOLDER` is one of those that are started."""

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from stretto.cost.machine import Findings, measure_machine
from stretto.runtime.launch import Place, launch
from stretto.study.job import heard
from stretto.study.worker import end_with, fail

OnStep = Callable[[int], object]  # how many steps are done


def measure_on_processes(place: Place, *, quick: bool, on_step: OnStep) -> Findings:
    """Measure this machine with processes of one thread each, started for it. Raises WorkerFailedError if one fails."""
    with tempfile.TemporaryDirectory(prefix="stretto-") as scratch:
        folder = Path(scratch)

        def tell(step: int, _: float | None) -> None:
            on_step(step)

        job = {"quick": quick, "load": os.getloadavg()[0]}
        (folder / "job").write_text(json.dumps(job), encoding="utf-8")
        with heard(folder / "progress", tell):
            launch([sys.executable, "-m", "stretto.study.machine", scratch], place)
        return Findings.of(json.loads((folder / "result").read_text(encoding="utf-8")))


def measure_here(*, quick: bool, load: float, on_step: OnStep) -> Findings | None:
    """This process's part where a launcher has started it; None but on the first one."""
    import torch

    from stretto.runtime import membership

    torch.set_num_threads(1)
    member = membership()
    assert member is not None, "whoever calls this has seen several processes"
    done = 0

    def tell() -> None:
        nonlocal done
        done += 1
        on_step(done)

    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", member.world.size))
    with member.together():
        found = measure_machine(per_node=per_node, quick=quick, load=load, tell=tell)
    return found if member.world.rank == 0 else None


def main(folder: Path) -> None:
    """Do this process's part of the job in a folder."""
    threading.Thread(target=end_with, args=(os.getppid(),), name="stretto-parent", daemon=True).start()
    job = json.loads((folder / "job").read_text(encoding="utf-8"))
    try:
        with (folder / "progress").open("w", encoding="ascii") as pipe:
            first = os.environ.get("RANK") == "0"
            found = measure_here(**job, on_step=lambda step: first and print(step, file=pipe, flush=True))
        if found is not None:
            (folder / "result").write_text(json.dumps(found.to_dict()), encoding="utf-8")
    except Exception as error:  # noqa: BLE001 - whoever started this process says it
        fail(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
