"""Parts of lower bounds, beside every choice."""

import random
from itertools import product
from math import inf

import numpy as np
import pytest

from stretto.methods import StageAt
from stretto.plan.bound import least_of_fullest
from stretto.plan.counted_layers import least_by_count
from stretto.plan.planned_methods import catalogue, planned


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_way_to_share_out_layers_has_a_worker_with_less(workers):
    dice = random.Random(workers)
    for _ in range(8):
        seconds = [dice.randint(0, 9) for _ in range(5)]
        shares = product(range(workers), repeat=len(seconds))
        loads = ([sum(x for x, own in zip(seconds, share, strict=True) if own == w) for w in range(workers)]
                 for share in shares)  # fmt: skip
        assert least_of_fullest(np.array(seconds, dtype=float), workers) <= min(map(max, loads))


def test_one_equal_layer_more_than_even_shares_is_a_layer_more_for_one_worker():
    assert least_of_fullest(np.array([0.0, *[2.0] * 7]), 3) == 6.0


@pytest.mark.parametrize("layers", [1, 2, 3, 7])
def test_the_least_of_inner_stages_by_their_number_of_layers(layers):
    table = np.random.default_rng(layers).uniform(size=(layers + 1, layers + 1))
    for most in range(layers + 2):
        inner = [[table[i, i + n] for i in range(1, layers - n)] for n in range(1, most + 1)]
        assert least_by_count(table, most, False, False).tolist() == [inf, *(min(x, default=inf) for x in inner)]


@pytest.mark.parametrize("method", catalogue())
def test_no_stage_keeps_fewer_micro_batches_than_the_first_and_the_last(method):
    """Which decides whether activations fit at all (`MemoryBounds.fitting`)."""
    planning = planned(method).planning
    for workers, microbatches, ahead in product((2, 3, 4, 8), (1, 2, 5, 8, 16), (0, 1)):
        stages = workers * planning.stages_per_worker
        if planning.cut is not None and not planning.allows(microbatches, workers):
            continue
        held = [
            planning.held(StageAt(s, stages, microbatches, ahead, planning.stages_per_worker)) for s in range(stages)
        ]
        assert min(held) == min(held[0], held[-1]) >= 1
