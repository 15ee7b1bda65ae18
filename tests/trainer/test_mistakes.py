"""Ordinary mistakes of a script, which methods find in different places: each is a UsageError with a remedy."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import stretto
from pairwise import in_turn
from stretto.errors import UsageError

METHODS = ["backprop", "1f1b(microbatches=2)", "pb", "greedy"]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def stages():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.Linear(5, 5), nn.Linear(5, 4)]


X, Y = torch.randn(8, 6), torch.arange(8) % 4
LOSSES = {
    "one value an example": (
        lambda output, y: cross_entropy(output, y, reduction="none"),
        r"the loss returned a tensor \[\d\]: return a tensor with one number.*reduction='mean'",
    ),
    "torch's own without reduction": (nn.CrossEntropyLoss(reduction="none"), r"a tensor \[\d\].*reduction='mean'"),
    "a float": (
        lambda output, y: cross_entropy(output, y).item(),
        r"the loss returned \d\.\d+: .* return the tensor itself, without \.item\(\)",
    ),
    "an array": (lambda output, y: cross_entropy(output, y).detach().numpy(), r"returned array.*without \.item\(\)"),
    "nothing": (lambda output, y: None, r"the loss returned None: .*Does the function end with return\?"),
    "detached": (
        lambda output, y: cross_entropy(output, y).detach(),
        r"stage \d: the loss returned Tensor \[\] of torch.float32 without a gradient.*without detach",
    ),
    "a number of hits": (
        lambda output, y: (output.argmax(1) == y).sum(),
        r"stage \d: the loss returned Tensor \[\] of torch.int64 without a gradient|iinfo",
    ),
    "a detached sum and a count": (
        lambda output, y: (cross_entropy(output, y, reduction="sum").detach(), len(y)),
        "without a gradient",
    ),
    "one argument": (lambda output: output.sum(), "takes 1 positional argument but 2 were given"),
}
BATCHES = {
    "too wide": (
        torch.randn(8, 7),
        Y,
        r"stage 0 \(Sequential of Linear, ReLU\) cannot take what it is given, \[\d, 7\]",
    ),
    "of another dtype": (X.double(), Y, r"stage 0 .* cannot take .* float64.*same dtype"),
    "an image": (torch.randn(8, 1, 2, 3), Y, r"stage 0 .* cannot take what it is given, \[\d, 1, 2, 3\]"),
    "two inputs": ((X, X), Y, "takes 2 positional arguments but 3 were given"),
    "a target less": (X, Y[:7], r"x has 8 examples and y has 7 \(\[7\]\)"),
    "twice the targets": (X, torch.cat([Y, Y]), r"8.*\b16\b"),
    "a column of targets": (X, Y[:, None], r"with the target Tensor \[\d, 1\] of torch.int64"),
    "tokens": (
        X[:, None].expand(-1, 3, -1),
        Y[:, None].expand(-1, 3),
        r"For tokens, output \[N, T, V\] .* take stretto.losses.token_cross_entropy",
    ),
    "targets of no class": (X, Y + 4, "Target . is out of bounds"),
    "targets that are numbers": (X, Y.float(), "with the target Tensor .* of torch.float32"),
    "no targets": (X, None, r"y is None .*: give step\(x, y\) both|has a loss that fails .*, with the target None"),
    "no inputs": (None, Y, "x is None"),
}


def step_and_flush(trainer, x, y):
    trainer.step(x, y)
    trainer.flush()


@pytest.mark.parametrize(("what", "method"), in_turn(LOSSES, METHODS, rounds=4, slow=2))
def test_losses(what, method):
    loss, message = LOSSES[what]
    with pytest.raises(UsageError, match=message):
        step_and_flush(stretto.Trainer(stages(), loss, sgd, method, device="cpu"), X, Y)


class Named(nn.Linear):
    def forward(self, x):
        return {"scores": super().forward(x)}


def test_a_loss_without_a_gradient_is_found_behind_a_dict():
    last = [*stages()[:2], Named(5, 4)]
    loss = lambda output, y: cross_entropy(output["scores"].detach(), y)  # noqa: E731
    with pytest.raises(UsageError, match=LOSSES["detached"][1]):
        step_and_flush(stretto.Trainer(last, loss, sgd, "backprop", device="cpu"), X, Y)


WHEN = {f"{method}{', later' * later}": (method, later) for later in (False, True) for method in METHODS}


@pytest.mark.parametrize(("what", "when"), in_turn(BATCHES, list(WHEN), rounds=8, slow=5))
def test_batches(what, when):
    method, later = WHEN[when]
    x, y, message = BATCHES[what]
    trainer = stretto.Trainer(stages(), cross_entropy, sgd, method, device="cpu")
    for _ in range(7 if later else 0):
        trainer.step(X, Y)
    with pytest.raises(UsageError, match=message):
        step_and_flush(trainer, x, y)


class SAM(torch.optim.SGD):
    """As the usual implementation: `step` asserts that it has a closure, which it calls twice."""

    def first_step(self):
        pass

    def second_step(self):
        super().step()

    def step(self, closure=None):
        assert closure is not None


class WithClosure(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


class LookSAM(torch.optim.SGD):
    """One whose passes have other names."""


MODEL = nn.Sequential(*stages())
OPTIMIZERS = {
    "none": (lambda params: None, "optimizer returned None.* Does the function end with return.* optimizer=lambda"),
    "a list": (lambda params: [sgd(params)], r"optimizer returned \[SGD .*A stage has one.* optimizer=lambda"),
    "a class": (lambda params: torch.optim.SGD, "optimizer returned <class 'torch.optim.sgd.SGD'>, not a"),
    "an optimizer": (sgd(MODEL.parameters()), "optimizer is a SGD: each stage has its own.*optimizer=lambda"),
    "without an argument": (lambda: sgd(MODEL.parameters()), "takes 0 positional arguments but 1 was given"),
    "SAM": (lambda params: SAM(params, lr=0.1), "^SAM evaluates the loss several times a step; a pipeline cannot"),
    "with a closure": (lambda params: WithClosure(params, lr=0.1), "^WithClosure evaluates the loss several times"),
    "of SAM's kin": (lambda params: LookSAM(params, lr=0.1), "^LookSAM evaluates the loss several times"),
    "LBFGS": (lambda params: torch.optim.LBFGS(params), "^LBFGS evaluates the loss several times"),
    "of the whole model": (
        lambda params: sgd(MODEL.parameters()),
        r"the optimizer of stage 0 also steps a parameter \[5, 5\] of stage 1: .* not of model.parameters\(\)",
    ),
}


@pytest.mark.parametrize(("what", "method"), in_turn(OPTIMIZERS, METHODS, rounds=4, slow=3))
def test_optimizers(what, method):
    optimizer, message = OPTIMIZERS[what]
    with pytest.raises(UsageError, match=message):
        stretto.Trainer(list(MODEL), cross_entropy, optimizer, method, device="cpu")


def test_an_optimizer_may_leave_parameters_out_and_bring_its_own():
    temperature = nn.Parameter(torch.ones(()))
    trainer = stretto.Trainer(
        stages(),
        lambda output, y: cross_entropy(output * temperature, y),
        lambda params: sgd([*params[:1], temperature]),
        device="cpu",
    )
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.step(X, Y)
    moved = [not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True)]
    assert moved == [True, False] * 3


def test_nothing_to_train_is_no_mistake_of_the_loss():
    """Frozen stages below a trained one, and a model that is only evaluated."""
    for frozen in (2, 3):
        made = stages()
        for stage in made[:frozen]:
            stage.requires_grad_(False)
        trainer = stretto.Trainer(made, mse_loss, sgd, device="cpu")
        assert trainer.step(X, torch.randn(8, 4)) > 0


def test_an_id_outside_an_embedding():
    ids = torch.arange(8)
    stages = [nn.Embedding(7, 4), nn.Linear(4, 4)]
    message = r"stage 0 \(Embedding\) cannot take .*index out of range in self.*A value may lie outside an embedding's"
    with pytest.raises(UsageError, match=rf"{message} range, 0 to num_embeddings - 1$"):
        stretto.Trainer(stages, cross_entropy, sgd, "greedy", example=ids, device="cpu")
    with pytest.raises(UsageError, match=rf"{message} range, 0 to num_embeddings - 1\. Give batches"):
        stretto.Trainer(stages, cross_entropy, sgd, device="cpu").step(ids, Y)
