"""BatchNorm out, GroupNorm in: same parameters, same shapes, no look across the batch."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stretto
from stretto import UsageError


def network():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Sequential(nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5, eps=0.1)),
        nn.Flatten(), nn.LazyLinear(8), nn.BatchNorm1d(8), nn.Linear(8, 3),
    )  # fmt: skip


def test_every_batch_norm_is_replaced_in_place(caplog):
    model = network()
    model(torch.randn(2, 3, 8, 8))
    weights = dict(model.named_parameters())
    with caplog.at_level(logging.INFO, logger="stretto"):
        assert stretto.group_norm(model) is model
    assert "3 BatchNorm replaced" in caplog.text
    assert [(m.num_groups, m.num_channels, m.eps) for m in model.modules() if isinstance(m, nn.GroupNorm)] == [
        (3, 6, 1e-5),
        (5, 5, 0.1),  # no two of five
        (1, 8, 1e-5),  # behind a Linear: all channels
    ]
    assert all(weights[name] is parameter for name, parameter in model.named_parameters())
    assert not list(model.buffers())
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(model(x), torch.cat([model(each) for each in x.split(1)]))


@pytest.mark.parametrize(
    ("norm", "shape", "groups"),
    [
        (nn.BatchNorm1d(12), (4, 12), 1),
        (nn.BatchNorm1d(12), (4, 12, 5), 1),
        (nn.BatchNorm2d(12), (4, 12, 5, 5), 3),
        (nn.BatchNorm3d(12), (4, 12, 3, 3, 3), 3),
        (nn.SyncBatchNorm(12), (4, 12, 5, 5), 3),
        (nn.BatchNorm2d(12, affine=False), (4, 12, 5, 5), 3),
        (nn.BatchNorm2d(12, track_running_stats=False), (4, 12, 5, 5), 3),
    ],
)
def test_a_batch_norm_itself(norm, shape, groups):
    norm = norm.double().eval()
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        norm.bias.requires_grad_(False)
    made = stretto.group_norm(norm, group_size=4)
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(made(x), F.group_norm(x, groups, norm.weight, norm.bias, norm.eps))
    assert made.weight is norm.weight
    assert made.bias is norm.bias
    assert not made.training


@pytest.mark.parametrize(("channels", "wanted", "size"), [(12, 5, 4), (7, 4, 1), (6, 100, 6), (16, 8, 8), (1, 2, 1)])
def test_the_size_of_groups(channels, wanted, size):
    made = stretto.group_norm(nn.BatchNorm2d(channels), group_size=wanted)
    assert made.num_groups == channels // size


def test_one_norm_in_two_places_stays_one():
    shared = nn.BatchNorm2d(4)
    model = stretto.group_norm(nn.Sequential(shared, shared, nn.Sequential(shared)))
    assert isinstance(model[0], nn.GroupNorm)
    assert model[0] is model[1] is model[2][0]


def test_mistakes():
    with pytest.raises(UsageError, match="Linear has no BatchNorm"):
        stretto.group_norm(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="group_norm: 1 do not know their channels yet: run a forward first"):
        stretto.group_norm(nn.Sequential(nn.BatchNorm2d(2), nn.LazyBatchNorm2d()))
    for size in (0, 1.5, True):
        with pytest.raises(UsageError, match="whole number of channels"):
            stretto.group_norm(nn.BatchNorm2d(2), group_size=size)
