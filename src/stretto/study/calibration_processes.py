"""Calibration of a machine among several processes, which are started for it."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stretto.files.temporary_folders import scratch
from stretto.runtime.launch import LaunchSettings
from stretto.study.run_processes import start

OnStep = Callable[[int], object]  # called with the number of steps done
Tell = Callable[[], object]  # called after each step
Result = dict[str, Any]


def collectives(tell: Tell, *, sizes: list[int], per_node: int | None) -> Result:
    """Measure all-reduces; a `collectives.Calibration` as its `to_dict` gives it."""
    from dataclasses import replace

    import torch.distributed as dist

    from stretto.collectives.stored_calibration import host
    from stretto.measure.all_reduce import measure
    from stretto.runtime.world import machines_of

    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup), "the caller has made sure that there are several processes"
    calibration = measure(group, sizes, per_node=per_node, tell=tell)
    return replace(calibration, machines=machines_of(range(group.size())), host=host()).to_dict()


def machine(tell: Tell, *, quick: bool, load: float) -> Result:
    """Measure this machine; its `Findings` as their `to_dict` gives them."""
    import torch.distributed as dist

    from stretto.measure.machine_calibration import measure_machine

    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return measure_machine(per_node=per_node, quick=quick, load=load, tell=tell).to_dict()


def measure_on_processes(
    what: Callable[..., Result], options: Mapping[str, Any], place: LaunchSettings, on_step: OnStep
) -> Result:
    """Measure `what` among processes of one thread each, started for it. Raises what one of them raises."""
    with scratch() as folder:

        def tell(step: int, _: float | None) -> None:
            on_step(step)

        start(work, [what, options, folder], place, folder / "progress", tell)
        result: Result = json.loads((folder / "result").read_text(encoding="utf-8"))
        return result


def measure_here(what: Callable[..., Result], options: Mapping[str, Any], on_step: OnStep) -> Result | None:
    """Do this process's part of a measurement; the result on the first process, None on the others."""
    import torch

    from stretto.runtime import membership

    torch.set_num_threads(1)
    member = membership()
    assert member is not None, "the caller has made sure that there are several processes"
    done = 0

    def tell() -> None:
        nonlocal done
        done += 1
        on_step(done)

    with member.abort_all_on_error():
        result = what(tell, **options)
    return result if member.world.rank == 0 else None


def work(what: Callable[..., Result], options: Mapping[str, Any], folder: Path) -> None:
    """Do this process's part of a measurement; the first process writes the result into a folder."""
    with (folder / "progress").open("w", encoding="ascii") as pipe:
        first = os.environ.get("RANK") == "0"
        result = measure_here(what, options, lambda step: first and print(step, file=pipe, flush=True))
    if result is not None:
        (folder / "result").write_text(json.dumps(result), encoding="utf-8")
