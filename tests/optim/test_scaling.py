"""The rule of batch sizes against its printed values, and against what it is for."""

import pytest

import stretto
from stretto import UsageError


@pytest.mark.parametrize(("to", "lr", "momentum"), [(1, 6.428e-6, 0.999177), (32, 6.499e-3, 0.974004), (128, 0.1, 0.9)])
def test_values(to, lr, momentum):
    assert stretto.scale_for_batch(0.1, 0.9, 128, to=to) == (
        pytest.approx(lr, rel=1e-4),
        pytest.approx(momentum, abs=1e-6),
    )


@pytest.mark.parametrize("to", [1, 3, 8, 40])
def test_an_examples_gradient_adds_as_much_over_as_many_examples(to):
    """Of an update with mean gradient g: lr / (1 - m) g in all, spread over 1 / to examples' shares; m per example."""
    lr, momentum = stretto.scale_for_batch(0.05, 0.8, 8, to=to)
    assert lr / (1 - momentum) / to == pytest.approx(0.05 / (1 - 0.8) / 8)
    assert momentum ** (1 / to) == pytest.approx(0.8 ** (1 / 8))


def test_without_momentum_it_is_the_linear_rule():
    assert stretto.scale_for_batch(0.1, 0.0, 8, to=32) == (pytest.approx(0.4), 0.0)


@pytest.mark.parametrize(("rule", "lr"), [("linear", 0.4), ("sqrt", 0.2)])
def test_rules_that_leave_the_momentum(rule, lr):
    assert stretto.scale_for_batch(0.1, 0.9, 8, to=32, rule=rule) == (pytest.approx(lr), 0.9)
    assert stretto.scale_for_batch(lr, 0.9, 32, to=8, rule=rule) == (pytest.approx(0.1), 0.9)


def test_the_root_keeps_the_noise_of_a_step():
    """A mean gradient of B examples has variance s/B: lr^2 s/B stays."""
    steps = {to: stretto.scale_for_batch(0.1, 0.9, 8, to=to, rule="sqrt")[0] for to in (1, 8, 50)}
    assert [lr**2 / to for to, lr in steps.items()] == pytest.approx([0.1**2 / 8] * 3)


def test_an_unknown_rule():
    with pytest.raises(UsageError, match="unknown rule 'lienar': did you mean 'linear'"):
        stretto.scale_for_batch(0.1, 0.9, 8, to=32, rule="lienar")


@pytest.mark.parametrize(
    ("lr", "momentum", "size", "to", "message"),
    [
        (0.0, 0.9, 8, 1, "lr=0.0"),
        (float("inf"), 0.9, 8, 1, "lr=inf"),
        (0.1, 1.0, 8, 1, "momentum=1.0"),
        (0.1, -0.1, 8, 1, "momentum=-0.1"),
        (0.1, 0.9, 0, 1, "batch_size=0"),
        (0.1, 0.9, 8, 1.5, "to=1.5"),
        (0.1, 0.9, True, 1, "batch_size=True"),
    ],
)
def test_nonsense(lr, momentum, size, to, message):
    with pytest.raises(UsageError, match=message):
        stretto.scale_for_batch(lr, momentum, size, to=to)
