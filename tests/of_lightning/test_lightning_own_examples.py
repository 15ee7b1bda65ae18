"""Lightning's own examples, as they are written: Lightning's weights, or a refusal that says what to write."""

import pytest
import torch

import stretto
from late_imports import Late

examples, lit, piped = Late("lit_examples"), Late("lit_modules"), Late("stretto.lightning")
pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch", "ignore::FutureWarning")
EQUAL = (
    "autoencoder",
    "image classifier, a metric, a scheduler",
    "backbone classifier",
    "transformer language model, a warm-up",
)
METHODS = ("1f1b(microbatches=2)", "gpipe(microbatches=3)", "backprop")


def fitted(name, strategy):
    """An example after two epochs, and its metrics."""
    module, fitting = examples.made(name), lit.trainer(strategy, max_epochs=2)
    torch.manual_seed(1)  # of shuffling
    held_out = () if name.startswith("transformer") else (examples.loader(name),)
    fitting.fit(module, examples.loader(name, shuffle=True), *held_out)
    return module, {key: float(value) for key, value in fitting.callback_metrics.items()}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[pytest.mark.slow] * (name != "autoencoder" or method != METHODS[0]))
        for name in EQUAL
        for method in METHODS
    ],
)
def test_it_comes_to_what_lightning_comes_to(name, method):
    (one, told), (two, ours) = fitted(name, "auto"), fitted(name, piped.StrettoStrategy(method, stages=2))
    assert lit.difference(one, two) < 1e-12
    assert ours == pytest.approx(told, abs=1e-12)
    before = [*examples.made(name).parameters()]
    moved = [not torch.equal(p, q) for p, q in zip(before, one.parameters(), strict=True)]
    assert all(moved)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("autoencoder, part by part", r"does not call self\(\.\.\.\).*write `output = self\(\.\.\.\)`"),
        pytest.param("LSTM with a state", r"only tensors travel between stages", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_cut_is_refused(name, said):
    options = examples.OPTIONS.get(name, {})
    with pytest.raises(stretto.UsageError, match=said):
        fitted(name, piped.StrettoStrategy("1f1b", stages=2, **options))
