"""The hyperbola of steps and examples: found again exactly where runs lie on it."""

import pytest

from stretto.analysis.batch_tradeoff import Tradeoff, fit

TRUE = Tradeoff(min_steps=300.0, min_examples=12_000.0)


def on_the_curve(*batches):
    return [(TRUE.steps(batch), batch * TRUE.steps(batch)) for batch in batches]


def test_runs_lie_on_the_curve():
    for steps, examples in on_the_curve(1, 7, 40, 2000):
        assert (steps / 300 - 1) * (examples / 12_000 - 1) == pytest.approx(1)
    assert TRUE.critical_batch == 40
    assert on_the_curve(40) == [(600, 24_000)]


@pytest.mark.parametrize("batches", [(8, 512), (16, 32, 64), (1, 4, 16, 64, 256, 1024)])
def test_the_curve_is_found_again(batches):
    found = fit(on_the_curve(*batches))
    assert (found.min_steps, found.min_examples) == (pytest.approx(300, rel=1e-9), pytest.approx(12_000, rel=1e-9))


def test_noisy_runs_give_nearly_the_same():
    pairs = zip(on_the_curve(4, 16, 64, 256), (1.1, 0.9, 1.1, 0.9), strict=True)
    runs = [(steps * factor, examples * factor) for (steps, examples), factor in pairs]
    assert fit(runs).critical_batch == pytest.approx(40, rel=0.5)


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [(600, 24_000)],
        [(600, 24_000), (500, 20_000)],  # one batch size
        [(1000, 8000), (1200, 19_200)],  # a larger batch takes more steps
        [(1000, 8000), (400, 6400)],  # and fewer examples
    ],
)
def test_runs_that_tell_nothing(runs):
    assert fit(runs) is None
