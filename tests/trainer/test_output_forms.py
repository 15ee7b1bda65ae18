"""A model's output of any form, with and without `example`: what the loss takes is nobody else's business."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from pairwise import in_turn
from stretto import UsageError

METHODS = ["backprop", "1f1b(microbatches=2)", "pb"]
FORMS = {
    "dict": lambda output: {"logits": output},
    "list": lambda output: [output, output.detach()],
    "tuple": lambda output: (output, output * 2),
    "nested": lambda output: {"all": [output, (output * 2,)]},
    "with None": lambda output: (output, None),
}
torch.manual_seed(0)
X, Y = torch.randn(4, 6, 5, dtype=torch.float64), torch.randint(3, (4, 6))


class Formed(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.linear = form, nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x):
        return FORMS[self.form](self.linear(x))


def loss(output, y):
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return cross_entropy(output, y)


def stages(form):
    torch.manual_seed(1)
    return [nn.Linear(5, 5, dtype=torch.float64), Formed(form)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def build(form, method, example):
    return stretto.Trainer(stages(form), stretto.mean(loss), sgd, method, example=example, device="cpu")


@pytest.mark.parametrize(("form", "method"), in_turn(FORMS, METHODS, rounds=3))
def test_an_example_changes_nothing(form, method):
    one, other = build(form, method, None), build(form, method, X[0])
    for x, y in zip(X, Y, strict=True):
        assert one.step(x, y) == other.step(x, y)
    assert one.flush() == other.flush()
    if method != "pb":
        plain = nn.Sequential(*stages(form))
        optimizer = sgd(plain.parameters())
        for x, y in zip(X, Y, strict=True):
            optimizer.zero_grad()
            loss(plain(x), y).backward()
            optimizer.step()
        for a, b in zip(plain.parameters(), other.model.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_between_stages_and_before_heads_they_are_refused():
    for method, order, remedy in (("backprop", -1, ": give a tensor"), ("greedy", 1, "; auxiliary heads are built")):
        with pytest.raises(UsageError, match=rf"stage \d \(Formed of Linear\) returned dict{remedy}"):
            stretto.Trainer(stages("dict")[::order], loss, sgd, method, example=X[0], device="cpu")
    trainer = stretto.Trainer(stages("dict")[::-1], loss, sgd, device="cpu")
    with pytest.raises(UsageError, match="stage 0 returned dict: a stage returns a tensor or a tuple of tensors"):
        trainer.step(X[0], Y[0])
