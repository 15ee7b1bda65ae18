"""Autocast as on CUDA: torch's lists, torch's own autocast where the lists of a CPU agree, bytes by hand, and laws."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C import _dispatch_get_all_op_names as all_names
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel

from stretto.errors import UsageError
from stretto.measure import gpu_autocast as own
from stretto.measure.gpu_autocast import GpuAutocast
from stretto.measure.layer_flops import layer_costs

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
MACROS = {"LOWER_PRECISION_FP": own.SIXTEEN_BITS, "FP32": own.FLOAT32, "FP32_SET_OPT_DTYPE": own.FLOAT32_RESULT,
          "PROMOTE": own.WIDEST}  # fmt: skip
BESIDE = {"cudnn_convolution", "cudnn_convolution_transpose", "linalg_matrix_sqrth"}  # listed in autocast_mode.cpp


def test_every_operator_that_this_torch_casts_on_cuda_is_in_one_list():
    listed = Counter(" ".join([*MACROS.values(), own.NORMS, own.REFUSED]).split())
    cast = {name.removeprefix("aten::") for name in all_names() if has_kernel(name, "AutocastCUDA")}
    assert cast - {"_cudnn_rnn"} <= set(listed)  # that is what CUDA has for the cells of a CPU
    assert max(listed.values()) == 1


@pytest.mark.parametrize("macro", MACROS)
def test_the_lists_are_those_of_torchs_header(macro):
    text = HEADER.read_text()
    if f"AT_FORALL_{macro}(" not in text:
        pytest.skip("this torch has its lists in a file that it does not come with")
    body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)+.*)", text).group(1)
    names = [".".join(re.split(r",\s*", name)) for name in re.findall(r"_\(([^)]*)\)", body)]
    assert names
    assert set(names) <= set(MACROS[macro].split())
    assert set(MACROS[macro].split()) - set(names) - BESIDE <= {"rms_norm", "_convolution.deprecated"}


def ran(context, layers, x):
    """What the forward of layers and its backward run, with the types of the operands."""
    seen = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func._schema.name, *(t.dtype for t in args if isinstance(t, torch.Tensor))))
            return func(*args, **(kwargs or {}))

    layers.zero_grad()
    with Names():
        with context:
            out = layers(x)
        out.sum().backward()
    return [each for each in seen if each[0] != "prim::device"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_torchs_own_where_the_lists_of_a_cpu_agree(dtype):
    twice = nn.Linear(288, 288)  # cast once
    start = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    layers, x = nn.Sequential(*start, twice, nn.GELU(), twice, nn.Linear(288, 5)), torch.randn(2, 3, 8, 8)
    assert ran(GpuAutocast(dtype), layers, x) == ran(torch.autocast("cpu", dtype), layers, x)


def works(layers, x, kind="F", **options):
    return {work.operator: work for work in layer_costs(layers, x, **options).layers[-1].works(kind)}


def test_bytes_of_a_linear_layer_by_hand():
    linear, x = nn.Linear(6, 10), torch.randn(4, 6)
    row = layer_costs([nn.Identity(), linear], x, autocast=torch.float16).layers[1]
    weights = 60 + 10
    forward = {work.operator: work.bytes.at(3) for work in row.forward}
    assert forward == {
        "elementwise": (4 + 2) * (3 * 6 + weights),  # casts of the input, the weight and the bias
        "linear": 2 * (3 * 6 + weights + 3 * 10),
    }
    products = 2 * (3 * 10 + 60 + 3 * 6) * 2  # of the input's gradient and the weight's
    backward = {work.operator: work.bytes.at(3) for work in row.backward}
    assert backward["linear"] == products
    assert row.activation.at(3) == 2 * 3 * 6 + 2 * 60  # the input and the weight in 16 bits
    assert row.output.at(3) == 2 * 3 * 10
    assert row.input.at(3) == 4 * 3 * 6
    assert (row.parameter_bytes, row.gradient_bytes) == (4 * weights, 4 * weights)


def test_types_of_what_is_handed_on():
    after = {nn.GELU(): 2, nn.LayerNorm(8): 4, nn.Softmax(-1): 4, nn.Softplus(): 4}
    chain = [(layer, item) for module, item in after.items() for layer, item in ((nn.Linear(8, 8), 2), (module, item))]
    costs = layer_costs([layer for layer, _ in chain], torch.randn(2, 4, 8), autocast=torch.bfloat16)
    assert [row.output.at(1) / (4 * 8) for row in costs.layers] == [item for _, item in chain]


@pytest.mark.parametrize("module", [nn.LayerNorm(8), nn.GELU(), nn.BatchNorm1d(8), nn.Softmax(-1), nn.LogSoftmax(-1)])
def test_without_products_it_is_float32(module):
    x = torch.randn(2, 8)
    plain, cast = layer_costs([module], x), layer_costs([module], x, autocast=torch.float16)
    assert plain == cast


def test_softmax_of_float16_is_cast_inside_its_kernel_and_of_bfloat16_before_it():
    def casts(dtype):
        work = works([nn.Linear(8, 8), nn.Softmax(-1)], torch.randn(2, 8), autocast=dtype)
        return work.get("elementwise"), work["transcendental"].bytes.at(1)

    assert casts(torch.float16) == (None, (2 + 4) * 8)
    before, inside = casts(torch.bfloat16)
    assert (before.bytes.at(1), inside) == ((2 + 4) * 8, (4 + 4) * 8)


def test_norms_promotions_and_refusals():
    x, y = torch.randn(3, 4), torch.randn(3, 4).to(torch.bfloat16)
    with GpuAutocast(torch.bfloat16):
        assert torch.norm(y).dtype == torch.linalg.vector_norm(y).dtype == torch.float32
        assert y.norm(dim=1).dtype == y.sum().dtype == y.pow(2).dtype == torch.float32
        assert torch.addcmul(x, y, y).dtype == torch.float32
        assert torch.addcmul(y, y, y).dtype == (x.to(torch.float64) @ x.to(torch.float64).T).to(y.dtype).dtype
        assert y.sum(dtype=torch.bfloat16).dtype == torch.bfloat16
        assert (x @ x.T).dtype == torch.bfloat16
        with pytest.raises(UsageError, match="binary_cross_entropy_with_logits"):
            nn.functional.binary_cross_entropy(x.sigmoid(), x.sigmoid())
    assert (x @ x.T).dtype == y.float().sum().dtype == torch.float32
    assert y.sum().dtype == torch.bfloat16


class Core(nn.Module):
    recompute_selectively = True

    def forward(self, x):
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


@pytest.fixture(scope="module")
def attention():
    """A layer with a part that may be recomputed, an input, and what it costs without."""
    layer, x = nn.Sequential(nn.Linear(8, 8), Core(), nn.Linear(8, 8)), torch.randn(2, 5, 8)
    return layer, x, layer_costs([nn.Identity(), layer], x, autocast=torch.float16).layers[1]


@pytest.mark.parametrize("kind", ["selective", pytest.param("full", marks=pytest.mark.slow)])
def test_what_is_recomputed_is_cast_again(attention, kind):
    layer, x, plain = attention
    again = layer_costs([nn.Identity(), layer], x, autocast=torch.float16, recompute=kind).layers[1]
    part = plain if kind == "full" else layer_costs([layer[0], layer[1]], x, autocast=torch.float16).layers[1]
    assert again.forward == plain.forward
    assert again.activation.at(2) < plain.activation.at(2)

    def moved(row, direction):
        return Counter({work.operator: work.bytes.at(2) for work in getattr(row, direction)})

    assert moved(again, "backward") == moved(plain, "backward") + moved(part, "forward")
