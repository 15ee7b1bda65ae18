"""Modules that are only looked at are afterwards as before."""

import torch
from torch import nn

from stretto.nn.preserve import undisturbed


def test_buffers_keep_their_values_and_their_place():
    norm = nn.BatchNorm1d(3)
    mean = norm.running_mean
    with undisturbed([norm], torch.device("cpu")):
        norm.train()
        norm(torch.randn(8, 3) + 5)
        assert norm.running_mean.norm() > 0.1
    assert norm.running_mean is mean
    assert torch.equal(mean, torch.zeros(3))


def test_buffers_without_values():
    """As in networks whose costs are counted on the meta device."""
    norm = nn.BatchNorm1d(3, device="meta")
    mean = norm.running_mean
    with undisturbed([norm], torch.device("meta")), torch.no_grad():
        norm.train()
        norm(torch.empty(8, 3, device="meta"))
        norm.running_mean = torch.empty(3, device="meta")
    assert norm.running_mean is mean
