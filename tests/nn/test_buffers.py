"""Buffers are copied once a change, and put back as the objects they were."""

import pytest
import torch
from torch import nn

from stretto.nn.carried_attributes import Buffers, exchanged


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.BatchNorm1d(4, affine=False))


def test_a_second_forward_finds_the_values_and_leaves_no_trace():
    module, x = network(), torch.randn(8, 4)
    buffers = Buffers([module])
    before = [buffer.clone() for buffer in module.buffers()]
    snapshot = buffers.snapshot()
    module(x)
    after = [buffer.clone() for buffer in module.buffers()]
    objects = [id(buffer) for buffer in module.buffers()]
    with exchanged(snapshot):
        assert all(torch.equal(a, b) for a, b in zip(module.buffers(), before, strict=True))
        module(x)
    assert [id(buffer) for buffer in module.buffers()] == objects
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), after, strict=True))


def test_an_error_inside_puts_them_back_too():
    module = network()
    objects = [id(buffer) for buffer in module.buffers()]
    with pytest.raises(RuntimeError), exchanged(Buffers([module]).snapshot()):
        module(torch.randn(8, 3))
    assert [id(buffer) for buffer in module.buffers()] == objects


def test_what_does_not_change_is_copied_once():
    module = network()
    module.register_buffer("mask", torch.ones(100))
    buffers = Buffers([module])
    one = {name: value for _, name, value in buffers.snapshot() if name == "mask"}
    module(torch.randn(8, 4))
    other = {name: value for _, name, value in buffers.snapshot() if name == "mask"}
    assert one["mask"] is other["mask"]
    assert one["mask"] is not module.mask


def test_a_buffer_that_two_modules_share_stays_shared():
    module, count = nn.ModuleList([nn.Module(), nn.Module()]), torch.zeros(1)
    for part in module:
        part.register_buffer("count", count)
    with exchanged(Buffers([module]).snapshot()):
        assert module[0].count is module[1].count
        assert module[0].count is not count
    assert module[0].count is module[1].count is count


def test_modules_without_buffers_have_empty_snapshots():
    assert Buffers([nn.Linear(3, 3)]).snapshot() == []
