"""stretto doctor --model as a user calls it."""

import json
import sys

import pytest

from stretto.cli import main

NETS = """
import torch
from torch import nn
from neighbour import WIDTH

def plain():
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 2))

def normed():
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8))

def convolution():
    return nn.Conv2d(3, 4, 3)

def tokens():
    return nn.Sequential(nn.Embedding(9, 4), nn.LSTM(4, 4), nn.Linear(4, 4)), torch.zeros(3, 5, dtype=torch.long)

def embedding():
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), torch.zeros(3, 5, dtype=torch.long)

def breaks():
    raise KeyError("width")

def number():
    return 3

class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.first(x) if x.sum() > 0 else self.first(-x))

def deciding():
    return Deciding()
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "mine.py").write_text(NETS)
    (tmp_path / "nets" / "neighbour.py").write_text("WIDTH = 6\n")
    (tmp_path / "nets" / "exits.py").write_text("raise SystemExit(0)\n")
    for name in [name for name in sys.modules if name.startswith(("neighbour", "stretto_model_"))]:
        monkeypatch.delitem(sys.modules, name)


def doctor(capsys, *words, status=0):
    assert main(["doctor", "--model", *words]) == status
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize(("model", "modules"), [("mlp", 9), ("cnn", 13), ("transformer", 36)])
def test_built_in_networks_suit_every_method(capsys, model, modules):
    found = json.loads(doctor(capsys, model, "--json"))
    assert found["ok"] is True
    assert len(found["modules"]) == modules
    assert all(each[mechanism] for each in found["modules"] for mechanism in found["mechanisms"])


def test_options_of_a_built_in_network(capsys):
    out = doctor(capsys, "mlp", "--model-options.depth", "3", "--model-options.width", "8", "--stages", "2")
    assert "mlp in 2 stages, input [4, 1, 8, 8] float32\n\n4 modules with " in out
    assert "yes" not in out
    assert "every method's weights can be guaranteed" in out


def test_a_module_that_cannot_be_guaranteed(capsys):
    out = doctor(capsys, "nets/mine.py:normed", "--example", "4,6", status=1)
    assert "1      1       ParametrizedLinear  80          NO    NO         yes" in out
    assert "2 other modules with 72 parameters: every method can train them" in out
    assert "1 (ParametrizedLinear), live and predicted: its weight is computed in the forward" in out
    assert "mind: 2 (BatchNorm1d) normalises each micro-batch by itself" in out
    assert "stash      the backward reads the weights that its forward read: pipedream, " in out
    found = json.loads(doctor(capsys, "nets/mine.py:normed", "--example", "4,6", "--json", status=1))
    assert found["ok"] is False
    assert found["model"] == "nets/mine.py:normed"
    assert [each["module"] for each in found["objections"]] == ["1"]


def test_a_model_that_cannot_be_cut_is_told_before_a_run_says_so(capsys):
    """Every weight of its one stage can be guaranteed, but train and compare would refuse it."""
    out = doctor(capsys, "nets/mine.py:deciding", "--example", "4,6", status=1)
    assert "it cannot be cut into stages, so that no run can train it in several: Deciding.forward cannot be" in out
    found = json.loads(doctor(capsys, "nets/mine.py:deciding", "--example", "4,6", "--json", status=1))
    assert found["ok"] is False
    assert found["objections"] == []


def test_an_example_from_the_layers_or_from_the_function(capsys, monkeypatch, tmp_path):
    assert "in 3 stages, input [2, 6] float32" in doctor(capsys, "nets/mine.py:plain")
    assert "in 2 stages, input [3, 5] int64" in doctor(capsys, "nets/mine.py:embedding")
    assert "in 1 stage, input [2, 3, 8, 8] float32; --stages N examines the stages of a run" in doctor(
        capsys, "nets/mine.py:convolution", "--example", "2,3,8,8"
    )
    monkeypatch.chdir(tmp_path / "nets")
    assert "in 3 stages" in doctor(capsys, "mine:plain")
    del sys.modules["mine"]


MISTAKES = {
    "mpl": "unknown model 'mpl': did you mean 'mlp'? Choose from alexnet, cifar-resnet, cnn, ",
    "mlp --data pydoc": "model 'mlp' is for classification",
    "mlp --model-options.widht 3": "did you mean 'width'",
    "mlp --stages 99": "Ask for at most",
    ":plain": "write package.module:function or path/to/file.py:function",
    "nets/none.py:plain": "there is no file nets/none.py",
    "nowhere.at.all:plain": "cannot import nowhere.at.all: ModuleNotFoundError",
    "nets/exits.py:plain": "cannot import nets/exits.py: SystemExit",
    "nets/mine.py:plan": "nets/mine.py has no 'plan': did you mean 'plain'?",
    "nets/mine.py:breaks": "nets/mine.py:breaks raised KeyError: 'width'",
    "nets/mine.py:number": "nets/mine.py:number returned 3: return an nn.Module, a list of layers, or (module,",
    "nets/mine.py:convolution": "give --data, of which the first examples are taken, or the shape of an input batch",
    "nets/mine.py:plain --example 4,7": "stage 0 (Linear) cannot take what the example gives, [4, 7] float32",
    "nets/mine.py:plain --example 0,6": "example=0,6: every size is at least 1",
    "nets/mine.py:plain --example 4,x": "'x' is no whole number",
    "nets/mine.py:plain --path blocks": "path='blocks' says where the model can be cut: say in how many stages",
    "nets/mine.py:plain --data digits": "stage 0 (Linear) cannot take what the example gives, [4, 1, 8, 8] float32",
    "nets/mine.py:tokens": "stage 1",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_one_clear_message(capsys, words):
    assert main(["doctor", "--model", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert MISTAKES[words] in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", ["--example 4,6", "--stages 2", "--path blocks", "--data digits"])
def test_what_is_about_a_model_wants_one(capsys, words):
    assert main(["doctor", *words.split()]) == 2
    assert "is about a model: give --model, too" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["encoder-decoder", "unet"])
def test_a_network_whose_blocks_pass_on_several_tensors(capsys, model):
    options = ["--model-options.depth", "1", "--model-options.width", "8"]
    assert main(["doctor", "--model", model, *options]) == 0
    assert "every method's weights can be guaranteed" in capsys.readouterr().out
