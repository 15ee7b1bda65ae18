"""Calibration on several processes: `python -m stretto.study.calibration FILE` is one of those that are started."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from stretto.collectives.calibration import Calibration
from stretto.runtime.launch import Place
from stretto.study.job import start
from stretto.study.worker import fail, follow

OnStep = Callable[[int], object]  # how many steps are done


def calibrate_on_processes(place: Place, sizes: Sequence[int], per_node: int | None, on_step: OnStep) -> Calibration:
    """Measure all-reduces among processes of one thread each, started for it. Raises WorkerFailedError if one fails."""
    with tempfile.TemporaryDirectory(prefix="stretto-") as scratch:
        folder = Path(scratch)

        def tell(step: int, _: float | None) -> None:
            on_step(step)

        job = {"sizes": list(sizes), "per_node": per_node}
        (folder / "job").write_text(json.dumps(job), encoding="utf-8")
        start("stretto.study.calibration", folder, place, folder / "progress", tell)
        return Calibration.of(json.loads((folder / "result").read_text(encoding="utf-8")))


def measure_here(sizes: Sequence[int], per_node: int | None, on_step: OnStep) -> Calibration | None:
    """This process's part where a launcher has started it; None but on the first one."""
    import torch
    import torch.distributed as dist

    from stretto.collectives.measure import measure
    from stretto.runtime import membership

    torch.set_num_threads(1)
    member = membership()
    assert member is not None, "whoever calls this has seen several processes"
    done = 0

    def tell() -> None:
        nonlocal done
        done += 1
        on_step(done)

    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    with member.together():
        result = measure(group, sizes, per_node=per_node, tell=tell)
    return result if member.world.rank == 0 else None


def main(folder: Path) -> None:
    """Do this process's part of the job in a folder."""
    follow()
    job = json.loads((folder / "job").read_text(encoding="utf-8"))
    try:
        with (folder / "progress").open("w", encoding="ascii") as pipe:
            first = os.environ.get("RANK") == "0"
            result = measure_here(
                job["sizes"], job["per_node"], lambda step: first and print(step, file=pipe, flush=True)
            )
        if result is not None:
            (folder / "result").write_text(json.dumps(result.to_dict()), encoding="utf-8")
    except Exception as error:  # noqa: BLE001 - whoever started this process says it
        fail(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
