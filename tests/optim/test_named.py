"""Optimizers whose groups go by the names of parameters, and what processes tell each other of their stages."""

import math

import pytest
import torch
from torch import nn

import stretto
from stretto.optim import NamedOptimizer

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def stages():
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3)]


def groups(named):
    """Weights decay, biases do not."""
    parts = [[p for name, p in named if name.endswith("bias") == is_bias] for is_bias in (False, True)]
    return torch.optim.AdamW([{"params": parts[0], "weight_decay": 0.3}, {"params": parts[1], "weight_decay": 0.0}])


@pytest.mark.parametrize("options", [{}, {"mesh": stretto.Mesh(data=2)}, {"precision": "bf16"}], ids=str)
def test_groups_go_by_name(options):
    seen = []

    def optimizer(named):
        seen.append([name for name, _ in named])
        return groups(named)

    trainer = stretto.Trainer(stages(), nn.functional.cross_entropy, NamedOptimizer(optimizer), "gpipe", **options)
    copies = 2 if "mesh" in options else 1
    assert seen == [["0.0.weight", "0.0.bias"]] * copies + [["1.weight", "1.bias"]] * copies
    trainer.step(X, Y)
    assert {*seen[0], *seen[-1]} == {*trainer.gather()}


def test_names_are_those_of_gather_with_heads():
    seen = []

    def optimizer(named):
        seen.extend(name for name, _ in named)
        return groups(named)

    trainer = stretto.Trainer(stages(), nn.functional.cross_entropy, NamedOptimizer(optimizer), "greedy", example=X)
    assert {*seen} == {*trainer.gather()}
    assert any(name.startswith("heads.0.") for name in seen)


def test_a_parameter_server_is_refused():
    with pytest.raises(stretto.UsageError, match=r"shards of .* have no names"):
        stretto.Trainer(
            stages(),
            nn.functional.cross_entropy,
            NamedOptimizer(groups),
            "backprop",
            mesh=stretto.Mesh(data=2),
            sync="parameter-server(staleness=1)",
        )


def test_the_norm_of_all_gradients():
    trainer = stretto.Trainer(stages(), nn.functional.cross_entropy, torch.optim.SGD, "gpipe", clip=0.01)
    assert trainer.grad_norms() == [None, None]
    model = nn.Sequential(*stages())
    nn.functional.cross_entropy(model(X), Y).backward()
    trainer.step(X, Y)
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert math.hypot(*trainer.grad_norms()) == pytest.approx(trainer.grad_norm, rel=1e-12)
    assert trainer.grad_norm == pytest.approx(float(expected), rel=1e-6)
