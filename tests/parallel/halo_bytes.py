"""Bytes of rows that processes with slabs really send, in a forward and in a backward."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import stretto
from stretto.parallel.operator.axis import Axis
from stretto.parallel.space import convolution
from stretto.parallel.space.exchange import Transit


def conv(kernel, **options):
    return [nn.Conv2d(2, 3, kernel, **options)]


def pool(kernel, kind="Max", **options):
    return [nn.Conv2d(2, 3, 1), getattr(nn, f"{kind}Pool2d")(kernel, **options)]


NETWORKS = {
    "kernel 1": lambda: conv(1),
    "kernel 3": lambda: conv(3, padding=1),
    "kernel 5": lambda: conv(5, padding=2),
    "kernel 7": lambda: conv(7, padding=3),
    "3 x 5": lambda: conv((3, 5), padding=(1, 2)),
    "no padding": lambda: conv(5),
    "same, even": lambda: conv(4, padding="same"),
    "stride 2": lambda: conv(3, stride=2, padding=1),
    "stride 2, kernel 1": lambda: conv(1, stride=2),
    "stride 3, kernel 7": lambda: conv(7, stride=3, padding=2),
    "dilation 2": lambda: conv(3, dilation=2, padding=2),
    "dilation (3, 1)": lambda: conv(3, dilation=(3, 1), padding=(3, 1)),
    "groups": lambda: [nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.Conv2d(4, 4, 3, padding=1, groups=4)],
    "transposed": lambda: [nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), nn.Conv2d(3, 2, 1)],
    "pool 2": lambda: pool(2),
    "pool 3, stride 2": lambda: pool(3, stride=2, padding=1),
    "pool, ceil": lambda: pool(3, stride=2, ceil_mode=True),
    "pool, dilation": lambda: pool(3, stride=1, dilation=2, padding=1),
    "average": lambda: pool(3, "Avg", stride=1, padding=1),
    "average of all": lambda: pool((13, 11), "Avg"),
    "adaptive": lambda: pool(4, "AdaptiveAvg"),
    "adaptive maximum of all": lambda: pool(1, "AdaptiveMax"),
    "adaptive average of all": lambda: [*pool(1, "AdaptiveAvg"), nn.Conv2d(3, 3, 1)],
    "several": lambda: [
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 5, padding=2, stride=2)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(6, 2, 3, padding=2, dilation=2)),
    ],
}  # fmt: skip
FEW = (
    "3 x 5", "same, even", "stride 3, kernel 7", "dilation (3, 1)", "groups", "transposed", "pool, ceil",
    "average of all", "adaptive", "several",
)  # fmt: skip
GRIDS = {(2, 1): "height", (1, 2): "width"}
SHARES = {1 / 32: [*GRIDS], 1.0: [(2, 1)]}  # at 1.0 halos are added afterwards wherever they can be
SHAPE = (3, 2, 13, 11)


CHANNELS = {
    "pair": lambda: [
        nn.Conv2d(2, 4, 3, padding=1), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 5, padding=2)),
    ],
    "single": lambda: [nn.Conv2d(2, 4, 3, padding=1), nn.Softmax(1)],
    "pools": lambda: [
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(3, 1, 1), nn.Conv2d(4, 4, 3, padding=1)),
        nn.Sequential(nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(8, 4),
    ],
}  # fmt: skip
EVEN = (3, 2, 12, 8)


LARGE = (4, 3, 64, 64)


def large():
    return [
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1), nn.ReLU()),
    ]


def kept(module, x):
    """The bytes of the storages that a forward keeps for its backward, without weights."""
    weights, sizes = {weight.untyped_storage().data_ptr() for weight in module.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(x)
    assert output.requires_grad
    return sum(sizes.values())


def sent_of_channels():
    """What this one of 2 x 2 processes sends of networks whose channels are cut, too: {network: (rows, channels)}.

    Each is the bytes of the forward and those of the backward; of exchanged channels, those of whole activations. Then,
    of a larger network, what a process keeps.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "height"))
    rows, channels, found = [], [], {}
    start, add, join = Transit.__init__, Axis.sum, Axis.join

    def starting(self, grid, sends, receives):
        rows.append(sum(tensor.nbytes for _, tensor in sends))
        start(self, grid, sends, receives)

    def adding(self, x):
        channels.append(x.nbytes)
        return add(self, x)

    def joining(self, x, dim, sizes):
        whole = join(self, x, dim, sizes)
        channels.append(whole.nbytes)
        return whole

    Transit.__init__, Axis.sum, Axis.join = starting, adding, joining
    for name, build in CHANNELS.items():
        module = cut_both_ways(build(), mesh)
        output = module(stretto.parallel.scatter(torch.randn(EVEN), mesh))
        forward = sum(rows), sum(channels)
        output.sum().backward()
        found[name] = [(ahead, sum(both) - ahead) for ahead, both in zip(forward, (rows, channels), strict=True)]
        rows.clear()
        channels.clear()
    held = kept(cut_both_ways(large(), mesh), stretto.parallel.scatter(torch.randn(LARGE), mesh))
    dist.barrier()
    dist.destroy_process_group()
    return found, held


def cut_both_ways(layers, mesh):
    return stretto.parallel.spatial(stretto.parallel.tensor(nn.Sequential(*layers), mesh, parameters="local"), mesh)


def sent(names):
    """{(network, grid, halos afterwards): (bytes of the forward, bytes of the backward) that this process sends}."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    meshes = {grid: init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)) for grid, axis in GRIDS.items()}
    counted, found, start = [], {}, Transit.__init__

    def counting(self, grid, sends, receives):
        counted.append(sum(tensor.numel() * tensor.element_size() for _, tensor in sends))
        start(self, grid, sends, receives)

    Transit.__init__ = counting
    for share, grids in SHARES.items():
        convolution.MAX_TOUCHED_SHARE = share
        for name in names:
            for grid in grids:
                mesh = meshes[grid]
                module = stretto.parallel.spatial(nn.Sequential(*NETWORKS[name]()), mesh)
                slab = stretto.parallel.scatter(torch.randn(SHAPE), mesh)
                counted.clear()
                output = module(slab)
                forward = sum(counted)
                counted.clear()
                output.sum().backward()
                found[name, grid, share] = (forward, sum(counted))
    dist.barrier()
    dist.destroy_process_group()
    return found
