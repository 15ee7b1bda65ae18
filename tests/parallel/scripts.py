"""What each process does in the tests of whole networks."""

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import stretto
from laws.cut_slab_cases import check
from laws.spatial_cases import part_of
from parallel.networks import Excited, Next, ResNet, UNet


def begin(*sizes, names):
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def end():
    dist.barrier()
    dist.destroy_process_group()


def close(mine, right, what, tolerance=1e-9):
    torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def train(model, x, y, mesh=None, steps=3):
    """Losses, the first step's gradients, the state after all; with a mesh on slabs of x, and of y if that is one."""
    image = y.ndim > 1
    if mesh is not None:
        model, x = stretto.parallel.spatial(model, mesh), stretto.parallel.scatter(x, mesh)
        y = part_of(y, mesh) if image else y
    losses, gradients = [], {}
    for _ in range(steps):
        torch.manual_seed(3)
        out = model(x)
        loss = nn.functional.mse_loss(out, y, reduction="sum") / 1000 if image else nn.functional.cross_entropy(out, y)
        loss.backward()
        gradients = gradients or {name: weight.grad.clone() for name, weight in model.named_parameters()}
        with torch.no_grad():  # plain gradient descent: importing torch.optim's machinery takes each process seconds
            for weight in model.parameters():
                weight -= 0.05 * weight.grad
                weight.grad = None
        losses.append(loss.item())
    return losses, gradients, model.state_dict()


def equal(make, x, y, mesh, steps=2):
    """Train a network twice, on one device and on slabs."""
    torch.manual_seed(0)
    model = make().double()
    right = train(copy.deepcopy(model), x, y, steps=steps)
    mine = train(model, x, y, mesh, steps)
    if y.ndim == 1:
        close(mine[0], right[0], "losses")
    for what, own, other in zip(("gradient", "state"), mine[1:], right[1:], strict=True):
        assert own.keys() == other.keys()
        for name in own:
            close(own[name], other[name], f"{what} of {name}")


def resnet(width=16):
    mesh = begin(2, names=("height",))
    torch.manual_seed(1)
    make = lambda: ResNet(width=width)  # noqa: E731
    equal(make, torch.randn(2, 3, 64, 64).double(), torch.tensor([1, 7]), mesh)
    end()


def on_four():
    """What wants four processes, in one start of them."""
    grid = begin(2, 2, names=("height", "width"))
    small_networks(grid)
    images(grid)
    data_and_space(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "width")))
    end()


def small_networks(mesh):
    torch.manual_seed(1)
    x, y = torch.randn(2, 3, 29, 22).double(), torch.randn(2, 2, 29, 22).double()
    for up in ("transposed", "bilinear", "corners"):
        equal(lambda up=up: UNet(up), x, y, mesh)
    equal(lambda: UNet("bilinear", "group", dropout=0.4), x, y, mesh)
    equal(lambda: Excited((9, 8)), torch.randn(2, 3, 9, 8).double(), torch.tensor([0, 2]), mesh)
    equal(lambda: ResNet((1, 1), width=8), torch.randn(2, 3, 33, 30).double(), torch.tensor([1, 0]), mesh)


def data_and_space(mesh):
    """Two replicas, each of two processes: gradients summed over space, averaged over data by DDP."""
    torch.manual_seed(0)
    model = ResNet((1, 1), width=8).double()
    x, y = torch.randn(4, 3, 24, 26).double(), torch.tensor([1, 0, 3, 2])
    replica = mesh.get_local_rank("data")
    right = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    for rows in (slice(0, 2), slice(2, 4)):
        alone = copy.deepcopy(model)
        nn.functional.cross_entropy(alone(x[rows]), y[rows]).backward()
        for name, weight in alone.named_parameters():
            right[name] += weight.grad / 2
    own = slice(2 * replica, 2 * replica + 2)
    parallel = nn.parallel.DistributedDataParallel(
        stretto.parallel.spatial(model, mesh), process_group=mesh.get_group("data")
    )
    nn.functional.cross_entropy(parallel(stretto.parallel.scatter(x[own], mesh)), y[own]).backward()
    for name, weight in model.named_parameters():
        close(weight.grad, right[name], name)


def images(mesh):
    """scatter and collect, both ways; their backwards."""
    image = torch.arange(2 * 3 * 5 * 7.0).view(2, 3, 5, 7).requires_grad_()
    slab = stretto.parallel.scatter(image, mesh)
    assert torch.equal(slab, part_of(image, mesh))
    assert slab.is_contiguous()
    whole = stretto.parallel.collect(slab, mesh)
    assert torch.equal(whole, image)
    weight = torch.rand(image.shape, generator=torch.Generator().manual_seed(0))
    (whole * weight).sum().backward()
    assert torch.equal(image.grad, weight)
    leaf = slab.detach().requires_grad_()
    (stretto.parallel.collect(leaf, mesh) * weight).sum().backward()
    assert torch.equal(leaf.grad, part_of(weight, mesh))


def cut_slabs():
    """Whole networks whose channels and rows are cut at once; what DTensors refuse, on every process alike."""
    mesh = begin(2, 2, 1, names=("tensor", "height", "width"))
    torch.manual_seed(1)
    x = torch.randn(2, 3, 33, 30).double()
    check(ResNet((1, 1), width=8).double(), x.shape, mesh)
    check(UNet("transposed", "group").double(), x.shape, mesh, parameters="local")
    check(Next().double(), (2, 4, 6, 7), mesh, parameters="local")
    refused = stretto.parallel.spatial(stretto.parallel.tensor(Next(), mesh), mesh)
    with pytest.raises(stretto.UsageError) as caught:
        refused(torch.randn(2, 4, 3, 7))
    end()
    return str(caught.value)


def refusals():
    """What is refused, on every process alike, without waiting for each other; returns the messages."""
    mesh = begin(2, 1, names=("height", "width"))
    x = torch.randn(1, 2, 8, 8)
    slab = stretto.parallel.scatter(x, mesh)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Unfold(2))

        def forward(self, x):
            return self.inner(x)

    class Sorted(nn.Module):
        def forward(self, x):
            return x.sort(dim=2)

    prepared = stretto.parallel.spatial(nn.Sequential(nn.Conv2d(2, 2, 1)), mesh)
    attempts = [
        lambda: stretto.parallel.scatter(torch.randn(1, 2, 1, 8), mesh),
        lambda: stretto.parallel.spatial(nn.Conv2d(2, 2, 5, stride=8, padding=1), mesh)(slab),
        lambda: stretto.parallel.spatial(Odd(), mesh)(slab),
        lambda: stretto.parallel.spatial(Sorted(), mesh)(slab),
        lambda: stretto.parallel.spatial(nn.Sequential(nn.ReLU(), nn.SyncBatchNorm(2)), mesh),
        lambda: stretto.parallel.spatial(prepared, mesh),
        lambda: prepared(x[:, :, : 3 + 2 * dist.get_rank()]),
        lambda: stretto.parallel.spatial(nn.MaxPool2d(2, return_indices=True), mesh)(slab),
        lambda: stretto.parallel.spatial(nn.ReLU(), init_device_mesh("cpu", (2,), mesh_dim_names=("data",))),
        lambda: stretto.parallel.spatial(nn.Conv1d(2, 2, 1), mesh)(torch.randn(1, 2, 4)),
        lambda: stretto.parallel.spatial(nn.LayerNorm([2, 8, 8]), mesh)(slab),
        lambda: stretto.parallel.spatial(nn.ReflectionPad2d(8), mesh)(slab),
    ]
    messages = []
    for attempt in attempts:
        with pytest.raises(stretto.UsageError) as caught:
            attempt()
        messages.append(str(caught.value))
    end()
    return messages
