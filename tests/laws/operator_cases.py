"""Cases of the law of operator parallelism: convolutions cut by channels, and what each process does with them."""

import copy
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import stretto
from stretto.parallel.operator.piece import pieces

SIZES = (2, 3, 4)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


@dataclass(frozen=True)
class Case:
    """Layers in a row, each a name and its options; the image's shape; how many processes; what the user says."""

    layers: tuple[tuple[str, dict[str, Any]], ...] = field(hash=False)
    shape: tuple[int, ...]
    size: int
    plan: dict[str, str] = field(hash=False, default_factory=dict)

    def module(self):
        torch.default_generator.manual_seed(0)  # torch.manual_seed takes longer than most modules
        made = nn.Sequential(*(getattr(nn, name)(**options) for name, options in self.layers)).double()
        for part in made.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm | nn.GroupNorm) and part.weight is not None:
                nn.init.normal_(part.weight)
                nn.init.normal_(part.bias)
        return made


def per_dim(draw, count, low, high):
    return tuple(draw(st.integers(low, high)) for _ in range(count))


def image(draw, count, channels):
    return (draw(st.integers(1, 2)), channels, *per_dim(draw, count, 3, 7 if count < 3 else 5))


def convolution(draw, count, inputs, outputs, groups=1):
    kernel, dilation = per_dim(draw, count, 1, 3), per_dim(draw, count, 1, 2)
    options = {
        "in_channels": inputs, "out_channels": outputs, "kernel_size": kernel, "dilation": dilation, "groups": groups,
        "stride": per_dim(draw, count, 1, 2), "padding": per_dim(draw, count, 1, 2), "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(("zeros", "zeros", "reflect", "replicate", "circular"))),
    }  # fmt: skip
    return f"Conv{count}d", options


@st.composite
def singles(draw, count):
    """One convolution: by outputs, by inputs, or left to the planner; channels that divide and channels that do not."""
    inputs, outputs = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    size = draw(st.sampled_from(SIZES))
    style = draw(st.sampled_from(("column", "row", None)))
    if style == "column":
        outputs = max(outputs, size)
    if style == "row":
        inputs = max(inputs, size)
    layer = convolution(draw, count, inputs, outputs)
    return Case((layer,), image(draw, count, inputs), size, {} if style is None else {"0": style})


@st.composite
def grouped(draw, count):
    groups, size = draw(st.integers(2, 5)), draw(st.sampled_from(SIZES))
    inputs, outputs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    return Case((convolution(draw, count, inputs, outputs, groups),), image(draw, count, inputs), size)


@st.composite
def pairs(draw, count):
    """By outputs, then what works on channels alone, then by inputs; and a third by itself."""
    inputs, middle, outputs = (draw(st.integers(2, 7)) for _ in range(3))
    size = draw(st.sampled_from(SIZES))
    norm = {"num_features": middle, "momentum": draw(st.sampled_from((0.1, None))), "affine": draw(st.booleans())}
    norms = {
        "none": (), "batch": ((f"BatchNorm{count}d", norm),),
        "group": (("GroupNorm", {"num_groups": middle, "num_channels": middle}),),
        "all": (("GroupNorm", {"num_groups": 1, "num_channels": middle}),),
        "instance": ((f"InstanceNorm{count}d", {"num_features": middle, "affine": True}),),
    }  # fmt: skip
    between = norms[draw(st.sampled_from(sorted(norms)))]
    activation = draw(st.sampled_from((("ReLU", {"inplace": True}), ("GELU", {}), ("Softmax", {"dim": 1}))))
    depthwise = (convolution(draw, count, middle, middle, middle),) if draw(st.booleans()) else ()
    last = convolution(draw, count, middle, outputs)
    layers = (convolution(draw, count, inputs, middle), *between, activation, *depthwise, last)
    return Case((*layers, ("ReLU", {"inplace": True})), image(draw, count, inputs), size)


@st.composite
def classifiers(draw):
    """Images that become features: the channels of a flattened image are cut as they were."""
    middle, size = draw(st.integers(2, 7)), draw(st.sampled_from(SIZES))
    side = draw(st.sampled_from((1, 2)))
    layers = (
        convolution(draw, 2, 3, middle), ("BatchNorm2d", {"num_features": middle}), ("ReLU", {"inplace": True}),
        ("AdaptiveAvgPool2d", {"output_size": side}), ("Flatten", {}),
        ("Linear", {"in_features": middle * side**2, "out_features": draw(st.integers(1, 6))}),
    )  # fmt: skip
    return Case(layers, (2, 3, *per_dim(draw, 2, 4, 7)), size)


def possible(case):
    """Whether torch takes a case: reflection needs a larger image, a norm more than one value."""
    try:
        out = case.module()(torch.zeros(case.shape, dtype=torch.float64))
    except (RuntimeError, ValueError):
        return False
    return out.numel() > 0


def mesh_of(size):
    """A mesh with a data axis of 1 or 2 beside the tensor axis; a process that has no part gets None."""
    data = dist.get_world_size() // size
    mesh = DeviceMesh("cpu", torch.arange(data * size).reshape(data, size), mesh_dim_names=("data", "tensor"))
    return mesh if dist.get_rank() < data * size else None


def turns(mesh, things):
    """This replica's share of what any of them can do alone."""
    return things[mesh.get_local_rank("data") :: mesh.size(0)]


def law(cases):
    """Check the cases in which this process has a part; how much of each, by its number, was cut.

    Where there are two replicas, each takes every other case of its size.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    meshes = {size: mesh_of(size) for size in SIZES}
    own = [
        number
        for size, mesh in meshes.items()
        if mesh is not None
        for number in turns(mesh, [number for number, case in enumerate(cases) if case.size == size])
    ]
    cut = {}
    for number in sorted(own):
        case = cases[number]
        x = torch.randn(case.shape, dtype=torch.float64)
        try:
            cut[number] = check(case.module(), x, meshes[case.size], plan=case.plan)
        except Exception as error:
            raise AssertionError(f"{case}") from error
    dist.barrier()
    dist.destroy_process_group()
    return cut


def check(reference, x, mesh, **options):
    """Compare output, input gradient, weight gradients and buffers with the plain module's; how much was cut."""
    module = stretto.parallel.tensor(copy.deepcopy(reference), mesh, **options)
    torch.default_generator.manual_seed(1)
    floating = x.is_floating_point()
    x = torch.randn_like(x).requires_grad_() if floating else x
    mine = x.detach().clone().requires_grad_(floating)
    wanted = reference(x)
    weight = torch.randn_like(wanted)
    (wanted * weight).sum().backward()
    out = module(mine)
    assert type(out) is torch.Tensor
    (out * weight).sum().backward()
    torch.testing.assert_close(out, wanted, **TOLERANCE)
    torch.testing.assert_close(mine.grad, x.grad, **TOLERANCE)
    return same(module, reference)


def same(module, reference):
    """Compare what this process holds of parameters, gradients and buffers; how many of them are parts."""
    cut = dict(pieces(module))
    own, right = (dict(each.state_dict(keep_vars=True)) for each in (module, reference))
    assert own.keys() == right.keys()
    for name, mine in own.items():
        whole = right[name]
        close(name, local(mine), part(mine, whole, cut.get(name)))
        assert (mine.grad is None) == (whole.grad is None), name
        if whole.grad is not None:
            close(f"gradient of {name}", local(mine.grad), part(mine, whole.grad, cut.get(name)))
    return len(cut) + sum(is_dtensor(mine) for mine in own.values())


def close(what, own, right):
    torch.testing.assert_close(own, right, **TOLERANCE, msg=lambda text: f"{what}: {text}")


def is_dtensor(tensor):
    from torch.distributed.tensor import DTensor  # half a second, which the processes that only collect can spare

    return isinstance(tensor, DTensor)


def local(tensor):
    return tensor.to_local() if is_dtensor(tensor) else tensor


def part(mine, whole, piece):
    """What a process should hold of a tensor."""
    if not is_dtensor(mine):
        return whole if piece is None else piece.of(whole.detach())
    (placement,) = mine.placements
    return (
        whole.chunk(mine.device_mesh.size(), placement.dim)[mine.device_mesh.get_local_rank()]
        if placement.is_shard()
        else whole
    )
