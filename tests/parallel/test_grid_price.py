"""Prices of process grids: the published formula, summed by hand, and its closed form."""

import subprocess
import sys
from itertools import pairwise
from math import isclose, log2

import pytest

from stretto.errors import UsageError
from stretto.parallel.price import LinearLayer, ProcessGrid, best_grid, best_rows, grids, price

WIDE = LinearLayer(4096, 4096)


def by_hand(rows, columns, batch, widths):
    """Words of each sum: widths d_0, d_1, ... of the layers."""
    pairs = list(pairwise(widths))
    gathered = sum(batch / columns * (rows - 1) / rows * after for _, after in pairs)
    summed = sum(2 * batch / columns * (rows - 1) / rows * before for before, _ in pairs[1:])
    weights = sum(2 * (columns - 1) / columns * before * after / rows for before, after in pairs)
    return gathered, summed, weights


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 8), (8, 1), (2, 4), (4, 2)])
def test_the_three_sums(rows, columns):
    widths = (7, 30, 20, 5)
    layers = [LinearLayer(before, after) for before, after in pairwise(widths)]
    found = price(ProcessGrid(rows, columns), 64, layers)
    words = (found.outputs.words, found.input_gradients.words, found.weight_gradients.words)
    assert words == pytest.approx(by_hand(rows, columns, 64, widths))
    assert found.total.messages == pytest.approx(3 * log2(rows) + 2 * 2 * log2(rows) + 3 * 2 * log2(columns))
    assert found.seconds(latency=3, seconds_per_word=2) == pytest.approx(3 * found.total.messages + 2 * sum(words))


def test_the_ends_are_data_and_operator_parallelism():
    data, operator = price(ProcessGrid(8, 1), 64, [WIDE] * 2), price(ProcessGrid(1, 8), 64, [WIDE] * 2)
    assert data.weight_gradients.words == 0 == operator.outputs.words == operator.input_gradients.words
    assert operator.total.words == 2 * 2 * 7 / 8 * WIDE.size  # an all-reduce: twice what a gather sends


def inside(rows, columns, batch):
    """The layer within a network: its input needs a gradient too."""
    gathered, _, weights = by_hand(rows, columns, batch, (4096, 4096))
    return gathered + 2 * batch / columns * (rows - 1) / rows * 4096 + weights


def test_the_closed_form_is_the_least_and_the_published_example():
    best = best_rows(512, 2048, WIDE)
    assert round(best) == 26
    assert all(inside(best, 512 / best, 2048) < inside(other, 512 / other, 2048) for other in (0.9 * best, 1.1 * best))
    assert 13 < inside(1, 512, 2048) / inside(best, 512 / best, 2048) < 14
    assert 13 < inside(1, 512, 2048) / inside(32, 16, 2048) < 14


def test_the_best_grid_of_many_layers_is_beside_the_closed_form():
    assert best_grid(512, 2048, [WIDE] * 50) == ProcessGrid(32, 16)
    assert best_grid(512, 2048, [LinearLayer(64, 64, weights=9 * 64 * 64)] * 4) == ProcessGrid(
        8, 64
    )  # closed form: 9.8
    assert best_grid(8, 4, [WIDE] * 4).columns <= 4
    assert best_grid(1, 4, [WIDE]) == ProcessGrid(1, 1)
    assert best_grid(64, 1, [WIDE] * 3) == ProcessGrid(64, 1)
    tiny = [LinearLayer(8, 8)] * 3
    assert best_grid(16, 4096, tiny) == ProcessGrid(1, 16)
    assert [grid.rows for grid in grids(12)] == [1, 2, 3, 4, 6, 12]


def test_what_has_no_price():
    with pytest.raises(UsageError, match="batch of 0"):
        price(ProcessGrid(1, 1), 0, [WIDE])
    with pytest.raises(UsageError, match="at least 1"):
        best_grid(0, 1, [WIDE])
    with pytest.raises(UsageError, match="inputs, outputs"):
        best_rows(4, 1, LinearLayer(0, 3))


def test_prices_need_no_torch():
    code = "import sys, stretto.parallel.price; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert isclose(best_rows(1, 1, LinearLayer(1, 1)), (2 / 3) ** 0.5)
