"""What a cut would lose is refused by name; what it keeps is proved; what it returns is saved and copied."""

import copy
import io
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stretto
from stretto import UsageError
from stretto.nn.chain import Chain
from stretto.splitting.export.repairs import group_norm

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Blocks(nn.Module):
    """Four blocks between what `around` makes of them; `around(model, blocks, x)` is what its forward does."""

    def __init__(self, around, block=lambda: nn.Linear(8, 8)):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.scale, self.calls = 1.0, 0
        self._around = (around,)

    def forward(self, x):
        return self._around[0](self, x)

    def run(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Reverse(torch.autograd.Function):
    """The identity, whose gradient has the other sign."""

    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, gradient: -gradient)


class Doubled(torch.autograd.Function):
    """Twice its input, as the gradient says, too: torch.fx and torch.export record the product."""

    forward = staticmethod(lambda ctx, x: 2 * x)
    backward = staticmethod(lambda ctx, gradient: 2 * gradient)


def frozen_backbone(model, x):
    with torch.no_grad():
        x = model.run(x)
    return model.head(x)


def switched_off(model, x):
    torch.set_grad_enabled(False)
    x = model.run(x)
    torch.set_grad_enabled(True)
    return model.head(x)


def counted(model, x):
    model.calls += 1
    return model.head(model.run(x))


def carried(model, x):
    x = model.run(x)
    before = getattr(model, "state", None)
    model.state = x.detach().mean(0)
    return model.head(x if before is None else x + before)


def appended(model, x):
    x = model.run(x)
    if not hasattr(model, "states"):
        model.states = []
    model.states.append(x.detach().mean(0))
    return model.head(x + sum(model.states[:-1]))


class Cast(nn.Module):
    """A model whose own forward enters autocast."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 3)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = torch.tanh(block(x))
        return self.head(x.float())


LOST = {
    "no_grad": (frozen_backbone, "blocks.0.weight.*no gradient .torch.no_grad"),
    "set_grad_enabled": (switched_off, "blocks.0.weight.*no gradient .torch.no_grad"),
    "Function": (lambda model, x: model.head(Reverse.apply(model.run(x))), "Reverse, an autograd.Function"),
    "random": (
        lambda model, x: model.head(model.run(x)) * (1 + (random.random() < 0.5)),
        "draws from random would be the same",
    ),
    "numpy": (lambda model, x: model.head(model.run(x)) * (1 + (np.random.rand() < 0.5)), "from numpy.random"),
    "a counter": (counted, "calls"),
    "a state": (carried, "in training for the second time, output 0 .*keeps in state would be lost"),
    "a list": (appended, "keeps in states would be lost"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_a_graph_does_not_record_is_refused_by_name(name):
    around, said = LOST[name]
    with pytest.raises(UsageError, match=said):
        stretto.split(Blocks(around), 2, example=X)


def test_autocast_is_named():
    with pytest.raises(UsageError, match=r"enters torch\.autocast between its blocks.*precision='bf16-autocast'"):
        stretto.split(Cast(), 2, example=X)


def cached(model, x):
    """A table for so many columns: the same for every batch."""
    if getattr(model, "table", None) is None or model.table.shape[0] != x.shape[1]:
        model.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
    return model.head(model.run(x) + model.table)


def test_a_cache_is_no_state():
    stages = stretto.split(Blocks(cached), 2, example=X)
    assert "proved on the example" in stages.explanation


class Remembering(nn.Module):
    """A block that carries a state on from one batch to the next, in attributes of every kind."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0
        self.states, self.table, self.tensor = [], {}, torch.zeros(8)
        self.last = None

    def forward(self, x):
        x = self.linear(x)
        mean = x.detach().mean(0)
        for state in (*self.states[-1:], *self.table.values(), self.tensor, self.last):
            x = x if state is None else x + 0.1 * state
        self.calls, self.last, self.table["mean"] = self.calls + 1, mean, mean
        self.states.append(mean)
        self.tensor.mul_(0.5).add_(mean)
        return x * (1 + self.calls % 3)


def test_what_blocks_carry_on_is_left_as_it_was():
    model = Blocks(lambda model, x: model.head(model.run(x)), block=Remembering)
    kept = [(block.states, block.table, block.tensor) for block in model.blocks]
    stages = stretto.split(model, 2, example=X)
    assert "proved on the example" in stages.explanation
    for block, (states, table, tensor) in zip(model.blocks, kept, strict=True):
        assert (block.states, block.table, block.calls, block.last) == ([], {}, 0, None)
        assert block.states is states
        assert block.table is table
        assert block.tensor is tensor
        assert not tensor.any()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("gpipe(microbatches=2)", {}),
        ("1f1b(recompute=true,microbatches=2)", {}),
        ("gpipe(microbatches=2)", {"recompute": "full"}),
    ],
)
def test_it_is_carried_on_once_a_micro_batch(method, options):
    model, plain = (Blocks(lambda model, x: model.head(model.run(x)), block=Remembering) for _ in range(2))
    y, sgd = torch.arange(4) % 3, torch.optim.SGD
    trainer = stretto.Trainer(
        stretto.split(model, 2, example=X), nn.functional.cross_entropy, lambda params: sgd(params, lr=0.1), method,
        **options,
    )  # fmt: skip
    optimizer = sgd(plain.parameters(), lr=0.1)
    for _ in range(3):
        trainer.step(X, y)
        optimizer.zero_grad()
        for x, target in zip(X.split(2), y.split(2), strict=True):
            (nn.functional.cross_entropy(plain(x), target) / 2).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [block.calls for block in model.blocks] == [6] * 4
    assert [len(block.states) for block in model.blocks] == [6] * 4


class Averaging(nn.Module):
    """A block with a moving average of its own weights, which its forward moves."""

    def __init__(self):
        super().__init__()
        self.linear, self.slow = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.linear.parameters(), strict=True):
                slow.lerp_(fast, 0.5)
        return self.linear(x) + self.slow(x).detach()


def averaging():
    return Blocks(lambda model, x: model.head(model.run(x)), block=Averaging)


def test_weights_that_a_forward_moves_are_left_as_they_were():
    model = averaging()
    before = copy.deepcopy(model.state_dict())
    assert "proved on the example" in stretto.split(model, 2, example=X).explanation
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_too_large_to_be_copied_is_refused_if_its_forward_moves_weights(monkeypatch):
    monkeypatch.setattr("stretto.nn.preserve.COPIED", 0)
    with pytest.raises(UsageError, match=r"changes its parameter blocks\.0\.slow\.weight in place.*too large"):
        stretto.split(averaging(), 2, example=X)
    stretto.split(Blocks(lambda model, x: model.head(model.run(x))), 2, example=X)


@pytest.mark.parametrize(
    ("method", "options"), [("1f1b(recompute=true,microbatches=2)", {}), ("backprop", {"recompute": "full"})]
)
def test_they_would_move_twice_where_a_forward_is_computed_again(method, options):
    stages = stretto.split(averaging(), 2, example=X)
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    trainer = stretto.Trainer(stages, nn.functional.cross_entropy, sgd, method, **options)
    with pytest.raises(UsageError, match=r"changes its parameter .*slow\.weight in place, and would do so twice"):
        trainer.step(X, torch.arange(4) % 3)


def test_a_function_whose_backward_is_recorded_is_none():
    """It is cut by torch.export, which looks into it: the gradients are the same."""
    stages = stretto.split(Blocks(lambda model, x: model.head(Doubled.apply(model.run(x)))), 2, example=X)
    assert "proved on the example" in stages.explanation


def add_forward_hook(module):
    return module.register_forward_hook(lambda *_: None)


def add_pre_hook(module):
    return module.register_forward_pre_hook(lambda *_: None)


def add_backward_hook(module):
    return module.register_full_backward_hook(lambda *_: None)


HOOKS = (add_forward_hook, add_pre_hook, add_backward_hook)


@pytest.mark.parametrize("add", HOOKS)
def test_hooks_of_modules_that_no_stage_calls_are_refused_whatever_they_do(add):
    listed, nested = mlp(), nn.Sequential(mlp(), mlp())
    plain = Blocks(lambda model, x: model.head(model.run(x)))
    for model, hooked, given in (
        (listed, listed, None), (listed, listed, X), (nested, nested, X), (plain, plain, X),
        (Blocks(lambda model, x: model.head(model.run(x).detach() + model.run(x))), None, X),
    ):  # fmt: skip
        handle = add(model if hooked is None else hooked)
        with pytest.raises(UsageError, match=rf"has hooks on modules .*{add.__name__}.* of {type(model).__name__}"):
            stretto.split(model, 2, example=given)
        handle.remove()


def mlp():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())


@pytest.mark.parametrize("add", HOOKS)
def test_hooks_inside_a_stage_stay(add):
    model = Blocks(lambda model, x: model.head(model.run(x)))
    add(model.blocks[1])
    assert len(stretto.split(model, 2, example=X)) == 2
    layers = mlp()
    add(layers[2])
    assert len(stretto.split(layers, 2, example=X)) == 2


class Drawing(nn.Module):
    """A block that draws from all three generators."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = x * (1 + (random.random() < 0.5)) * (1 + (np.random.rand() < 0.5))
        return nn.functional.dropout(self.linear(x), 0.5, self.training)


class Checkpointed(nn.Module):
    """A block that is computed again in the backward, as torch recommends and as it did before."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = checkpoint(self.second, self.first(x), use_reentrant=True)
        return checkpoint(self.third, x, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # in evaluation
@pytest.mark.parametrize("block", [Drawing, Checkpointed, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))])
def test_what_blocks_do_is_kept_and_the_proof_leaves_no_trace(block):
    model = Blocks(lambda model, x: model.head(model.run(x)), block)
    model.blocks[0].eval()
    model.head.weight.grad = torch.ones(3, 8)
    state, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    stages = stretto.split(model, 2, example=X)
    assert "proved on the example" in stages.explanation
    assert str(before) == str((torch.get_rng_state(), random.getstate(), str(np.random.get_state())))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model.head.weight.grad, torch.ones(3, 8))
    assert all(parameter.grad is None for parameter in model.blocks.parameters())


def test_an_optimizer_in_the_backward_takes_no_step():
    model = Blocks(lambda model, x: model.head(model.run(x)))
    model.head.weight.register_post_accumulate_grad_hook(lambda weight: weight.data.zero_())
    stretto.split(model, 2, example=X)
    assert model.head.weight.abs().sum() > 0


def test_without_an_example_nothing_is_proved_and_that_is_said():
    assert "unproved: without an example" in stretto.split(mlp(), 2).explanation
    assert "nothing else was there" in stretto.split(list(mlp()), 2, example=X).explanation


def test_a_model_that_fails_in_training_is_said_to_be_unproved():
    """A batch norm takes no single row in training."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    stages = stretto.split(model, 2, example=X[:1])
    assert (
        "unproved: the model fails on the example in training: ValueError: Expected more than 1" in stages.explanation
    )


class TwoOutputs(nn.Module):
    """Auxiliary outputs in training alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.aux = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.a(x))
        return (self.b(x), self.aux(x)) if self.training else self.b(x)


def test_outputs_that_differ_between_the_modes_are_refused():
    with pytest.raises(UsageError, match=r"returns 2 outputs in training and 1 in evaluation"):
        stretto.split(TwoOutputs(), 2, example=X)


class Residual(nn.Module):
    """Cut by torch.export, with a switch between the modes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 3), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.b(nn.functional.dropout(self.norm(torch.tanh(self.a(x)) + x), 0.5, self.training)[: x.shape[0]])


def test_a_norm_of_a_graph_refuses_a_single_value_as_the_model_does():
    """The operator alone gives zeros, and statistics that are no numbers."""
    model = Residual()
    stages = Chain(*stretto.split(model, 2, example=X))
    said = "Expected more than 1 value per channel when training"
    for each in (model, stages):
        with pytest.raises(ValueError, match=said):
            each(X[:1])
    assert torch.equal(stages.eval()(X[:1]), model.eval()(X[:1]))
    x = torch.ones(1, 4, 1, 1)
    assert torch.equal(group_norm(x, 2, None, None), torch.nn.functional.group_norm(x, 2))
    with pytest.raises(ValueError, match=said):
        group_norm(x, 4, None, None)
    with pytest.raises(ValueError, match=said):
        torch.nn.functional.group_norm(x, 4)


SPLIT = {
    "list": mlp,
    "blocks": lambda: Blocks(lambda model, x: model.head(model.run(x.view(x.shape[0], -1)))),
    "exported": Residual,
}


@pytest.mark.parametrize("name", SPLIT)
def test_stages_are_saved_and_copied_and_train_as_before(name):
    model = Chain(*stretto.split(SPLIT[name](), 2, example=X))
    for other in (read_again(model), copy.deepcopy(model), copy.deepcopy(read_again(model))):
        assert other.state_dict().keys() == model.state_dict().keys()
        other.load_state_dict(model.state_dict())
        model.zero_grad()
        for training in (True, False):
            torch.manual_seed(0)
            expected = model.train(training)(X)
            torch.manual_seed(0)
            found = other.train(training)(X)
            assert torch.equal(found, expected)
            expected.sum().backward()
            found.sum().backward()
        pairs = zip(other.parameters(), model.parameters(), strict=True)
        assert all(mine is not its and torch.equal(mine.grad, its.grad) for mine, its in pairs)


def read_again(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("follows", [False, True])
def test_what_a_forward_keeps_is_told_from_a_cache_though_alike_examples_fail(follows):
    class Contrasted(nn.Linear):
        def forward(self, x):
            if torch.equal(x[0], x[1]):
                raise ValueError("examples are alike")
            return super().forward(x)

    def keeping(model, x):
        model.cache = {"factor": x[0].detach() if follows else torch.ones(8)}
        return model.head(model.run(x) * model.cache["factor"])

    model = Blocks(keeping, block=lambda: Contrasted(8, 8))
    example = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    if follows:
        with pytest.raises(UsageError, match="the attribute cache does not follow the batch"):
            stretto.split(model, 2, example=example)
    else:
        stages = stretto.split(model, 2, example=example)
        torch.testing.assert_close(Chain(*stages)(example), model(example))
