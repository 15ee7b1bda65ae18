"""The best cut where workers have several stages each, by dynamic programming over the workers.

A state is where each stage of the workers so far ends: in a V the layers between two ends are left; in loops each loop
is left from one place up to where the next one starts, and each choice of starts is a search of its own. Of equal
states the one of the least value is kept. A state is dropped if the workers to come could not take what is left within
the limit of a worker's load, by numbers of layers.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement
from math import comb, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.cost.layer_sums import Numbers
from stretto.plan.counted_layers import CountedLayers
from stretto.plan.partition import SAME, Partition
from stretto.plan.worker_stages import WorkerStages

Ends = NDArray[np.intp]  # of each stage of a worker, by states
Starts = tuple[int, ...]  # where loops start, and behind the last one
MOST_WAYS = 3_000_000  # choices of a stage's end that are looked at before a search is given up
MOST_STARTS = 1_000
MOST_LIMITS = 50  # of a worker's load, where other costs than the largest load count, too


class TooManyWaysError(Exception):
    """There are more ways to divide the layers than may be looked through."""


class States(NamedTuple):
    """The ends of the stages of all workers up to one, the values of these cuts, and the states that they came from."""

    ends: Ends
    value: Numbers
    before: NDArray[np.intp]

    def at(self, indices: NDArray[np.intp]) -> "States":
        """Some of the states."""
        return States(self.ends[indices], self.value[indices], self.before[indices])


class Grown(NamedTuple):
    """States with some stages of the next worker added, and what these come to."""

    before: NDArray[np.intp]
    ends: tuple[NDArray[np.intp], ...]
    load: Numbers
    top: Numbers
    used: Numbers
    kept: Numbers
    passing: Numbers


class WorkerSearch:
    """A search for better cuts than one that is known."""

    def __init__(self, stages: WorkerStages, counted: CountedLayers) -> None:
        self.stages = stages
        self.counted = counted
        self.ways = 0
        self.lightest: Partition | None = None  # of those with no other costs than the largest load

    def improved(self, best: Partition | None, least_used: float) -> tuple[Partition | None, bool]:
        """The best cut, and whether that is proven; `best` where nothing better was found, None for nothing that fits.

        `least_used` is the least that stages cost beside their worker's load.
        """
        if self.stages.used is not None:
            return self.least_of_both(best, least_used)
        try:
            return self.least_under(inf if best is None else best.value) or best, True
        except TooManyWaysError:
            return self.lightest or best, False

    def least_of_both(self, best: Partition | None, least_used: float) -> tuple[Partition | None, bool]:
        """The cut of the least largest load plus other costs: of the least other costs, under falling limits."""
        limit = inf if best is None else best.value - least_used
        try:
            for _ in range(MOST_LIMITS):
                found = self.least_under(limit)
                if found is None:
                    return best, True
                cut = self.stages.cut(found.bounds)
                if best is not None and found.value + self.counted.least_load >= best.value * (1 - SAME):
                    return best, True
                if best is None or cut.value < best.value:
                    best = cut
                limit = min(cut.value - found.value, best.value - least_used) * (1 - SAME)
        except TooManyWaysError:
            pass  # the best so far is not proven
        return best, False

    def least_under(self, limit: float) -> Partition | None:
        """The cut of the least value of all whose workers have less load than a limit; None if there is none.

        That is the largest load of a worker, or what stages cost beside it, where they cost anything.
        """
        best = None
        for starts in self.starts():
            found = self.least_from(starts, limit, inf if best is None else best.value)
            if found is not None and self.stages.used is None:
                self.lightest, limit = found, found.value
            best = found or best
        return best

    def starts(self) -> Iterator[Starts]:
        """Where the loops may start; nothing to choose in a V."""
        layers, workers = self.stages.layers, self.stages.workers
        if self.stages.in_v:
            yield (0, layers)
            return
        loops = self.stages.stages // workers
        spare = layers - self.stages.stages
        if comb(spare + loops - 1, loops - 1) > MOST_STARTS:
            raise TooManyWaysError
        for more in combinations_with_replacement(range(spare + 1), loops - 1):
            yield (0, *(workers * (loop + 1) + extra for loop, extra in enumerate(more)), layers)

    def least_from(self, starts: Starts, limit: float, most: float) -> Partition | None:
        """The cut of a value below `most` and with loads below a limit, if loops start there."""
        capacities = self.counted.capacities(limit, strictly=True)
        first = (0, self.stages.layers) if self.stages.in_v else starts[:-1]
        levels = [States(np.array([first]), np.zeros(1), np.zeros(1, dtype=np.intp))]
        for worker in range(self.stages.workers):
            left = sum(capacities[worker + 1 :])
            states = self.after(levels[-1], worker, starts, limit, left)
            states = least_of_each(states.at(np.flatnonzero(states.value < most)))
            if not len(states.value):
                return None
            levels.append(states)
        best = int(levels[-1].value.argmin())  # the two arms of a V may meet anywhere
        return Partition(self.bounds(levels, best), float(levels[-1].value[best]))

    def after(self, states: States, worker: int, starts: Starts, limit: float, left: int) -> States:
        """The states with a worker's stages added, if those above it take `left` layers at most."""
        nothing = np.zeros(len(states.value))
        grown = Grown(np.arange(len(nothing)), (), nothing, nothing, nothing, nothing, nothing)
        for loop in range(len(self.stages.stages_of[worker])):
            grown = self.with_stage(grown, states.ends, worker, loop, starts, limit)
        load, ends = grown.load + grown.top, np.stack(grown.ends, axis=1)
        fits = (grown.kept + grown.passing <= self.stages.memory[worker]) & (load < limit)
        fits &= self.layers_left(ends, starts) <= left
        before = grown.before[fits]
        earlier = states.value[before]
        value = np.maximum(earlier, load[fits]) if self.stages.used is None else earlier + grown.used[fits]
        return States(ends[fits], value, before)

    def layers_left(self, ends: Ends, starts: Starts) -> NDArray[np.intp]:
        """The layers that no stage has yet."""
        left: NDArray[np.intp] = (
            ends[:, 1] - ends[:, 0] if self.stages.in_v else np.sum(np.array(starts[1:]) - ends, axis=1)
        )
        return left

    def with_stage(self, grown: Grown, ends: Ends, worker: int, loop: int, starts: Starts, limit: float) -> Grown:
        """The states with every end of one more stage of a worker that the limit of its load allows."""
        tables, own = self.stages, self.stages.stages_of[worker]
        stage, further = own[loop], tables.workers - worker - 1  # workers to come
        position = ends[grown.before, loop]
        room = self.room(grown, ends, loop, starts, further)
        back = tables.in_v and loop == 1
        closes = not further and (back or not tables.in_v)  # takes all layers that are left for it
        lengths = np.arange(1, int(room.max(initial=0)) + 1)
        self.ways += len(position) * len(lengths)
        if self.ways > MOST_WAYS:
            raise TooManyWaysError
        at, which = np.nonzero(lengths == room[:, None] if closes else lengths <= room[:, None])
        begin = position[at] - lengths[which] if back else position[at]
        end = position[at] if back else position[at] + lengths[which]
        load = grown.load[at] + tables.load[stage][begin, end]
        others = sum(float(self.counted.by_count(other, tables.load[other]).min()) for other in own[loop + 1 :])
        light = load + others < limit
        at, begin, end, load = at[light], begin[light], end[light], load[light]
        return Grown(
            grown.before[at],
            (*(each[at] for each in grown.ends), begin if back else end),
            load,
            np.maximum(grown.top[at], tables.top[stage][begin, end]) if tables.top else grown.top[at],
            grown.used[at] + tables.used[stage][begin, end] if tables.used else grown.used[at],
            grown.kept[at] + tables.kept[stage][begin, end],
            np.maximum(grown.passing[at], tables.passing[stage][begin, end]),
        )

    def room(self, grown: Grown, ends: Ends, loop: int, starts: Starts, further: int) -> NDArray[np.intp]:
        """The most layers of a stage, so that each stage to come has one at least."""
        position = ends[grown.before, loop]
        if not self.stages.in_v:
            room: NDArray[np.intp] = starts[loop + 1] - position - further
        elif loop == 0:
            room = ends[grown.before, 1] - position - 2 * further - 1
        else:
            room = position - grown.ends[0] - 2 * further
        return room

    def bounds(self, levels: Sequence[States], at: int) -> tuple[int, ...]:
        """The bounds of the cut that a state of the last level is."""
        found = {0, self.stages.layers}
        for states in reversed(levels[1:]):
            found.update(int(end) for end in states.ends[at])
            at = int(states.before[at])
        return tuple(sorted(found))


def least_of_each(states: States) -> States:
    """Of states with the same ends, the one of the least value."""
    order = np.lexsort((states.value, *states.ends.T))
    ends = states.ends[order]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (ends[1:] != ends[:-1]).any(axis=1)
    return states.at(order[is_first])
