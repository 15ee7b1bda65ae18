"""Weights that are changed between steps (a clamp, a state that is loaded) are trained on as changed, everywhere."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from stretto import UsageError

X = torch.randn(5, 12, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(60).view(5, 12) % 3


def network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@torch.no_grad()
def clamp(model):
    for p in model.parameters():
        p.clamp_(-0.2, 0.2)


def halve(model):
    model.load_state_dict({key: 0.5 * value for key, value in model.state_dict().items()})


def clamp_data(model):
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


def trained(change, dtype=torch.float64, steps=5, **given):
    trainer = stretto.Trainer(stretto.split(network(dtype), 2), cross_entropy, sgd, "1f1b(microbatches=2)", **given)
    for step in range(steps):
        trainer.step(X[step].to(dtype), Y[step])
        if step == 1:
            change(trainer.model)
    return list(trainer.model.parameters())


def plain(change):
    model = network(torch.float64)
    optimizer = sgd(model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        cross_entropy(model(X[step].double()), Y[step]).backward()
        optimizer.step()
        if step == 1:
            change(model)
    return list(model.parameters())


def plain_with_masters(change):
    model = network(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = sgd(masters)
    for step in range(5):
        optimizer.zero_grad()
        for x, y in zip(X[step].bfloat16().tensor_split(2), Y[step].tensor_split(2), strict=True):
            (cross_entropy(model(x).float(), y) / 2).backward()
            for p, master in zip(model.parameters(), masters, strict=True):
                master.grad = p.grad.float() if master.grad is None else master.grad + p.grad
                p.grad = None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
            if step == 1:
                change(model)
                for p, master in zip(model.parameters(), masters, strict=True):
                    changed = p != master.to(p.dtype)
                    master[changed] = p[changed].float()
    return list(model.parameters())


REPLICAS = {"all-reduce": {}, "shard-optimizer": {"sync": "shard-optimizer"}, "fully-shard": {"sync": "fully-shard"}}


@pytest.mark.parametrize("sync", REPLICAS)
@pytest.mark.parametrize("change", [clamp, halve])
def test_emulated_replicas_follow_the_first_one(change, sync):
    for ours, theirs in zip(trained(change, mesh=stretto.Mesh(data=2), **REPLICAS[sync]), plain(change), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("change", [clamp, halve])
def test_masters_follow_low_precision_weights(change):
    ours = trained(change, torch.bfloat16, precision="bf16")
    for one, other in zip(ours, plain_with_masters(change), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("given", [{"mesh": stretto.Mesh(data=2)}, {"precision": "bf16"}], ids=str)
def test_a_change_that_leaves_no_trace_is_found_by_value(given):
    with pytest.raises(UsageError, match=r"was changed between two steps[\s\S]*not through p\.data"):
        trained(clamp_data, torch.bfloat16, **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sync": "local-sgd"}, r"0\.0\.weight was changed .* first of 2 replicas, which train by themselves"),
        ({"sync": "shard-optimizer", "precision": "bf16"}, "its float32 master is shared out among replicas"),
    ],
)
def test_what_nobody_can_follow_is_refused(given, said):
    with pytest.raises(UsageError, match=said):
        trained(clamp, torch.bfloat16, mesh=stretto.Mesh(data=2), **given)


def test_a_model_that_has_micro_batches_on_their_way_is_flushed_first():
    trainer = stretto.Trainer([nn.BatchNorm1d(6), nn.Linear(6, 3)], cross_entropy, sgd, "pipedream")
    trainer.model.eval()
    for step in range(2):
        trainer.step(X[step], Y[step])
    trainer.model[0].running_var.add_(1)
    with pytest.raises(UsageError, match=r"stage 0 .* fails in its backward[\s\S]*call flush\(\) before you change"):
        trainer.step(X[2], Y[2])
