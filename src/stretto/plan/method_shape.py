"""What lower bounds need of a method: how its step is made of turns, whatever the layers cost."""

from functools import cache
from typing import NamedTuple

from stretto.mesh import Mesh
from stretto.plan.closed_forms import adds_fill
from stretto.plan.search_space import Candidate

FORWARD = (1, 0, 0)  # factors of F, I and W, as in `Planning.gap`
ONE_PASS = (FORWARD, (0, 1, 0), (0, 0, 1))


class MethodShape(NamedTuple):
    """What bounds need of a method on so many workers, with so many micro-batches and losses.

    `receives` says whether every stage but the last receives a gradient from the stage above, `splits` whether stages
    run I and W, `exposes` whether messages add to every turn. `turns` is `turns_of`; `gap_forwards` are the forwards
    that `gaps` come to.
    """

    stages: int
    per_worker: int
    receives: bool
    splits: bool
    exposes: bool
    waits_in_chunks: bool
    adds_fill: bool
    fills_bubble: bool
    ends_after_a_forward: bool
    turns: float
    gap_forwards: int

    @classmethod
    def of(cls, c: Candidate) -> "MethodShape":
        """The shape of a candidate."""
        return shape_of(c.method, c.per_worker, c.pipeline, c.microbatches, c.losses)


@cache
def shape_of(method: str, per_worker: int, pipeline: int, microbatches: int, losses: int) -> MethodShape:
    """The shape of a method's candidates."""
    c = Candidate(pipeline, Mesh(), 1, method, microbatches, losses=losses, per_worker=per_worker)
    planning, stages = c.planning, c.stages
    return MethodShape(
        stages, planning.stages_per_worker, c.gradients.everywhere, planning.split and stages > 1,
        planning.messages == "exposed", planning.waits == "chunk", adds_fill(c), planning.fills_bubble and stages > 1,
        ends_after_a_forward(c), turns_of(c), gap_forwards(c),
    )  # fmt: skip


def filling(shape: MethodShape, whole: float, transit: float) -> float:
    """The least seconds of filling the pipeline."""
    if not shape.adds_fill:
        return 0.0
    return 2 * transit if shape.fills_bubble else whole + 2 * transit


def ends_after_a_forward(c: Candidate) -> bool:
    """Whether each stage but the first adds a forward at least to a step in which W fills the bubble."""
    return c.planning.fills_bubble and c.stages > 1 and FORWARD in c.planning.gap


def gap_forwards(c: Candidate) -> int:
    """The least forwards, summed over stages, that further workers add to a step of a V beside those in `turns_of`."""
    counted = c.planning.order != "v" or set(ONE_PASS) <= set(c.planning.gap)
    return 0 if counted or FORWARD not in c.planning.gap else c.pipeline - 1


def turns_of(c: Candidate) -> float:
    """The number of turns of the busiest stage in a step, without the fill."""
    if c.planning.order == "v":
        third = set(ONE_PASS) <= set(c.planning.gap)  # the longest of F, I and W is a third of a turn at least
        return c.microbatches * c.planning.stages_per_worker + third * (c.pipeline - 1) / 3
    if c.planning.stages_per_worker > 1:
        return c.microbatches * c.planning.stages_per_worker + c.pipeline - 1
    return c.microbatches - (adds_fill(c) and not c.planning.fills_bubble)
