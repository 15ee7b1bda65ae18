import pytest
import torch
from torch import nn

from stretto import UsageError
from stretto.optim.by_name import make_optimizer, optimizer_row
from stretto.optim.parameter_labels import labelled_by
from stretto.optimizers import OPTIMIZERS


def parameters():
    return [nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_those_of_the_table_take_all_three(name):
    made = labelled_by(make_optimizer(name, 0.1, 0.7, 0.01), [])(parameters())
    (group,) = made.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.01)
    assert (group["betas"][0] if "betas" in group else group["momentum"]) == 0.7


@pytest.mark.parametrize("name", ["RMSprop", "rmsprop", "Adagrad", "adamax", "radam", "asgd", "rprop", "adafactor"])
def test_any_other_class_of_torch(name):
    made = make_optimizer(name, 0.1, None, 0.0)(parameters())
    assert type(made).__name__.lower() == name.lower()
    assert float(made.param_groups[0]["lr"]) == 0.1
    low, middle, high = optimizer_row(name).rates
    assert low < middle < high
    assert float(make_optimizer(name, None, None, 0.0)(parameters()).param_groups[0]["lr"]) == pytest.approx(middle)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("sdg", (0.1, None, 0.0), "unknown optimizer 'sdg': did you mean 'sgd'"),
        ("LBFGS", (0.1, None, 0.0), "it evaluates the loss several times a step"),
        ("adagrad", (0.1, 0.9, 0.0), "momentum=0.9: optimizer adagrad takes no momentum"),
        ("rprop", (0.1, None, 0.1), "weight_decay=0.1: optimizer rprop takes no weight_decay"),
    ],
)
def test_what_does_not_fit(name, given, message):
    with pytest.raises(UsageError, match=message):
        make_optimizer(name, *given)
