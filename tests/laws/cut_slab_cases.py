"""Cases of the law of tensor and space together, and what each of four processes does with them."""

import copy
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import stretto
from laws import operator_cases
from laws.operator_cases import per_dim, same
from laws.spatial_cases import part_of

TENSOR = 2
GRIDS = ((2, 1), (1, 2))
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


@dataclass(frozen=True)
class Case:
    """Layers that a tensor axis of two cuts, the image's shape, the grid that cuts it, and whose linear layers."""

    layers: operator_cases.Case
    shape: tuple[int, ...]
    grid: tuple[int, int]
    options: dict[str, Any] = field(hash=False)

    def module(self):
        return self.layers.module()


@st.composite
def of(draw, strategy):
    """A case of the tensor axis on images of several rows."""
    layers = draw(strategy)
    shape = (2, layers.shape[1], *per_dim(draw, 2, 6, 11))
    options = {"plan": layers.plan, "parameters": draw(st.sampled_from(("local", "dtensor")))}
    return Case(layers, shape, draw(st.sampled_from(GRIDS)), options)


@st.composite
def flattened(draw):
    """Features of a whole image, ordered by channel: gathered from slabs, each process's channels alone."""
    middle, sides = draw(st.integers(2, 5)), per_dim(draw, 2, 4, 6)
    layers = (
        ("Conv2d", {"in_channels": 3, "out_channels": middle, "kernel_size": 3, "padding": 1}),
        ("ReLU", {}), ("Flatten", {}),
        ("Linear", {"in_features": middle * sides[0] * sides[1], "out_features": draw(st.integers(1, 6))}),
    )  # fmt: skip
    made = operator_cases.Case(layers, (2, 3, *sides), TENSOR)
    return Case(made, made.shape, draw(st.sampled_from(GRIDS)), {})


def two(strategy):
    """The cases for two processes."""
    return strategy.filter(lambda case: case.size == TENSOR)


def convolutions():
    return of(two(operator_cases.singles(2)) | two(operator_cases.grouped(2)))


def pairs():
    return of(two(operator_cases.pairs(2)))


def classifiers():
    return of(two(operator_cases.classifiers())) | flattened()


def possible(case):
    """Whether torch takes a case, and every process has a row of each image."""
    rows, module = [], case.module()
    for layer in module:
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda layer, args, out: rows.append(out.shape[2:][case.grid.index(2)]))
    try:
        module(torch.zeros(case.shape, dtype=torch.float64))
    except (RuntimeError, ValueError):
        return False
    return min(rows) >= 2


def law(cases):
    """Check all cases; by number, how many parameters and buffers were cut."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    meshes = {grid: init_device_mesh("cpu", (2, *grid), mesh_dim_names=("tensor", "height", "width")) for grid in GRIDS}
    cut = []
    for case in cases:
        try:
            cut.append(check(case.module(), case.shape, meshes[case.grid], **case.options))
        except Exception as error:
            raise AssertionError(f"{case}") from error
    dist.barrier()
    dist.destroy_process_group()
    return cut


def check(reference, shape, mesh, **options):
    """Compare output, input gradient, weight gradients and buffers with the plain module's; how much was cut."""
    module = stretto.parallel.spatial(stretto.parallel.tensor(copy.deepcopy(reference), mesh, **options), mesh)
    torch.default_generator.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    slab = stretto.parallel.scatter(x.detach(), mesh).requires_grad_()
    wanted = reference(x)
    weight = torch.randn_like(wanted)
    (wanted * weight).sum().backward()
    mine = lambda image: part_of(image, mesh) if wanted.ndim > 2 else image  # noqa: E731
    out = module(slab)
    assert type(out) is torch.Tensor
    (out * mine(weight)).sum().backward()
    torch.testing.assert_close(out, mine(wanted), **TOLERANCE)
    torch.testing.assert_close(slab.grad, part_of(x.grad, mesh), **TOLERANCE)
    return same(module, reference)
