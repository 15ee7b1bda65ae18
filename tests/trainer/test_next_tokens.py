"""Next tokens: the accuracy is that of what the loss compares, and the loss is chosen where targets repeat inputs."""

import pytest
import torch
from torch import nn

import stretto
from stretto import UsageError
from stretto.data.user_data import user_data
from stretto.losses import next_token_cross_entropy, token_cross_entropy
from stretto.losses.value import suitable_loss

TOKENS = torch.arange(24).view(4, 6) % 7


class Successor(nn.Module):
    """Says of each token n that n + 1 modulo 7 follows."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * nn.functional.one_hot((x + 1) % 7, 7)


@pytest.mark.parametrize(("loss", "accuracy"), [(next_token_cross_entropy, 1.0), (token_cross_entropy, 0.0)])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_the_accuracy_is_that_of_what_the_loss_compares(loss, accuracy, precision):
    def sgd(params):
        return torch.optim.SGD(params, lr=0.1)

    trainer = stretto.Trainer([Successor()], loss, sgd, "backprop", precision=precision)
    assert trainer.evaluate([(TOKENS, TOKENS)])["accuracy"] == accuracy


def chosen(split):
    data = user_data((split, split), "own")
    return suitable_loss(*data.train.first(2), data.name, named=data.train.named)


def test_labels_that_repeat_a_single_named_input_are_next_tokens():
    assert chosen([{"input_ids": row, "labels": row} for row in TOKENS]) is next_token_cross_entropy
    masked = [{"input_ids": row, "labels": row.where(row > 2, -100)} for row in TOKENS]
    assert chosen(masked) is next_token_cross_entropy
    assert chosen([{"input_ids": row, "labels": (row + 1) % 7} for row in TOKENS]).shift is False


def test_a_pair_of_equal_tokens_says_nothing_of_the_loss():
    message = r"targets of own are a copy of its inputs, \[6\] tokens; give --loss next_token_cross_entropy if"
    with pytest.raises(UsageError, match=message):
        chosen((TOKENS, TOKENS))
