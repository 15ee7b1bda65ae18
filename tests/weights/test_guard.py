"""Fails loudly when torch changes what its private `_unsafe_preserve_version_counter` does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stretto.weights import saved_tensor_check

OLD = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
NEW = torch.tensor([[5.0, -6.0], [0.5, 8.0]], dtype=torch.float64)


def test_this_torch_has_it():
    assert saved_tensor_check.can_hide_changes(), "torch dropped it: Live now keeps weights by name"


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d])
def test_a_backward_reads_the_new_weights(kind):
    layer = nn.Linear(2, 2) if kind is nn.Linear else nn.Conv2d(2, 2, 1)
    layer = layer.double()
    shape = layer.weight.shape
    x = torch.randn(3, 2, *shape[2:], dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        layer.weight.copy_(OLD.reshape(shape))
    output = layer(x)
    version = layer.weight._version
    with torch.no_grad(), saved_tensor_check.unnoticed([layer.weight]):
        layer.weight.copy_(NEW.reshape(shape))
    assert layer.weight._version == version, "an in-place change was counted"
    g = torch.randn_like(output)
    output.backward(g)
    torch.testing.assert_close(x.grad.flatten(1), g.flatten(1) @ NEW, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.weight.grad.flatten(1), g.flatten(1).T @ x.detach().flatten(1))


def test_without_it_torch_refuses():
    """If torch stopped counting changes, a forgotten guard would go unnoticed: then this fails."""
    layer, x = nn.Linear(2, 2), torch.randn(3, 2, requires_grad=True)
    output = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        output.sum().backward()


def test_only_the_weights_named_are_unnoticed():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    output = other(one(torch.randn(3, 2, requires_grad=True)))
    with torch.no_grad(), saved_tensor_check.unnoticed([one.weight]):
        one.weight.add_(1)
        other.weight.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        output.sum().backward()


def test_the_innermost_hook_is_known():
    def pack(tensor):
        return tensor

    assert saved_tensor_check.innermost_hook() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert saved_tensor_check.innermost_hook() is pack
        F.linear(torch.randn(2, 2), torch.randn(2, 2, requires_grad=True))
