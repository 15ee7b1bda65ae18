"""What `stretto plan` needs of a method beside its schedule: closed forms, cheaper than laying a schedule out.

Everything else that plans need is read off the `Method`: its losses, the weights that it keeps, its optimizers. A
method that says nothing here trains, simulates and compares as any other one, and `plan` refuses it by name. Tests
compare the closed forms with the schedules that the methods lay out (tests/plan/test_planning_forms.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stretto.options.checks import of_fields
from stretto.schedule.even_split import bounds

Messages = Literal["exposed", "streamed", "hidden"]
Order = Literal["line", "loop", "breadth first", "v"]
Factors = tuple[int, int, int]  # of the seconds of F, I and W
Waits = Literal["chunk", "hop", "prediction"]


class StageAt(NamedTuple):
    """Stage `stage` of `stages`, with the number of micro-batches of a turn.

    `ahead` are forwards before the first backward beyond the method's own, for each worker above. `per_worker` is the
    number of stages of each worker, `losses` that of the chunks of stages with a loss each.
    """

    stage: int
    stages: int
    microbatches: int = 1
    ahead: int = 0
    per_worker: int = 1
    losses: int = 1

    @property
    def above_in_chunk(self) -> int:
        """How many stages of its chunk come after it; chunks are cut as torch.tensor_split cuts."""
        end = next(
            end for each in range(self.losses) if self.stage < (end := bounds(self.stages, each, self.losses)[1])
        )
        return end - 1 - self.stage

    @property
    def above(self) -> int:
        """How many stages come after it: S-1-s."""
        return self.stages - 1 - self.stage


@dataclass(frozen=True, kw_only=True)
class Planning:
    """The closed forms of a method's schedule.

    cut: the option for the number of micro-batches of a turn; None where a turn is one micro-batch. losses: the option
    for the number of chunks of stages with a loss each, if there is one. ahead: the option for more forwards before
    the first backward, if there is one; plans try it where messages are late at random.
    allows(microbatches, workers): whether the closed forms hold, and the schedule exists, for so many micro-batches.
    workers: the fewest and the most (None: any) workers of a pipeline for which the method is tried. On one stage every
    method is plain training, so only some are tried on one worker.
    variants: options under which plans try the method, "delay=1"; the first of them under its bare name.

    held(stage): the micro-batches whose activations a stage keeps. delay(stage): how many updates old its gradients
    are, mean over the micro-batches of an update.
    messages: "exposed" ones add to every turn (no more micro-batches are under way than there are stages), "streamed"
    ones only where they take longer than a forward or a backward, "hidden" ones where they take longer than both.
    split: whether all stages (the first excepted, where minibatches drain) run I and W where others run B.
    gap: the seconds that each further worker adds to a step where W fills the bubble, for equal stages: the largest of
    these sums, each given by its factors of F, I and W. Empty where nothing fills the bubble.
    stages_per_worker, order: how many stages each worker has, and in which order it takes them up: "line" is one a
    worker, "loop" interleaved 1F1B, "breadth first" looped-bfs, "v" ZB-V and DualPipeV. any_per_worker: whether there
    may be more of them; plans try as many as --stages asks for.
    waits: what a stage waits for in every turn: "chunk", the gradient of the stages above it in its chunk; "hop", that
    of the stage above it; "prediction", that of the stage above it, for the micro-batch of as many turns ago as the
    method's `prediction` has for its delay; None for none of them.
    """

    cut: str | None = None
    losses: str | None = None
    ahead: str | None = None
    allows: Callable[[int, int], bool] = lambda microbatches, workers: True
    workers: tuple[int, int | None] = (2, None)
    variants: tuple[str, ...] = ("",)
    held: Callable[[StageAt], float] = lambda at: 1
    delay: Callable[[StageAt], float] = lambda at: 0
    messages: Messages = "exposed"
    split: bool = False
    gap: tuple[Factors, ...] = ()
    stages_per_worker: int = 1
    any_per_worker: bool = False
    order: Order = "line"
    waits: Waits | None = None

    def __post_init__(self) -> None:
        of_fields("Planning: ", self)

    @property
    def fills_bubble(self) -> bool:
        """Whether W fills the bubble of a line of stages, as in ZB-H1."""
        return self.order == "line" and bool(self.gap)
