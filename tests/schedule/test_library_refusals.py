"""Counts that cannot be are refused where they are written, with their values and what to use instead."""

import pytest

from stretto.errors import UsageError
from stretto.schedule.library.gpipe import gpipe
from stretto.schedule.library.interleaved import interleaved, looped_bfs
from stretto.schedule.library.one_f_one_b import one_f_one_b
from stretto.schedule.library.pipedream import paci, pipedream, pipedream_2bw, pipelined_backprop
from stretto.schedule.library.zero_bubble import zb_h1, zb_v

SYNCHRONOUS = [gpipe, one_f_one_b, interleaved, looped_bfs, zb_h1, zb_v]


@pytest.mark.parametrize("family", [*SYNCHRONOUS, pipedream_2bw, paci])
@pytest.mark.parametrize("count", [0, -3, 2.5, "4"])
def test_micro_batches_are_a_whole_number(family, count):
    with pytest.raises(UsageError, match=rf"(microbatches|every)={count!r}: a whole number of at least 1"):
        family(4, 2, count)


@pytest.mark.parametrize("family", [*SYNCHRONOUS, pipedream_2bw, paci])
@pytest.mark.parametrize(("stages", "workers", "message"), [
    (0, 1, "num_stages=0: a whole number of at least 1"),
    (4, 0, "num_workers=0: a whole number of at least 1"),
    (4, -1, "num_workers=-1"),
])  # fmt: skip
def test_stages_and_workers_are_whole_numbers(family, stages, workers, message):
    with pytest.raises(UsageError, match=message):
        family(stages, workers, 8)


@pytest.mark.parametrize("family", [gpipe, one_f_one_b, interleaved, looped_bfs, zb_h1, paci])
def test_no_worker_without_a_stage(family):
    message = "num_workers=5 for num_stages=3: a worker would have no stage; use at most 3 workers, or split.* 5 stages"
    with pytest.raises(UsageError, match=message):
        family(3, 5, 8)
    for endless in (pipedream, pipelined_backprop):
        with pytest.raises(UsageError, match=message):
            endless(3, 5)


@pytest.mark.parametrize("family", [interleaved, looped_bfs])
def test_chunks_are_even(family):
    message = "num_stages=7 on num_workers=3: every worker must have as many stages; use 6 or 9 stages"
    with pytest.raises(UsageError, match=message):
        family(7, 3, 6)


@pytest.mark.parametrize(("workers", "M", "rounds", "fewer", "more"), [(3, 7, 2, 6, 8), (4, 13, 3, 12, 15),
                                                                       (2, 5, 2, 4, 6), (3, 11, 3, 9, 12)])  # fmt: skip
def test_rounds_are_equally_long(workers, M, rounds, fewer, more):
    message = rf"microbatches={M} on num_workers={workers}: {rounds} rounds .*; use {fewer} or {more} micro-batches"
    with pytest.raises(UsageError, match=message):
        interleaved(2 * workers, workers, M)
    for count in (fewer, more):
        interleaved(2 * workers, workers, count)


@pytest.mark.parametrize(("stages", "remedy"), [(4, "use 6 stages, or 2 workers$"), (7, "use 6 stages$"),
                                                (1, "use 6 stages$")])  # fmt: skip
def test_a_v_has_two_stages_a_worker(stages, remedy):
    with pytest.raises(UsageError, match=f"num_stages={stages} on num_workers=3: every worker holds two.*{remedy}"):
        zb_v(stages, 3, 6)


def test_two_versions_are_enough_for_as_many_micro_batches_as_stages():
    with pytest.raises(UsageError, match=r"microbatches=3 for num_stages=4: .*use at least 4 micro-batches, or paci"):
        pipedream_2bw(4, 4, 3)
    pipedream_2bw(4, 2, 4)
