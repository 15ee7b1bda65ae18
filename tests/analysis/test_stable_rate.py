"""The largest stable rate under delay, against the polynomials of laws.quadratic and a recursion written out here."""

import itertools
import math
from pathlib import Path

import pytest

import stretto
from laws.quadratic import Rule, polynomial, radius
from pairwise import slow_where

DELAYS, MOMENTA = (0, 1, 2, 3, 7, 15, 31), (0.0, 0.5, 0.9, 0.95, 0.99)
PAGE = Path(__file__).parents[2] / "docs/concepts/delay.md"


@pytest.mark.parametrize("delay", slow_where((15, 31).__contains__, DELAYS))
def test_the_largest_root_is_on_the_unit_circle(delay):
    """Feedback is linear prediction of both passes; torch's momentum adds up, so its rate is (1 - m) times ours."""
    for momentum, feedback in itertools.product(MOMENTA, (0.0, 0.5, 1.0, float(delay), 3.0 * delay + 10)):
        limit = stretto.stable_rate(delay, momentum, feedback) * (1 - momentum)
        rule = Rule(horizon=lambda m, D, c=feedback: c, form="weight")
        below, above = (radius(polynomial(rule, delay, momentum, limit * share, 1.0))[0] for share in (0.999, 1.001))
        assert below < 1 < above, (momentum, feedback)


def largest_of_the_last(rate, delay, momentum, feedback, updates=20_000):
    """|w| at most in the last tenth of so many updates of w = 1 with curvature 1."""
    weights, average, before, seen = [1.0], 0.0, 0.0, []
    for update in range(updates):
        average = momentum * average + (1 - momentum) * weights[max(0, update - delay)]
        weights.append(weights[-1] - rate * (average + feedback * (average - before)))
        before = average
        seen.append(abs(weights[-1]))
        if seen[-1] > 1e6:
            return math.inf
    return max(seen[-updates // 10 :])


@pytest.mark.parametrize(
    ("delay", "momentum", "feedback"), [(0, 0.9, 0), (1, 0.9, 0), (1, 0.9, 1), (4, 0.95, 4), (31, 0.5, 12)]
)
def test_a_weight_settles_below_it_and_not_above(delay, momentum, feedback):
    limit = stretto.stable_rate(delay, momentum, feedback)
    assert largest_of_the_last(0.98 * limit, delay, momentum, feedback) < 1e-4
    assert largest_of_the_last(1.02 * limit, delay, momentum, feedback) == math.inf


def test_known_limits():
    """2 for plain descent, 2 (1 + m) / (1 - m) with averaged gradients, 1 with one update of delay and any momentum."""
    assert stretto.stable_rate(0) == pytest.approx(2)
    assert stretto.stable_rate(0, 0.9) == pytest.approx(38)
    for momentum in MOMENTA:
        assert stretto.stable_rate(1, momentum) == pytest.approx(1)


@pytest.mark.parametrize("delay", [1, 2, 5, 20])
def test_without_momentum_it_has_a_closed_form(delay):
    """2 sin(pi / (4 D + 2)): z^(D+1) - z^D + k = 0."""
    assert stretto.stable_rate(delay) == pytest.approx(2 * math.sin(math.pi / (4 * delay + 2)))


def test_the_page_shows_what_it_returns():
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    start = next(n for n, row in enumerate(rows) if row[:2] == ["delay", "m = 0"])
    shown = list(itertools.takewhile(lambda row: len(row) == 6, rows[start + 2 :]))
    assert [int(row[0]) for row in shown] == [0, 1, 2, 4, 8, 16, 31]
    for row in shown:
        delay = int(row[0])
        given = [(0.0, 0.0), (0.9, 0.0), (0.95, 0.0), (0.9, delay), (0.95, delay)]
        assert row[1:] == [f"{stretto.stable_rate(delay, *each):.3g}" for each in given]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"delay": -1}, "stable_rate\\(delay=-1\\): a whole number of updates, 0 to 10000"),
        ({"delay": 1.5}, "stable_rate\\(delay=1.5\\): a whole number"),
        ({"delay": 1, "momentum": 1}, "stable_rate\\(momentum=1\\): a number of at least 0 and less than 1"),
        ({"delay": 1, "feedback": -0.5}, "stable_rate\\(feedback=-0.5\\): a number of 0 or more"),
    ],
)
def test_mistakes(given, message):
    with pytest.raises(stretto.UsageError, match=message):
        stretto.stable_rate(**given)
