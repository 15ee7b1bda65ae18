"""Calibration of a machine among several processes, which are started for it."""

import json
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

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
    result: Result = {}

    def hear(told: int | str) -> None:
        if isinstance(told, int):
            on_step(told)
        else:
            result.update(json.loads(told))

    start(work, [what, options], place, hear)
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


def work(what: Callable[..., Result], options: Mapping[str, Any], pipe: Connection) -> None:
    """Do this process's part of a measurement; the first process sends the steps done, and the result as JSON."""
    result = measure_here(what, options, pipe.send if os.environ.get("RANK") == "0" else lambda _: None)
    if result is not None:
        pipe.send(json.dumps(result))
