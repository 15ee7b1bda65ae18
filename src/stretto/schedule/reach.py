"""Where heads stand and how far down each gradient travels: what tells backprop and the local methods apart."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from stretto.errors import ScheduleError
from stretto.options.checks import is_whole, shown


@dataclass(frozen=True)
class Reach:
    """`hops[s]` is None where stage s has no head, else how many stages below s its head's gradient reaches.

    ::

        backprop, 4 stages     (None, None, None, 3)     one head, its gradient reaches every stage
        greedy                 (0, 0, 0, 0)              every head trains its own stage
        overlapping            (None, 1, 1, 1)           every head trains its own stage and the one below
        chunked, 2 chunks      (None, 1, None, 1)        every head trains its own chunk

    (Laskin, Metz et al. 2020, figure 2.) A gradient that ends at stage e carries the label e, its *stop*: gradients of
    several heads with the same stop travel as one tensor, with different stops they cannot.

    Behind a `predicted` stage a module predicts the gradient of the stage's output (synthetic gradients, Jaderberg et
    al. 2017). Such a stage trains on the prediction; the gradient from above ends there, and the module learns from it.
    The prediction reaches all stages down to the next predicted one, and no head's gradient passes a predicted stage:

        predicted {0, 1, 2}    (None, None, None, 0)     every stage below the last has a prediction of its own

    With `labelled` the modules also read the target.
    """

    hops: tuple[int | None, ...]
    predicted: frozenset[int] = frozenset()
    labelled: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.hops, tuple) or not all(hop is None or is_whole(hop) for hop in self.hops):
            raise ScheduleError(f"reach {shown(self.hops)}: give None or a whole number for each stage, (None, 1)")
        if not self.hops or self.hops[-1] is None:
            raise ScheduleError(f"reach {self.hops}: the last stage must have a head, it is the model's output")
        self._check_predicted()
        stops = [len(self.hops)] * len(self.hops)
        for stage, stop in self._checked_stops():
            stops[stage] = stop
        lowest = [*accumulate(reversed(stops), min)][::-1]  # stop of the heads of a stage and those above it
        for stage, stop in enumerate(lowest):
            if stop > stage:
                raise ScheduleError(f"reach {self.hops}: no head's gradient reaches stage {stage}, it would not train")

    def _check_predicted(self) -> None:
        wrong = [stage for stage in self.predicted if not is_whole(stage) or not 0 <= stage < len(self.hops) - 1]
        if wrong or not isinstance(self.predicted, frozenset):
            raise ScheduleError(
                f"reach: predicted={shown(self.predicted)}: give a frozenset of stages from 0 to {len(self.hops) - 2}; "
                "the last stage has the loss itself"
            )

    def _checked_stops(self) -> Iterator[tuple[int, int]]:
        for stage, hops in enumerate(self.hops):
            if hops is not None and not 0 <= hops <= stage:
                raise ScheduleError(
                    f"reach {self.hops}: the head of stage {stage} reaches {hops} stages down; "
                    f"between 0 and {stage} exist"
                )
        predicted = -1  # the last one so far
        for stage, stop in self._stops():
            predicted = stage if stage in self.predicted else predicted
            if self.hops[stage] is not None and stop <= predicted:
                raise ScheduleError(
                    f"reach {self.hops}: the gradient of the head of stage {stage} would pass stage {predicted}, "
                    "behind which a gradient is predicted: let it end above"
                )
            yield stage, stop

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.hops)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """The stages that have a head, the last one (the model's own output) included."""
        return tuple(stage for stage, hops in enumerate(self.hops) if hops is not None)

    @cached_property
    def reading(self) -> tuple[int, ...]:
        """The stages that read the target, for their head's loss or for their prediction."""
        return tuple(sorted({*self.heads, *(self.predicted if self.labelled else ())}))

    def _stops(self) -> Iterator[tuple[int, int]]:
        # The stages at which gradients begin, of heads or predicted, each with its stop.
        above = 0  # the last predicted stage
        for stage, hops in enumerate(self.hops):
            if stage in self.predicted:
                yield stage, above
                above = stage + 1
            if hops is not None:
                yield stage, stage - hops

    def stop(self, stage: int) -> int | None:
        """The lowest stage that the head of `stage` trains; None without a head."""
        hops = self.hops[stage]
        return None if hops is None else stage - hops

    @cached_property
    def _losses(self) -> tuple[tuple[int, ...], ...]:
        heads: list[list[int]] = [[] for _ in self.hops]
        for head, stop in self._stops():
            for stage in range(stop, head + 1):
                heads[stage].append(head)
        return tuple(map(tuple, heads))

    def losses(self, stage: int) -> tuple[int, ...]:
        """The stages whose heads, or predictions, train `stage`."""
        return self._losses[stage]

    def trains_all_of(self, owner: int, user: int) -> bool:
        """Whether all losses that train `user` train `owner`, too: then its gradients may go there."""
        return set(self.losses(user)) <= set(self.losses(owner))

    @cached_property
    def _carried(self) -> tuple[tuple[int, ...], ...]:
        stops: list[set[int]] = [set() for _ in self.hops]
        for head, stop in self._stops():
            lowest = stop if stop - 1 in self.predicted else stop + 1  # a predicted stage below learns from it
            for stage in range(lowest, head + 1):
                stops[stage].add(stop)
        return tuple(tuple(sorted(carried)) for carried in stops)

    def carried(self, stage: int) -> tuple[int, ...]:
        """The stops of the gradients that `stage` sends to the stage below it, ascending; one tensor each."""
        return self._carried[stage]

    def arriving(self, stage: int) -> tuple[int, ...]:
        """The stops of the gradients that `stage` receives from the stage above it."""
        return self.carried(stage + 1) if stage + 1 < self.num_stages else ()

    def passing(self, stage: int) -> tuple[int, ...]:
        """The stops of those arriving gradients that go on to the stage below."""
        return tuple(stop for stop in self.arriving(stage) if stop < stage)

    @cached_property
    def _begun(self) -> dict[int, list[int]]:
        begun: dict[int, list[int]] = {}
        for root, stop in self._stops():
            begun.setdefault(root, []).append(stop)
        return begun

    def one_sweep(self, stage: int) -> bool:
        """Whether one backward sweep gives both the weight gradient and all gradients for the stage below.

        True when no gradient goes down, or when all gradients that train this stage go down as one. Overlapping's
        stages send less than they use: their backward needs two sweeps, I and W.
        """
        carried = self.carried(stage)
        present = {*self._begun.get(stage, ())}
        if stage not in self.predicted:
            present |= set(self.arriving(stage))
        return not carried or (len(carried) == 1 and present == set(carried))
