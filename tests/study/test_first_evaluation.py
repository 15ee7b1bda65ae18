"""What fails in an evaluation is told before the first run; the sample behind a train loss is spread over the data."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import stretto
from stretto import UsageError
from stretto.data.dataset import Split
from stretto.data.user_data import user_data
from stretto.study.evaluation import TRAIN_SAMPLE, train_sample

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :2] * X[:, 2:4]
FEW = {"loss": "mse_loss", "steps": 2, "batch_size": 8, "stages": 2, "quiet": True, "lr": 0.1}


def build():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def mae(output, target):
    return functional.l1_loss(output, target)


def raising(output, target):
    raise KeyError("weights")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (((X, Y), (X[:, :5], Y)), {}, "data given:data: validation: evaluate: .* x Tensor .24, 5. of torch.float32"),
        (((X, Y), (X, Y), (X, Y[:, :1].expand(-1, 3))), {}, "given:data: test: .* output .24, 2. and target .24, 3."),
        (((X, Y), (X, Y)), {"metrics": {"mae": raising}}, "validation: metric mae raised KeyError: 'weights' .*py:"),
        (((X, Y), (X, Y)), {"metrics": {"mae": lambda o, t: o - t}}, "validation: metric mae returned Tensor .24, 2."),
        (((X, Y), (X, Y)), {"measure": ("probes",)}, "measure=probes: .* given:data has float32 .6. with targets flo"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_written(data, options, message):
    with pytest.raises(UsageError, match=message):
        stretto.compare(build, data, methods=("backprop", "greedy"), seeds=1, jobs=1, out="study", **FEW, **options)
    with pytest.raises(UsageError, match=message):
        stretto.train(build, data, out="run", **FEW, **options)
    assert list(Path().iterdir()) == []


def test_a_metric_without_a_value_before_training_is_no_mistake():
    calls = []

    def undefined_at_first(output, target):
        calls.append(len(target))
        return (0.0, 0) if len(calls) == 1 else mae(output, target)

    run = stretto.train(build, ((X, Y), (X, Y)), metrics={"mae": undefined_at_first}, out="run", **FEW)
    assert run["mae"] > 0


def test_the_train_loss_is_that_of_examples_spread_over_sorted_data():
    number = 3 * TRAIN_SAMPLE + 100
    classes = torch.arange(number) * 4 // number
    data = user_data(((classes[:, None].float(), classes), (X, Y)), "sorted")
    targets = torch.cat([y for _, y in train_sample(data)])
    assert targets.bincount().tolist() == [TRAIN_SAMPLE // 4] * 4
    few = user_data((Split(classes[:9, None].float(), classes[:9]), (X, Y)), "few")
    assert [len(y) for _, y in train_sample(few)] == [9]


def test_targets_that_would_be_broadcast_are_refused():
    def narrow():
        return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))

    with pytest.raises(UsageError, match=r"output \[8, 1\] and target \[8\].*target.unsqueeze\(-1\)"):
        stretto.train(narrow, ((X, Y[:, 0]), (X, Y[:, 0])), out="run", **FEW)
    trainer = stretto.Trainer([nn.Linear(6, 1)], nn.L1Loss(), lambda p: torch.optim.SGD(p, lr=0.1), "backprop")
    with pytest.raises(UsageError, match=r"output \[24, 1\] and target \[24\]"):
        trainer.step(X, Y[:, 0])
