"""Kernels of operators: sizes of products by hand, FLOPs that add up, batch norms read twice, transposed images."""

import copy
from functools import cache

import pytest
import torch
from torch import nn

from stretto.measure.layer_flops import layer_costs

LAST = torch.channels_last


def sizes(work, examples):
    return [tuple(getattr(k.product, key).at(examples) for key in ("number", "rows", "columns", "inner"))
            for k in work.kernels]  # fmt: skip


def works(module, x, kind):
    return {work.operator: work for work in row_above_another(module, x).works(kind)}


@cache
def row_above_another(module, x):
    """All kinds of work at once, of a layer whose input needs a gradient."""
    first = nn.Conv2d(x.shape[1], x.shape[1], 1) if x.dim() == 4 else nn.Identity()
    return layer_costs([first, module], x).layers[1]


def test_products_of_a_linear_layer():
    module, x = nn.Linear(6, 10), torch.randn(4, 5, 6)
    assert sizes(works(module, x, "F")["linear"], 7) == [(1, 7 * 5, 10, 6)]
    weight = row_alone(module, x).works("B")[1]
    assert weight.operator == "linear"
    assert sizes(weight, 7) in ([(1, 10, 6, 7 * 5)], [(1, 6, 10, 7 * 5)])


def test_products_of_a_convolution_and_of_its_gradients():
    module, x = nn.Conv2d(8, 12, 3, padding=1, stride=2, groups=2, bias=False), torch.randn(2, 8, 10, 10)
    assert sizes(works(module, x, "F")["convolution"], 3) == [(2, 3 * 25, 6, 4 * 9)]
    whole = nn.Conv2d(8, 12, 3, padding=1, stride=2, bias=False)
    image = (1, 3 * 100, 8, 12 * 9 // 4)  # pixels, channels, and the positions of a window that meet a pixel
    assert sizes(works(whole, x, "B")["convolution"], 3) == [image, (1, 12, 72, 75)]
    assert sizes(works(whole, x, "I")["convolution"], 3) == [image]


def test_an_images_gradient_multiplies_each_position_of_a_window():
    module, x = nn.Conv2d(4, 6, 5, bias=False), torch.randn(2, 4, 5, 5)  # one pixel of output, of 25
    assert sizes(works(module, x, "F")["convolution"], 3) == [(1, 3, 6, 4 * 25)]
    assert sizes(works(module, x, "I")["convolution"], 3) == [(1, 3 * 25, 4, 6 * 25)]


def test_a_bias_of_a_convolution_is_added_and_summed_by_kernels_of_its_own():
    x, out = torch.randn(2, 4, 6, 6), 3 * 8 * 36 * 4
    biased, bare = (nn.Conv2d(4, 8, 3, padding=1, bias=bias) for bias in (True, False))
    for kind, moved in (("F", 2 * out + 8 * 4), ("B", out)):
        kernels = works(biased, x, kind)["convolution"].kernels
        assert [k.bytes.at(3) for k in kernels if k.product is None] == [moved]
        alone = works(bare, x, kind)["convolution"].kernels
        assert all(kernel.product for kernel in alone)


def test_kernels_add_up_to_their_operators():
    module = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    x = torch.randn(2, 4, 8, 8)
    for kind in "FBIW":
        for operator, work in works(module, x, kind).items():
            assert sum(k.count * k.flops.at(5) for k in work.kernels) == work.flops.at(5)
            if operator not in ("batch-norm", "convolution"):
                assert sum(k.count * k.bytes.at(5) for k in work.kernels) == work.bytes.at(5)


def test_a_batch_norm_reads_its_images_twice():
    image, norm, x = 2 * 4 * 8 * 8 * 4, nn.BatchNorm2d(4), torch.randn(2, 4, 8, 8)
    for kind, images in (("F", 3), ("B", 5)):
        work = works(norm, x, kind)["batch-norm"]
        kernel = work.kernels[0].bytes.at(2)
        assert images * image <= kernel < images * image + 500


def test_a_batch_norm_of_contiguous_images_has_a_block_of_threads_a_channel():
    norm, x = nn.BatchNorm2d(4), torch.randn(2, 4, 8, 8)
    for kind, accesses in (("F", 3), ("B", 5)):
        (kernel,) = works(norm, x, kind)["batch-norm"].kernels
        assert (kernel.blocks, kernel.numbers.at(3)) == (4, accesses * 3 * 4 * 64)
    last = layer_costs([nn.BatchNorm2d(4)], x.contiguous(memory_format=LAST)).layers[0].works("F")
    assert [(k.blocks, k.numbers.at(3)) for work in last for k in work.kernels if k.numbers.at(3)] == []


def test_a_max_pool_compares_each_number_of_each_window():
    pool, x = nn.MaxPool2d(3, 2, padding=1), torch.randn(2, 4, 8, 8)
    forward, backward = (works(pool, x, kind)["pooling"].kernels[0] for kind in "FB")
    assert (forward.numbers.at(5), forward.blocks) == (5 * 4 * 16 * 9, 0)
    assert backward.numbers.at(5) == pytest.approx(3.5 * 5 * 4 * 16 * 9)  # of a forward, as in a profile
    last = layer_costs([nn.MaxPool2d(3, 2)], x.contiguous(memory_format=LAST)).layers[0].works("F")[0]
    assert last.kernels[0].numbers.at(5) == pytest.approx(1.18 * 5 * 4 * 9 * 9)


def test_the_backward_of_a_layer_norm_has_a_kernel_for_its_input_and_one_for_its_weights():
    tokens, x = 2 * 500 * 64 * 4, torch.randn(2, 500, 64)
    layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    for kind, passes in (("B", [3, 2]), ("I", [3]), ("F", [2])):
        work = works(layers, x, kind)["layer-norm"]
        assert [round(kernel.bytes.at(2) / tokens) for kernel in work.kernels] == passes
        assert sum(kernel.count for kernel in work.kernels) == len(passes)


def test_kernels_that_are_slower_than_a_copy_are_named():
    """Norms, bias gradients and GELU by erf; not GELU by tanh, nor the sum of a whole tensor."""
    x, norm, linear, gelu, tanh = torch.randn(2, 30, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.GELU(), nn.GELU("tanh")
    for module, kind, wanted in (
        (norm, "F", {"layer-norm"}), (norm, "B", {"layer-norm"}), (linear, "F", {""}), (linear, "B", {"", "sum"}),
        (gelu, "F", {"gelu"}), (gelu, "B", {"gelu"}), (tanh, "F", {""}), (tanh, "B", {""}), (Mean(), "F", {""}),
    ):  # fmt: skip
        assert {kernel.kind for work in works(module, x, kind).values() for kernel in work.kernels} == wanted


class Mean(nn.Module):
    def forward(self, x):
        return x - x.sum((1, 2), keepdim=True)


def test_dropout_draws_a_number_for_each_of_its_own():
    class Dropout(nn.Module):
        def forward(self, x):
            return torch.native_dropout(x, 0.1, True)[0]

    dropout, x = Dropout(), torch.randn(2, 30)
    (work,) = works(dropout, x, "F").values()
    assert [kernel.random.at(5) for kernel in work.kernels] == [5 * 30]
    (work,) = works(dropout, x, "B").values()
    assert [kernel.random.at(5) for kernel in work.kernels] == [0]


def transposes(module, x, kind):
    """Bytes and number of the transposes of each product, on 3 examples."""
    (work,) = (work for work in row_alone(module, x).works(kind) if work.operator == "convolution")
    return [(k.transposed.at(3), k.transposes) for k in work.kernels if k.product]


@cache
def row_alone(module, x):
    return layer_costs([module], x).layers[0]


def test_a_convolution_of_contiguous_images_transposes_two_operands_and_its_result():
    module, images = nn.Conv2d(8, 12, 3, padding=1, stride=2), torch.randn(2, 8, 10, 10, requires_grad=True)
    x, w, y = 3 * 8 * 100 * 4, 12 * 8 * 9 * 4, 3 * 12 * 25 * 4
    assert transposes(module, images, "F") == [(2 * (x + w + y), 3)]
    inner = nn.Sequential(nn.Conv2d(8, 8, 1), module)
    of_both = transposes(inner, images, "B")
    assert (2 * (y + w + x), 3) in of_both  # the images' gradient and the weights' move the same tensors
    assert sum(bytes for bytes, _ in of_both) == 2 * 2 * (y + w + x) + 2 * (x + x)  # a 1 x 1 weight has both formats


def test_nothing_is_transposed_with_channels_last_nor_what_has_both_formats_nor_depthwise():
    x = torch.randn(2, 8, 10, 10)
    module = nn.Sequential(nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 4, 1))
    last, x_last = copy.deepcopy(module).to(memory_format=LAST), x.contiguous(memory_format=LAST)
    for kind in "FB":
        assert sum(many for _, many in transposes(module, x, kind)) > 0
        assert transposes(last, x_last, kind) == [(0, 0)] * len(transposes(module, x, kind))
    assert transposes(last[0], x, "F") == [(2 * 3 * 8 * 100 * 4, 1)]  # torch itself makes the images channels last
    assert transposes(nn.Conv2d(1, 1, 3), x[:, :1].clone(), "F") == [(0, 0)]
    assert transposes(nn.Conv2d(8, 8, 3, groups=8), x, "F") == [(0, 0)]


def test_products_of_contiguous_images_need_no_transposes_where_they_are_aligned():
    def plain(side, **moves):
        (work,) = (
            layer_costs([nn.Conv2d(8, 12, 1, bias=False, **moves)], torch.randn(2, 8, side, side)).layers[0].forward
        )
        return [kernel.plain for kernel in work.kernels]

    assert plain(4) == [True]
    assert plain(4, stride=2) == plain(4, padding=1) == [False]
    assert plain(3) == [False]  # 36 bytes a channel
    last = torch.randn(2, 8, 4, 4).contiguous(memory_format=LAST)
    assert not layer_costs([nn.Conv2d(8, 12, 1)], last).layers[0].forward[0].kernels[0].plain


def test_transposes_of_a_resnet_as_counted_from_the_shapes_of_its_convolutions():
    from stretto.models.published import planned_network

    network, bytes_ = planned_network("resnet", {"depth": 18, "side": 64}), []
    with torch.device("meta"):
        layers, x = network.layers(), network.example(2)
    layers = [layers[0], layers[3]]  # every size of a kernel and stride

    def add(conv, inputs, output):
        x, w, y = inputs[0].numel(), conv.weight.numel() * (conv.kernel_size != (1, 1)), output.numel()
        bytes_.append(4 * 2 * (x + w + y))

    costs = layer_costs(layers, x)
    for conv in (part for layer in layers for part in layer.modules() if isinstance(part, nn.Conv2d)):
        conv.register_forward_hook(add)
    for layer in layers:
        x = layer(x)

    def counted(kind):
        return sum(
            k.count * k.transposed.at(2) for row in costs.layers for work in row.works(kind) for k in work.kernels
        )

    assert counted("F") == sum(bytes_)
    assert counted("B") == 2 * sum(bytes_) - bytes_[0]  # images themselves need no gradient
