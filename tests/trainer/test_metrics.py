"""Metrics of an evaluation, against the same over all examples at once."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import stretto
from stretto import UsageError

X = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True).clamp(-1, 1)


def trainer():
    torch.manual_seed(0)
    return stretto.Trainer(
        [nn.Linear(4, 3), nn.Linear(3, 1)], mse_loss, lambda params: torch.optim.SGD(params, lr=0.1), example=X
    )


def batches(size=4):
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, len(X), size)]


def mae(output, target):
    return (output - target).abs().mean()


def above(output, target):
    """The mean error where the target is above 0: the count differs from batch to batch."""
    chosen = target > 0
    return (output - target).abs()[chosen].sum(), chosen.sum()


class Largest:
    """As metrics of torchmetrics are: it sees every batch."""

    higher_is_better = True

    def reset(self):
        self.value = 0.0

    def update(self, output, target):
        self.value = max(self.value, float((output - target).abs().max()))

    def compute(self):
        return self.value


def test_cross_entropy_as_a_metric_is_weighed_as_the_loss_is():
    classes = torch.arange(11) % 2
    classes[:3] = -1
    loss = nn.CrossEntropyLoss(ignore_index=-1, weight=torch.tensor([1.0, 3.0]))
    trained = stretto.Trainer([nn.Linear(4, 2)], loss, lambda params: torch.optim.SGD(params, lr=0.1))
    data = [(X[i : i + 4], classes[i : i + 4]) for i in range(0, len(X), 4)]
    values = trained.evaluate(data, metrics={"entropy": loss})
    assert values["entropy"] == pytest.approx(values["loss"], rel=1e-6)
    assert values["loss"] == pytest.approx(loss(trained.model(X), classes).item(), rel=1e-6)


def test_values_are_those_over_all_examples():
    trained = trainer()
    values = trained.evaluate(batches(), metrics={"mae": mae, "above": above, "largest": Largest})
    output = trained.model(X).detach()
    total, count = above(output, Y)
    assert values["mae"] == pytest.approx(float(mae(output, Y)), rel=1e-6)
    assert values["above"] == pytest.approx(float(total / count), rel=1e-6)
    assert values["largest"] == pytest.approx(float((output - Y).abs().max()), rel=1e-6)
    assert values["loss"] == trained.evaluate(batches())["loss"]
    again = trained.evaluate(batches(3), metrics={"largest": Largest()})
    assert again["largest"] == values["largest"], "reset for each evaluation"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"mae": 3}, "metric mae is 3: give a function"),
        ({"loss": mae}, "an evaluation has a loss of its own"),
        (["mae"], "evaluate: metrics="),
        ({"mae": lambda output, target: output}, "metric mae returned Tensor"),
        ({"mae": lambda output, target: "much"}, "metric mae returned 'much'"),
        ({"mae": lambda output, target: (0.0, 0)}, "metric mae: nothing counts"),
        ({"mae": lambda output: 0.0}, "metric mae raised TypeError"),
    ],
)
def test_mistakes(metrics, message):
    with pytest.raises(UsageError, match=message):
        trainer().evaluate(batches(), metrics=metrics)
