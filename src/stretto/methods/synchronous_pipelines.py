"""Synchronous pipelines: a minibatch is cut into micro-batches, the weights change once it is through.

They give plain training's gradients and differ in bubble, memory and messages: GPipe (Huang et al. 2019, 1811.06965),
1F1B (PipeDream-Flush, Narayanan et al. 2021, 2006.09503; DAPPLE, Fan et al. 2021, 2007.01045), interleaved 1F1B
(Narayanan et al. 2021, 2104.04473), looped breadth-first (Lamy-Poirier 2022, 2211.05953), zero bubble (Qi et al. 2023,
2401.10241), DualPipeV (DeepSeek 2025). A BatchNorm sees one micro-batch at a time, and so does its mean loss.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from stretto.errors import UsageError
from stretto.methods.definition import Method, one_each
from stretto.methods.planning import Planning, StageAt
from stretto.options.checks import is_whole, shown
from stretto.schedule import Schedule
from stretto.schedule.library.backprop_and_local import one_sweep
from stretto.schedule.library.dualpipe_v import dualpipe_v as dualpipe_v_schedule
from stretto.schedule.library.gpipe import gpipe as gpipe_schedule
from stretto.schedule.library.interleaved import interleaved as interleaved_schedule
from stretto.schedule.library.interleaved import looped_bfs as looped_bfs_schedule
from stretto.schedule.library.one_f_one_b import one_f_one_b as one_f_one_b_schedule
from stretto.schedule.library.zero_bubble import zb_h1 as zb_h1_schedule
from stretto.schedule.library.zero_bubble import zb_h2 as zb_h2_schedule
from stretto.schedule.library.zero_bubble import zb_v as zb_v_schedule

BASELINE = "backprop"  # the name of what every other method is compared with


def backprop() -> Method:
    """One loss, whose gradient reaches every stage before the next minibatch enters."""
    return Method(
        name=BASELINE,
        summary="one loss at the top, its gradient reaches every stage",
        schedule=one_sweep,
        synchronous=True,
        planning=Planning(workers=(1, 1)),
    )


MOST = 100_000
Lay = Callable[[int, int, int], Schedule]  # (stages, workers, micro-batches)


def check_count(name: str, option: str, value: int | None, most: int | None = MOST) -> None:
    """Raise UsageError for anything but None or a whole number from 1 to `most`, the most micro-batches of a turn."""
    if value is not None and (not is_whole(value) or value < 1 or (most is not None and value > most)):
        upper = "" if most is None else f" (and at most {most:,})"
        raise UsageError(f"{name}({option}={shown(value)}): a whole number of at least 1{upper}")


def check_flag(name: str, option: str, value: object) -> None:
    """Raise UsageError for anything but True or False."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}({option}={shown(value)}): choose True or False")


def synchronous(
    name: str,
    summary: str,
    lay: Lay,
    microbatches: int | None,
    planning: Planning,
    workers: Callable[[int], int] = one_each,
    least: Callable[[int], int] = one_each,
) -> Method:
    """A pipeline that drains at the end of each minibatch, of `microbatches`.

    By default they are `least(workers)`, and at least 4.
    """
    check_count(name, "microbatches", microbatches)
    return Method(
        name=name,
        summary=summary,
        schedule=in_microbatches(lay, microbatches, least),
        synchronous=True,
        workers=workers,
        planning=replace(planning, cut="microbatches"),
    )


def in_microbatches(
    lay: Lay, count: int | None, least: Callable[[int], int] = one_each
) -> Callable[[int, int], Schedule]:
    """The schedule of `count` micro-batches, by stages and workers; if None, of `least(workers)`, and at least 4."""
    return lambda stages, workers: lay(stages, workers, count or max(4, least(workers)))


def check_even(name: str, num_stages: int) -> None:
    """Raise UsageError for an odd number of stages but 1."""
    if num_stages % 2 and num_stages > 1:
        raise UsageError(
            f"{name} wants two stages for each worker, so an even number of stages, not {num_stages}: "
            f"use {num_stages - 1} or {num_stages + 1} stages"
        )


def two_each(num_stages: int) -> int:
    """Half as many workers as stages, if that divides."""
    return num_stages // 2 if num_stages % 2 == 0 else num_stages


def gpipe(*, microbatches: int | None = None) -> Method:
    """All forwards, then all backwards."""
    planning = Planning(held=lambda at: at.microbatches, messages="streamed")
    return synchronous("gpipe", "all forwards, then all backwards", gpipe_schedule, microbatches, planning)


def one_f_one_b(*, microbatches: int | None = None, ahead: int = 0) -> Method:
    """After a warm-up one forward, one backward: GPipe's bubble with the activations of S micro-batches at most.

    `ahead` are more forwards before a worker's first backward, for each worker above it: each keeps the activations of
    one more micro-batch, and lets messages be later before a worker waits for them. ahead=1 is known as eager 1F1B.
    """
    if not is_whole(ahead) or not 0 <= ahead <= MOST:
        raise UsageError(f"1f1b(ahead={shown(ahead)}): a whole number of at least 0 (and at most {MOST:,})")
    planning = Planning(
        workers=(1, None), held=lambda at: min(at.microbatches, at.above * (1 + at.ahead) + 1), ahead="ahead"
    )
    lay = partial(one_f_one_b_schedule, ahead=ahead)
    return synchronous("1f1b", "one forward, one backward, then a flush", lay, microbatches, planning)


def interleaved(*, microbatches: int | None = None) -> Method:
    """1F1B with several stages on each worker, in turn: a smaller bubble for more messages. Two a worker by default."""
    summary = "1F1B with several stages on each worker, in turn"
    planning = Planning(
        held=interleaved_held,
        stages_per_worker=2,
        any_per_worker=True,
        order="loop",
        allows=lambda count, workers: count % max(1, count // workers) == 0,  # rounds are equally long
    )
    return synchronous("interleaved", summary, interleaved_schedule, microbatches, planning, two_each)


def interleaved_held(at: StageAt) -> float:
    """A stage's share of its worker's ((v-1) W + 2 (W-1-w) + 1) forwards before the first backward, v stages each."""
    loops, workers = at.per_worker, at.stages // at.per_worker
    return min(at.microbatches, ((loops - 1) * workers + 2 * (workers - 1 - at.stage % workers) + 1) / loops)


def looped_bfs(*, microbatches: int | None = None) -> Method:
    """GPipe with several stages on each worker: every micro-batch passes a stage before the next one starts."""
    summary = "GPipe with several stages on each worker, breadth first"
    planning = Planning(
        held=lambda at: at.microbatches,
        messages="streamed",
        stages_per_worker=2,
        any_per_worker=True,
        order="breadth first",
        allows=lambda count, workers: count >= workers,  # fewer are GPipe with more messages
    )
    return synchronous("looped-bfs", summary, looped_bfs_schedule, microbatches, planning, two_each)


def zb_h1(*, microbatches: int | None = None) -> Method:
    """1F1B whose weight gradients wait until the bubble: less of it, with the same memory."""
    planning = Planning(
        held=lambda at: min(at.microbatches, at.stages), split=True, gap=((1, 0, 0), (0, 1, 0), (1, 1, -1))
    )
    return synchronous("zb-h1", "1F1B with weight gradients in the bubble", zb_h1_schedule, microbatches, planning)


def zb_h2(*, microbatches: int | None = None) -> Method:
    """More forwards before the first backward, so that weight gradients fill the bubble: twice zb-h1's memory."""
    planning = Planning(
        held=lambda at: min(at.microbatches, 2 * at.stages - 1),
        messages="hidden",
        split=True,
        gap=((0, 0, 0), (-1, 1, 0), (1, 1, -2)),
        allows=lambda count, workers: count >= 2 * workers - 1,  # fewer leave a bubble that no closed form has
    )
    summary = "1F1B with more forwards ahead, weight gradients in the bubble"
    return synchronous("zb-h2", summary, zb_h2_schedule, microbatches, planning)


def zb_v(*, microbatches: int | None = None) -> Method:
    """Two stages on each worker, down and up again, weight gradients in the bubble: none left, with 1F1B's memory."""

    def lay(num_stages: int, num_workers: int, count: int) -> Schedule:
        if num_stages == 1:
            return zb_h1_schedule(num_stages, num_workers, count)
        check_even("zb-v", num_stages)
        return zb_v_schedule(num_stages, num_workers, count)

    planning = Planning(
        held=lambda at: min(at.microbatches, at.stages // 2),  # both stages of a worker together hold 2W forwards
        messages="hidden",
        split=True,
        stages_per_worker=2,
        order="v",
        gap=((1, 0, 0), (0, 1, 0), (0, 0, 1), (2, -1, 0), (2, 0, -2), (0, 2, -2)),
        allows=lambda count, workers: count >= 2 * workers - 1,  # fewer leave a bubble that no closed form has
    )
    summary = "two stages a worker in a V, weight gradients in the bubble"
    return synchronous("zb-v", summary, lay, microbatches, planning, two_each)


def dualpipe_v(*, microbatches: int | None = None) -> Method:
    """Two stages on each worker in a V, forwards of one beside backwards of the other: at least 2W micro-batches."""

    def lay(num_stages: int, num_workers: int, count: int) -> Schedule:
        check_even("dualpipe-v", num_stages)
        lay_out = zb_h1_schedule if num_stages == 1 else dualpipe_v_schedule
        return lay_out(num_stages, num_workers, count)

    planning = Planning(
        held=lambda at: (at.stages + 1) / 2,  # both stages of a worker together hold 2W + 1 forwards
        messages="hidden",
        stages_per_worker=2,
        order="v",
        gap=((1, 0, 0), (0, 1, 0), (0, 2, -1), (1, 1, -1), (2, 0, -2), (2, -1, -1)),
        allows=lambda count, workers: count >= 2 * workers,
    )
    summary = "two stages a worker in a V, a forward and a backward in turn"
    return synchronous("dualpipe-v", summary, lay, microbatches, planning, two_each, least=lambda workers: 2 * workers)
