"""Rates recovered from times that were made of them."""

import numpy as np
import pytest

from stretto.measure.nonnegative_fit import fit, line


@pytest.mark.parametrize("truth", [(2e-5, 3e-9), (0.0, 1e-9), (5e-4, 0.0)])
def test_a_line_is_recovered(truth):
    sizes = [1 << e for e in range(6, 24, 2)]
    found = fit([(1, size) for size in sizes], [truth[0] + truth[1] * size for size in sizes])
    assert found.rates == pytest.approx(truth, rel=1e-9, abs=1e-18)
    assert found.residual < 1e-9


def test_three_rates_are_recovered_and_noise_is_in_the_residual():
    rng = np.random.default_rng(0)
    amounts = [(c, f, b) for c in (1, 4) for f in (1e4, 1e7, 1e9) for b in (1e4, 1e6, 1e8)]
    truth = np.array([3e-5, 2e-11, 1.5e-10])
    exact = np.array(amounts) @ truth
    assert fit(amounts, exact.tolist()).rates == pytest.approx(truth, rel=1e-6)
    noisy = fit(amounts, (exact * rng.normal(1, 0.05, len(exact))).tolist())
    assert noisy.rates == pytest.approx(truth, rel=0.1)
    assert 0.02 < noisy.residual < 0.08


def test_no_rate_is_negative_where_the_best_line_would_be():
    found = fit([(1, 1), (1, 2), (1, 3)], [3.0, 2.0, 1.5])
    assert found.rates[1] == 0
    assert 1.5 < found.rates[0] < 3
    assert found.residual > 0.1


def test_rates_that_nothing_tells_apart():
    assert fit([(1, 100)], [2.0]).rates == pytest.approx((0, 0.02))  # one size: all of it to the bytes
    assert fit([(1, 0, 5), (1, 0, 10)], [1.0, 1.5]).rates == pytest.approx((0.5, 0, 0.1))


def test_small_sizes_settle_the_constant_and_not_the_slope():
    """However many there are, whatever their noise."""
    small = [(1 << e, seconds) for e, seconds in zip(range(6, 16), [5e-4, 9e-4, 7e-4, 12e-4, 6e-4] * 2, strict=True)]
    large = [(1 << e, (1 << e) / 50e6) for e in (18, 20, 22, 24)]
    constant, slope = line([*small, *large]).rates
    assert slope == pytest.approx(1 / 50e6, rel=0.03)
    assert 1e-4 < constant < 9e-4
    assert fit([(1, size) for size, _ in (*small, *large)], [t for _, t in (*small, *large)]).rates[1] < 0.97 / 50e6


def test_lines():
    points = [(1 << n, 3e-5 + (1 << n) * 2e-9) for n in range(0, 27, 3)]
    assert line(points).rates == pytest.approx((3e-5, 2e-9))
    assert line([(1000, 1e-3)]).rates == pytest.approx((0, 1e-6))
    assert line([(10, 5.0), (1000, 1.0)]).rates[1] == 0  # nothing is faster for being longer
    assert line([(10, 1e-9), (1000, 1.0)]).rates[0] == 0  # no message arrives before it is sent
