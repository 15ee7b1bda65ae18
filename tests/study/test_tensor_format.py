"""Dtypes and memory formats of networks without data: what they change, what they leave alone, and refusals."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from stretto.cli.planning import format_of
from stretto.cost.cluster_file import find_cluster
from stretto.cost.collective import TENSOR_SUM
from stretto.cost.layer_table import Affine
from stretto.errors import UsageError
from stretto.measure.layer_flops import layer_costs
from stretto.settings.planning import PlanSettings
from stretto.settings.runs import TrainSettings
from stretto.study.model_costs import DTYPES, CostRequest, TensorFormat, costed

PATCHES = {"depth": 1, "width": 16, "heads": 2, "patch": 8, "side": 16, "classes": 10}
TOKENS, WIDTH = 5, 16  # of those patches

A100 = find_cluster("8-a100")


def counted(name, options, dtype="float32", memory_format="contiguous", **more):
    asked = CostRequest(heads=(), format=TensorFormat(dtype, memory_format), **more)
    return costed(TrainSettings(model=name, model_options=options, optimizer="sgd"), asked)


def kernels(row):
    return [(work.operator, kernel) for kind in "FB" for work in row.works(kind) for kernel in work.kernels]


def test_channels_last_differs_by_transposes_and_by_how_norms_and_pools_run():
    def row(memory_format):
        layers = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3))]
        return layer_costs(*TensorFormat("float16", memory_format).converted(layers, torch.randn(2, 3, 12, 12), "cnn"))

    plain, last = (row(memory_format).layers[0] for memory_format in ("contiguous", "channels_last"))
    assert any(kernel.transposes for _, kernel in kernels(plain))
    assert not any(kernel.transposes for _, kernel in kernels(last))
    blocks = [{kernel.blocks for name, kernel in kernels(each) if name == "batch-norm"} for each in (plain, last)]
    assert blocks == [{4}, {0}]  # one for each channel of contiguous images
    ours = {"transposed": Affine(), "transposes": 0, "numbers": Affine(), "blocks": 0}
    without = [{(name, replace(kernel, **ours)) for name, kernel in kernels(each)} for each in (plain, last)]
    assert without[0] == without[1]
    assert (plain.activation, plain.output, plain.parameters) == (last.activation, last.output, last.parameters)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(self.inner(x))


def test_autocast_keeps_weights_and_a_residual_stream_in_float32():
    layers, x = TensorFormat("float16-autocast").converted([Residual()], torch.randn(2, TOKENS, WIDTH), "one block")
    plain, cast = (layer_costs(layers, x, autocast=each).layers[0] for each in (None, torch.float16))
    assert (plain.parameter_bytes, plain.gradient_bytes) == (cast.parameter_bytes, cast.gradient_bytes)
    assert all(plain.flops(kind) == cast.flops(kind) for kind in "FBIW")
    assert (cast.input.at(3), cast.output.at(3)) == (3 * TOKENS * WIDTH * 4,) * 2
    assert cast.activation.at(3) < plain.activation.at(3), "what is kept of products has 16 bits"


@pytest.mark.slow
def test_autocast_keeps_weights_and_products_and_a_residual_stream_of_a_network_in_float32():
    plain, cast = counted("vit", PATCHES), counted("vit", PATCHES, "float16-autocast", sharing=(2,))
    assert (cast.costs.dtype, plain.costs.dtype) == ("float16-autocast", "float32")
    for here, there in zip(plain.costs.layers, cast.costs.layers, strict=True):
        assert (here.parameter_bytes, here.gradient_bytes) == (there.parameter_bytes, there.gradient_bytes)
        assert all(here.flops(kind) == there.flops(kind) for kind in "FBIW")
    block = cast.costs.layers[1]
    assert (block.input.at(3), block.output.at(3)) == (3 * TOKENS * WIDTH * 4,) * 2
    sums = next(work for work in cast.tensor_costs[2].layers[1].forward_exchanges if work.operator == TENSOR_SUM)
    assert (
        sums.bytes.at(3) == 2 * 3 * TOKENS * WIDTH * 2
    )  # two products in 16 bits, before they are added to the stream


def test_types_of_weights_and_of_products():
    found = {dtype: (TensorFormat(dtype).weights, TensorFormat(dtype).autocast) for dtype in DTYPES}
    assert found == {
        "float32": (torch.float32, None), "tfloat32": (torch.float32, None),
        "bfloat16": (torch.bfloat16, None), "float16": (torch.float16, None),
        "bfloat16-autocast": (torch.float32, torch.bfloat16), "float16-autocast": (torch.float32, torch.float16),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "cnn", "memory_format": "channels_last"}, "stretto train takes tensors as the module has them"),
        ({"model": "cnn", "dtype": "float16"}, "as stretto train --precision float32 trains it"),
        ({"model": "vit", "memory_format": "NHWC"}, "memory_format"),
        ({"model": "vit", "dtype": "float16-amp"}, "float16-autocast"),
    ],
)
def test_formats_that_cannot_be_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        format_of(PlanSettings(**options), A100)


def test_channels_last_is_refused_without_images():
    sizes = {"depth": 1, "width": 16, "heads": 2, "context": 8, "vocabulary": 20}
    with pytest.raises(UsageError, match="network 'decoder' takes no images"):
        counted("decoder", sizes, memory_format="channels_last")
    assert {format_of(PlanSettings(model="vit", dtype=dtype), A100).dtype for dtype in DTYPES} == set(DTYPES)
    usual = [format_of(PlanSettings(model=model), A100) for model in ("vit", "cnn")]
    assert usual == 2 * [TensorFormat("bfloat16")]
    assert format_of(PlanSettings(model="vit"), find_cluster("8-v100")) == TensorFormat("float16")
