"""Optimizers that look at all parameters together are refused where a stage has one of its own."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import stretto
from stretto import UsageError

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


class Clipped(torch.optim.SGD):
    """Clips by the norm of all its gradients."""

    def step(self, closure=None):
        clip_grad_norm_(parameters_of(self), 0.01)
        return super().step(closure)


class Estimated(torch.optim.SGD):
    """Has one step size, which grows while all gradients together point where they did."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.sums, self.scale = {}, 1.0

    @torch.no_grad()
    def step(self, closure=None):
        with_gradients = [p for p in parameters_of(self) if p.grad is not None]
        self.scale += sum(float((self.sums.get(p, 0) * p.grad).sum()) for p in with_gradients)
        for p in with_gradients:
            self.sums[p] = self.sums.get(p, 0) + p.grad
            p -= self.scale * self.param_groups[0]["lr"] * p.grad


class Signed(torch.optim.SGD):
    """Treats each element by itself, with noise."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in parameters_of(self):
            if p.grad is not None:
                p -= 0.1 * p.grad.sign() + 0.01 * torch.randn_like(p)


def hooked(params, lr):
    optimizer = torch.optim.SGD(params, lr)
    optimizer.register_step_pre_hook(lambda given, *_: clip_grad_norm_(parameters_of(given), 0.01) and None)
    return optimizer


def build(kind, stages):
    layers = [nn.Linear(4, 4), nn.Linear(4, 3)]
    given = layers if stages == 2 else [nn.Sequential(*layers)]
    return stretto.Trainer(given, cross_entropy, lambda params: kind(params, lr=0.1))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Clipped, "Clipped lets the step"),
        (Estimated, "Estimated lets the step"),
        (hooked, "SGD has a hook before its step that takes a norm"),
    ],
)
def test_they_are_refused_on_several_stages_alone(kind, said):
    with pytest.raises(UsageError, match=rf"{said}[\s\S]*each stage has an optimizer of its own. Clip with clip="):
        build(kind, 2)
    build(kind, 1).step(X, Y)


def test_each_parameter_by_itself_may_have_any_step():
    build(Signed, 2).step(X, Y)


def test_a_hook_may_look_at_each_parameter():
    def halved(params, lr):
        optimizer = torch.optim.SGD(params, lr)
        optimizer.register_step_pre_hook(lambda given, *_: [p.grad.mul_(0.5) for p in parameters_of(given)] and None)
        return optimizer

    build(halved, 2).step(X, Y)


def test_a_look_does_not_step_an_optimizer_whose_scheduler_wraps_its_step():
    class Counting(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})
            self.scheduler, self.calls = torch.optim.lr_scheduler.LambdaLR(self, lambda _: 1.0), [0]

        def step(self, closure=None):
            self.calls[0] += 1

    trainer = build(Counting, 2)
    assert [optimizer.calls for optimizer in trainer.optimizers] == [[0], [0]]


def test_a_hook_that_draws_normal_noise_takes_no_norm():
    def noisy(params, lr):
        optimizer = torch.optim.SGD(params, lr)
        optimizer.register_step_pre_hook(
            lambda given, *_: [p.grad.add_(torch.empty_like(p).normal_()) for p in parameters_of(given)] and None
        )
        return optimizer

    build(noisy, 2).step(X, Y)
