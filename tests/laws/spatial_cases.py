"""Cases of the law of spatial parallelism, and what each process does with them."""

import copy
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import stretto
from laws.operator_cases import turns
from stretto.parallel.space import convolution

GRIDS = ((2, 1), (1, 2), (2, 2), (3, 1), (1, 4))
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


@dataclass(frozen=True)
class Case:
    """A module, the image's shape, and the grid (height, width) that it is cut by."""

    layer: str
    options: dict[str, Any] = field(hash=False)
    shape: tuple[int, ...]
    grid: tuple[int, int]

    def module(self):
        torch.manual_seed(0)
        return getattr(nn, self.layer)(**self.options).double()


def per_dim(draw, count, low, high):
    return tuple(draw(st.integers(low, high)) for _ in range(count))


def image(draw, grid, count, channels, low=6, high=13):
    return (draw(st.integers(1, 2)), channels, *per_dim(draw, count, low, high))


def grids(count):
    return st.sampled_from([(1, 2), (1, 4)] if count == 1 else GRIDS)


@st.composite
def convolutions(draw, count=2):
    groups = draw(st.sampled_from((1, 1, 2)))
    kernel, dilation = per_dim(draw, count, 1, 5), per_dim(draw, count, 1, 2)
    same = draw(st.integers(0, 4)) == 0
    options = {
        "in_channels": 2 * groups, "out_channels": groups * draw(st.integers(1, 2)), "kernel_size": kernel,
        "stride": 1 if same else per_dim(draw, count, 1, 3), "dilation": dilation, "groups": groups,
        "padding": "same" if same else per_dim(draw, count, 0, 3), "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(("zeros", "zeros", "zeros", "reflect", "replicate", "circular"))),
    }  # fmt: skip
    grid = draw(grids(count))
    return Case(f"Conv{count}d", options, image(draw, grid, count, 2 * groups), grid)


@st.composite
def centred(draw, count=2):
    """Odd kernels around their pixel, over sizes that divide or nearly do: what networks are made of."""
    groups, stride = draw(st.sampled_from((1, 1, 2))), draw(st.sampled_from((1, 1, 1, 2)))
    kernel = tuple(draw(st.sampled_from((1, 3, 3, 5))) for _ in range(count))
    dilation = per_dim(draw, count, 1, 2)
    options = {
        "in_channels": 2 * groups, "out_channels": 2 * groups, "kernel_size": kernel, "stride": stride,
        "dilation": dilation, "groups": groups, "bias": draw(st.booleans()),
        "padding": tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)),
    }  # fmt: skip
    grid = draw(grids(count))
    return Case(f"Conv{count}d", options, image(draw, grid, count, 2 * groups, 8, 16), grid)


@st.composite
def transposed(draw, count=2):
    stride, dilation = per_dim(draw, count, 1, 3), per_dim(draw, count, 1, 2)
    kernel = per_dim(draw, count, 1, 4)
    most = [max(t, d) - 1 for t, d in zip(stride, dilation, strict=True)]
    options = {
        "in_channels": 2, "out_channels": 2, "kernel_size": kernel, "stride": stride, "dilation": dilation,
        "padding": per_dim(draw, count, 0, 2), "groups": draw(st.sampled_from((1, 2))), "bias": draw(st.booleans()),
        "output_padding": tuple(draw(st.integers(0, each)) for each in most),
    }  # fmt: skip
    grid = draw(grids(count))
    return Case(f"ConvTranspose{count}d", options, image(draw, grid, count, 2, 4, 9), grid)


@st.composite
def max_pools(draw, count=2):
    kernel = per_dim(draw, count, 1, 4)
    options = {
        "kernel_size": kernel, "stride": per_dim(draw, count, 1, 3), "dilation": per_dim(draw, count, 1, 2),
        "padding": tuple(draw(st.integers(0, each // 2)) for each in kernel), "ceil_mode": draw(st.booleans()),
    }  # fmt: skip
    grid = draw(grids(count))
    return Case(f"MaxPool{count}d", options, image(draw, grid, count, 2), grid)


@st.composite
def average_pools(draw, count=2):
    kernel = per_dim(draw, count, 1, 4)
    options = {
        "kernel_size": kernel, "stride": per_dim(draw, count, 1, 3), "ceil_mode": draw(st.booleans()),
        "padding": tuple(draw(st.integers(0, each // 2)) for each in kernel), "count_include_pad": draw(st.booleans()),
    }  # fmt: skip
    if count > 1:
        options["divisor_override"] = draw(st.sampled_from((None, None, 3)))
    grid = draw(grids(count))
    return Case(f"AvgPool{count}d", options, image(draw, grid, count, 2), grid)


@st.composite
def adaptive_pools(draw, count=2):
    kind = draw(st.sampled_from(("Avg", "Max")))
    size = draw(st.sampled_from((1, None)))
    options = {"output_size": size or per_dim(draw, count, 4, 7)}
    grid = draw(grids(count))
    return Case(f"Adaptive{kind}Pool{count}d", options, image(draw, grid, count, 2), grid)


@st.composite
def norms(draw):
    layer = draw(st.sampled_from(("BatchNorm2d", "GroupNorm", "InstanceNorm2d", "BatchNorm3d", "BatchNorm1d")))
    options = {
        "GroupNorm": {"num_groups": 2, "num_channels": 4},
        "InstanceNorm2d": {"num_features": 4, "affine": True, "track_running_stats": draw(st.booleans())},
    }.get(layer, {"num_features": 4, "affine": draw(st.booleans()), "momentum": draw(st.sampled_from((0.1, None)))})
    count = {"1": 1, "3": 3}.get(layer[-2], 2)
    grid = draw(grids(count))
    return Case(layer, options, image(draw, grid, count, 4, 4, 9), grid)


@st.composite
def resamplings(draw, count=2):
    mode = draw(st.sampled_from(("nearest", "nearest-exact", "bilinear", "bicubic")))
    size = draw(st.booleans())
    options = {
        "mode": mode, "align_corners": draw(st.booleans()) if mode.startswith("bi") else None,
        "size": per_dim(draw, count, 4, 20) if size else None,
        "scale_factor": None if size else draw(st.sampled_from((2, 3, 1.5, (2.0, 0.7)))),
    }  # fmt: skip
    return Case("Upsample", options, image(draw, grid := draw(grids(2)), count, 2), grid)


@st.composite
def paddings(draw):
    layer = draw(
        st.sampled_from(("ZeroPad2d", "ConstantPad2d", "ReflectionPad2d", "ReplicationPad2d", "CircularPad2d"))
    )
    low = -2 if layer == "ConstantPad2d" else 0
    options = {"padding": per_dim(draw, 4, low, 4)} | ({"value": 1.5} if layer == "ConstantPad2d" else {})
    return Case(layer, options, image(draw, grid := draw(grids(2)), 2, 2), grid)


@st.composite
def shuffles(draw):
    layer = draw(st.sampled_from(("PixelShuffle", "PixelUnshuffle")))
    shape = (1, 8, *per_dim(draw, 2, 4, 7)) if layer == "PixelShuffle" else (1, 2, 8, 12)
    option = "upscale_factor" if layer == "PixelShuffle" else "downscale_factor"
    return Case(layer, {option: 2}, shape, draw(grids(2)))


def possible(case):
    """Whether torch takes a case: a kernel may be larger than its image, or padding larger than what it reflects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that "same" with an even kernel copies its input
        try:
            out = case.module()(torch.zeros(case.shape, dtype=torch.float64))
        except RuntimeError:
            return False
    return out.numel() > 0


def mesh_of(grid):
    """A mesh with a data axis of 1 or 2 beside height and width; a process that has no part gets None."""
    number = grid[0] * grid[1]
    data = dist.get_world_size() // number
    ranks = torch.arange(data * number).reshape(data, *grid)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("data", "height", "width"))
    return mesh if dist.get_rank() < data * number else None


def law(cases):
    """Check the cases in which this process has a part.

    Returns, by a case's number, whether it could be compared, and whether halos were added afterwards. Where there are
    two replicas, each takes every other case of its grid.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    meshes = {grid: mesh_of(grid) for grid in GRIDS}
    own = [
        number
        for grid, mesh in meshes.items()
        if mesh is not None
        for number in turns(mesh, [number for number, case in enumerate(cases) if case.grid == grid])
    ]
    checked = {}
    for number in sorted(own):
        case = cases[number]
        mesh, added = meshes[case.grid], []
        if len(case.shape) == 3:
            mesh = mesh["width"]
        try:
            compared = check(case, mesh)
            if case.layer.startswith("Conv") and "Transpose" not in case.layer:
                check_added(case, mesh, added)
        except Exception as error:
            raise AssertionError(f"{case}") from error
        checked[number] = compared, bool(added)
    dist.barrier()
    dist.destroy_process_group()
    return checked


def check_added(case, mesh, added):
    """Once more, with halos added afterwards wherever that is possible and not only where they are thin."""
    strip_buffer = convolution.strip_buffer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "MAX_TOUCHED_SHARE", 1.0)
        patch.setattr(convolution, "strip_buffer", lambda *args: added.append(case) or strip_buffer(*args))
        check(case, mesh)


def check(case, mesh):
    """Compare output, input gradient and weight gradients with the plain module's; False where a slab is empty."""
    reference = case.module()
    module = stretto.parallel.spatial(copy.deepcopy(reference), mesh)
    torch.manual_seed(1)
    x = torch.randn(case.shape, dtype=torch.float64, requires_grad=True)
    wanted = reference(x)
    slab = stretto.parallel.scatter(x.detach(), mesh).requires_grad_()
    spatial_dims = len(case.shape) - 2
    parts = case.grid[1:] if spatial_dims == 1 else case.grid
    rows = wanted.shape[-len(parts) :]
    replicated = all(size == 1 or count == 1 for size, count in zip(rows, parts, strict=True)) and "Pool" in case.layer
    if not replicated and any(size < count for size, count in zip(rows, parts, strict=True)):
        with pytest.raises(stretto.UsageError, match="would have none"):
            module(slab)
        return 0
    weight = torch.randn_like(wanted)
    (wanted * weight).sum().backward()
    mine = module(slab)
    assert type(mine) is torch.Tensor
    (mine * (weight if replicated else part_of(weight, mesh))).sum().backward()
    torch.testing.assert_close(mine, wanted if replicated else part_of(wanted, mesh), **TOLERANCE)
    torch.testing.assert_close(slab.grad, part_of(x.grad, mesh), **TOLERANCE)
    for (name, own), right in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, right.grad, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(dict(module.named_buffers()), dict(reference.named_buffers()), **TOLERANCE)
    return 1


def part_of(image, mesh):
    """This process's part, by torch.tensor_split."""
    for axis, dim in (("height", -2), ("width", -1)):
        if axis in mesh.mesh_dim_names:
            image = image.tensor_split(mesh[axis].size(), dim)[mesh.get_local_rank(axis)]
    return image
