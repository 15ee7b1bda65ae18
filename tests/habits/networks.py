"""Networks, losses and batches as people write them: each habit is one thing that a forward, a hook or a loss does.

A network may have any habits at once. All is in float64, so that equal means equal to rounding.
"""

import random
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, ROWS, BLOCKS = 8, 5, 12, 4

FORWARD = (
    "no_grad on the first blocks", "set_grad_enabled", "detach between blocks", "a gradient reversed between blocks",
    "a gradient reversed in a block", "a gradient scaled by a hook on an activation", "random in the root",
    "numpy in the root", "torch.rand in the root", "random in a block", "another branch in training",
    "another branch in training in a block", "auxiliary outputs in training", "a temperature", "a counter in the root",
    "a counter in a block", "gates by values", "checkpointed", "checkpointed as before 2.0", "a force by autograd.grad",
    "a block called twice", "blocks in reverse", "a skip over all blocks", "an input used at the end",
    "a hidden state passed along", "dropout", "a recurrent layer", "a state carried from batch to batch",
    "a mask made at the first call",
)  # fmt: skip
MODULES = (
    "batch norms", "one batch norm for all", "a frozen batch norm", "weight_norm", "spectral_norm",
    "an old weight_norm", "a buffer that counts", "a buffer that is replaced", "a buffer of the root that counts",
    "frozen blocks", "tied ends", "blocks that share weights", "extra state",
)  # fmt: skip
HOOKS = (
    "a pre-hook of the root", "a hook of the root", "a hook of the list", "a hook of a block", "a pre-hook of a block",
    "a backward hook of a block", "a backward hook of the root", "a mask on a weight", "a clamp on a weight",
    "a hook after the gradient",
)  # fmt: skip
OUTPUTS = ("a dict", "a tuple", "a dict in a tuple")
INPUTS = ("two inputs", "named inputs")
LOSSES = (
    "a sum", "ignored targets", "class weights", "a mean of its own", "a mean of what counts", "a sum and a count",
    "a weighted loss", "a contrast over the batch", "smoothed labels",
)  # fmt: skip
HABITS = (*FORWARD, *MODULES, *HOOKS, *OUTPUTS, *INPUTS, *LOSSES)
STATEFUL = (
    "batch norms", "one batch norm for all", "a frozen batch norm", "spectral_norm", "a buffer that counts",
    "a buffer that is replaced", "a buffer of the root that counts", "a counter in a block", "a counter in the root",
    "random in a block", "dropout", "a state carried from batch to batch",
)  # fmt: skip
"""What sees each micro-batch by itself: a plain loop accumulates over the same ones."""


class Tape:
    """The masks that dropout drew: a plain loop, which would draw others, is given the same ones."""

    def __init__(self):
        self.masks, self.replays = None, False

    def record(self):
        self.masks, self.replays = {}, False

    def replay(self, masks):
        self.masks, self.replays = masks, True

    @contextmanager
    def stopped(self):
        """Nothing is recorded in the block."""
        masks, self.masks = self.masks, None
        yield
        self.masks = masks

    def end(self):
        found, self.masks = self.masks, None
        return found


tape = Tape()


class Dropout(nn.Module):
    """Dropout of one half, which has its masks from the tape, or leaves them there."""

    def __init__(self, index):
        super().__init__()
        self.index, self.last = index, None

    def forward(self, x):
        if not self.training:
            return x
        computed_again = torch._C._current_graph_task_id() != -1  # in a backward, of what was checkpointed
        if tape.masks is not None and tape.replays:
            if not computed_again:
                self.last = tape.masks[self.index].pop(0)
            return x * self.last
        mask = 2 * torch.bernoulli(torch.full_like(x, 0.5))
        if tape.masks is not None and not computed_again:
            tape.masks.setdefault(self.index, []).append(mask.detach())
        return x * mask


class Head(nn.Module):
    """An auxiliary head on the first tensor that a stage gives."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, *features):
        return self.linear(logits(features))


class Reverse(torch.autograd.Function):
    """The identity, whose gradient has the other sign."""

    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, gradient: -gradient)


class Block(nn.Module):
    """A linear layer, and what the habits add to it."""

    def __init__(self, habits, index, shared):
        super().__init__()
        self.habits, self.index, self.calls = habits, index, 0
        self.linear = nn.Linear(WIDTH, WIDTH)
        own = index == 1
        if "blocks that share weights" in habits and shared is not None and index == BLOCKS - 1:
            self.linear.weight = shared.linear.weight
        if own and "weight_norm" in habits:
            nn.utils.parametrizations.weight_norm(self.linear)
        if own and "an old weight_norm" in habits:
            nn.utils.weight_norm(self.linear)
        if own and "spectral_norm" in habits:
            nn.utils.parametrizations.spectral_norm(self.linear)
        if "batch norms" in habits or (own and "a frozen batch norm" in habits):
            self.norm = nn.BatchNorm1d(WIDTH)
        if "dropout" in habits:
            self.dropout = Dropout(index)
        if own and "a recurrent layer" in habits:
            self.recurrent = nn.GRU(WIDTH // 2, WIDTH // 2, batch_first=True)
        self.carried = self.mask = None
        if "a buffer that counts" in habits:
            self.register_buffer("seen", torch.zeros(WIDTH))
        if "a buffer that is replaced" in habits:
            self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, x, hidden=None):
        habits, own = self.habits, self.index == 1
        if hidden is not None:
            x = x + 0.5 * hidden
        if own and "random in a block" in habits:
            x = x * (1 + (random.random() < 0.5))
        if own and "another branch in training in a block" in habits and self.training:
            x = x * 1.5
        if own and "a counter in a block" in habits:
            self.calls += 1
            x = x * (1 + self.calls % 3)
        if own and "a gradient reversed in a block" in habits:
            x = Reverse.apply(x)
        x = self.linear(x)
        if hasattr(self, "norm"):
            x = self.norm(x)
        if "a buffer that counts" in habits and self.training:
            self.seen.mul_(0.9).add_(x.detach().mean(0))
            x = x + 0.1 * self.seen
        if "a buffer that is replaced" in habits and self.training:
            self.last = 0.5 * self.last + x.detach().mean(0)
            x = x + 0.1 * self.last
        if own and "a recurrent layer" in habits:
            x = self.recurrent(x.view(len(x), 2, -1))[0].flatten(1)
        if own and "a state carried from batch to batch" in habits and self.training:
            if self.carried is not None:
                x = x + 0.1 * self.carried
            self.carried = x.detach().mean(0)
        if own and "a mask made at the first call" in habits:
            if self.mask is None:
                self.mask = torch.tril(torch.ones(WIDTH, WIDTH, dtype=x.dtype))
            x = x @ self.mask
        if "dropout" in habits:
            x = self.dropout(x)
        x = torch.tanh(x)
        return (x, x.flip(1) if own else x) if "a hidden state passed along" in habits else x

    def get_extra_state(self):
        return {"calls": self.calls} if "extra state" in self.habits else None

    def set_extra_state(self, state):
        self.calls = self.calls if state is None else state["calls"]


class Network(nn.Module):
    """Blocks between a first and a last layer, and what the habits do around them."""

    def __init__(self, habits):
        super().__init__()
        self.habits, self.scale, self.calls = habits, 2.0, 0
        self.first = nn.Linear(WIDTH, WIDTH)
        blocks = []
        for index in range(BLOCKS):
            blocks.append(Block(habits, index, blocks[0] if blocks else None))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, CLASSES)
        if "auxiliary outputs in training" in habits:
            self.side = nn.Linear(WIDTH, CLASSES)
        if "one batch norm for all" in habits:
            self.norm = nn.BatchNorm1d(WIDTH)
        if "a buffer of the root that counts" in habits:
            self.register_buffer("seen", torch.zeros(WIDTH))
        if "tied ends" in habits:
            self.last = nn.Linear(WIDTH, WIDTH)
            self.last.weight = self.first.weight

    def forward(self, x, other=None):
        habits = self.habits
        given = x
        if other is not None:
            x = x + 0.5 * other
        x = self.first(x)
        if "no_grad on the first blocks" in habits:
            with torch.no_grad():
                x = self.run(x, self.blocks[:2])
            x = self.run(x, self.blocks[2:])
        elif "set_grad_enabled" in habits:
            torch.set_grad_enabled(False)
            x = self.run(x, self.blocks[:1])
            torch.set_grad_enabled(True)
            x = self.run(x, self.blocks[1:])
        else:
            x = self.run(x, self.blocks)
        if "a skip over all blocks" in habits:
            x = x + given
        if "an input used at the end" in habits:
            x = x * given.abs().mean(1, keepdim=True)
        if "another branch in training" in habits and self.training:
            x = x * 1.5
        if "random in the root" in habits:
            x = x * (1 + (random.random() < 0.5))
        if "numpy in the root" in habits:
            x = x * (1 + (np.random.rand() < 0.5))
        if "torch.rand in the root" in habits:
            x = x * (1 + float(torch.rand(())))
        if "a counter in the root" in habits:
            self.calls += 1
            x = x * (1 + self.calls % 3)
        if "gates by values" in habits and bool(x.detach().sum() > 0):
            x = 1.5 * x
        if "a force by autograd.grad" in habits:
            with torch.enable_grad():
                energy = logits(self.blocks[BLOCKS - 1](x)).pow(2).sum()
                x = x + torch.autograd.grad(energy, x, create_graph=True)[0] if x.requires_grad else x
        if "tied ends" in habits:
            x = self.last(x)
        if "a buffer of the root that counts" in habits and self.training:
            self.seen.mul_(0.9).add_(x.detach().mean(0))
            x = x + 0.1 * self.seen
        output = self.head(x)
        if "a temperature" in habits:
            output = output / self.scale
        if "auxiliary outputs in training" in habits and self.training:
            return output, self.side(x)
        if "a dict" in habits:
            return {"logits": output}
        if "a tuple" in habits:
            return output, x
        if "a dict in a tuple" in habits:
            return output, {"features": x}
        return output

    def run(self, x, blocks):
        habits, hidden = self.habits, ()
        blocks = list(blocks)[::-1] if "blocks in reverse" in habits else list(blocks)
        for block in blocks:
            if "a gradient reversed between blocks" in habits and block.index == 2:
                x = Reverse.apply(x)
            if "detach between blocks" in habits and block.index == 2:
                x = x.detach()
            for _ in range(2 if "a block called twice" in habits and block.index == 1 else 1):
                if "checkpointed" in habits:
                    x = checkpoint(block, x, *hidden, use_reentrant=False)
                elif "checkpointed as before 2.0" in habits and x.requires_grad:
                    x = checkpoint(block, x, *hidden, use_reentrant=True)
                else:
                    x = block(x, *hidden)
                if "a hidden state passed along" in habits:
                    x, *hidden = x
            if "one batch norm for all" in habits:
                x = self.norm(x)
            if "a gradient scaled by a hook on an activation" in habits and block.index == 1 and x.requires_grad:
                x.register_hook(double)
        return x


def double(gradient):
    return 2 * gradient


def twice(module, inputs, outputs):
    return tuple(None if gradient is None else 2 * gradient for gradient in inputs)


def stronger(module, args, output):
    return (1.5 * output[0], *output[1:]) if isinstance(output, tuple) else 1.5 * output


def halve(parameter):
    parameter.grad *= 0.5


def network(habits, seed=0):
    """A network with its hooks; equal for equal habits and seeds."""
    torch.manual_seed(seed)
    model = Network(habits).double()
    if "a frozen batch norm" in habits:
        model.blocks[1].norm.eval()
    if "frozen blocks" in habits:
        model.blocks[:2].requires_grad_(False)
    if "a pre-hook of the root" in habits:
        model.register_forward_pre_hook(lambda module, args: (args[0] / 2, *args[1:]))
    if "a hook of the root" in habits:
        model.register_forward_hook(lambda module, args, output: output)
    if "a hook of the list" in habits:
        model.blocks.register_forward_hook(lambda *_: None)
    if "a hook of a block" in habits:
        model.blocks[1].register_forward_hook(stronger)
    if "a pre-hook of a block" in habits:
        model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] / 2, *args[1:]))
    if "a backward hook of a block" in habits:
        model.blocks[2].register_full_backward_hook(twice)
    if "a backward hook of the root" in habits:
        model.register_full_backward_hook(lambda *_: None)
    weight = model.head.weight
    if "a mask on a weight" in habits:
        weight.register_hook(lambda gradient: gradient * (torch.arange(gradient.numel()).view_as(gradient) % 2))
    if "a clamp on a weight" in habits:
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    if "a hook after the gradient" in habits:
        weight.register_post_accumulate_grad_hook(halve)
    return model


class Weighted(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, output, target):
        return torch.exp(-self.log_scale) * F.cross_entropy(logits(output), target) + self.log_scale


def logits(output):
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


def loss_of(habits):
    """The loss, as a function of outputs and targets."""
    if "a weighted loss" in habits:
        return Weighted()

    def loss(output, target):
        found = logits(output)
        if "a sum" in habits:
            return F.cross_entropy(found, target, reduction="sum")
        if "ignored targets" in habits:
            return F.cross_entropy(found, target, ignore_index=-1)
        if "class weights" in habits:
            return F.cross_entropy(found, target, weight=torch.arange(1.0, CLASSES + 1, dtype=torch.float64))
        if "a mean of its own" in habits:
            return F.cross_entropy(found, target, reduction="none").mean()
        if "a mean of what counts" in habits:
            mask = (target != 0).double()
            return (F.cross_entropy(found, target, reduction="none") * mask).sum() / mask.sum().clamp(min=1)
        if "a sum and a count" in habits:
            return F.cross_entropy(found, target, reduction="sum"), len(target)
        if "a contrast over the batch" in habits:
            return F.cross_entropy(found @ found.T, torch.arange(len(found)))
        if "smoothed labels" in habits:
            return F.cross_entropy(found, target, label_smoothing=0.1)
        return F.cross_entropy(found, target)

    return loss


def batches(habits, number, seed=1):
    """Inputs and targets of some minibatches; rare targets are ignored from the second one on."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for step in range(number):
        x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        y = torch.randint(CLASSES, (ROWS,), generator=generator)
        if "ignored targets" in habits and step:
            y[:4] = -1
        if "two inputs" in habits:
            x = (x, x.flip(0))
        elif "named inputs" in habits:
            x = {"x": x, "other": x.flip(0)}
        made.append((x, y))
    return made


def called(model, x):
    """The model on a batch's inputs."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)
