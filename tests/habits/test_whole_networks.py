"""Whole networks under every method: plain PyTorch's numbers or a refusal, as the page says."""

import pytest

import stretto
from habits.page import cut_between, written
from habits.whole_networks import NAMES, Trained, case_of, methods_of, verdict

QUICK = {  # cut between blocks: a graph takes a second to record
    "images: ViT, class token, dropped paths", "images: DenseNet", "images: MobileNet, inverted residuals",
    "images: ConvNeXt, layer scale", "images: EfficientNet, stochastic depth", "images: batch norms that count",
    "transformers: GPT-2", "transformers: Llama", "transformers: GPT-NeoX", "transformers: Gemma 2",
    "transformers: Mixtral, experts", "transformers: BERT", "transformers: DeBERTa", "transformers: ViT",
}  # fmt: skip
MORE = {"transformers": 3}  # a second number of stages; 4 of the others


@pytest.mark.parametrize("name", [name for name in NAMES if name in QUICK])
def test_a_network_is_plain_pytorch_or_refused(name):
    """Under one method, another one for the next network."""
    methods = methods_of(name)
    judge(name, verdict(name, methods[NAMES.index(name) % len(methods)]))


@pytest.mark.slow
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_network_is_plain_pytorch_or_refused_under_every_method(name, more):
    trained = Trained(case_of(name), MORE.get(name.partition(":")[0], 4) if more else 2)
    for method in methods_of(name):
        judge(name, trained.verdict(method), method)


def judge(name, found, method=""):
    """What is found is what the page says."""
    assert found.kind == ("equal" if written()[name] == "plain numbers" else "refused"), f"{method}: {found.said}"


@pytest.mark.parametrize("name", ["images: MobileNet, inverted residuals", "transformers: GPT-2"])
def test_a_gradient_that_differs_is_found(name, monkeypatch):
    """The judge itself: a weight's gradient is scaled behind its back."""
    stepped = stretto.Trainer.step

    def step(trainer, x, y):
        if not trainer.entered:
            next(trainer.stages[0].parameters()).register_hook(lambda gradient: gradient * (1 + 1e-7))
        return stepped(trainer, x, y)

    monkeypatch.setattr(stretto.Trainer, "step", step)
    assert "the gradient of" in verdict(name, "backprop").said


def test_the_page_has_every_network():
    assert [name for name in written() if name in NAMES] == NAMES


@pytest.mark.docs
@pytest.mark.parametrize("name", NAMES)
def test_the_page_says_where_a_network_is_cut(name):
    assert written("cut")[name] == cut_between(name)
