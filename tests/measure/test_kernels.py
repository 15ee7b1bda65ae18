"""Kernels of operators: sizes of products by hand, FLOPs that add up, and what batch norms read twice."""

import torch
from torch import nn

from stretto.measure.layer_flops import layer_costs


def sizes(work, examples):
    return [tuple(getattr(k.product, key).at(examples) for key in ("number", "rows", "columns", "inner"))
            for k in work.kernels]  # fmt: skip


def works(module, x, kind):
    first = nn.Conv2d(x.shape[1], x.shape[1], 1) if x.dim() == 4 else nn.Identity()
    return {work.operator: work for work in layer_costs([first, module], x).layers[1].works(kind)}


def test_products_of_a_linear_layer():
    module, x = nn.Linear(6, 10), torch.randn(4, 5, 6)
    assert sizes(works(module, x, "F")["linear"], 7) == [(1, 7 * 5, 10, 6)]
    weight = layer_costs([module], x).layers[0].works("B")[1]
    assert weight.operator == "linear"
    assert sizes(weight, 7) in ([(1, 10, 6, 7 * 5)], [(1, 6, 10, 7 * 5)])


def test_products_of_a_convolution_and_of_its_gradients():
    module, x = nn.Conv2d(8, 12, 3, padding=1, stride=2, groups=2), torch.randn(2, 8, 10, 10)
    assert sizes(works(module, x, "F")["convolution"], 3) == [(2, 3 * 25, 6, 4 * 9)]
    whole = nn.Conv2d(8, 12, 3, padding=1, stride=2)
    assert sizes(works(whole, x, "B")["convolution"], 3) == [(1, 75, 72, 12), (1, 12, 72, 75)]
    assert sizes(works(whole, x, "I")["convolution"], 3) == [(1, 75, 72, 12)]


def test_kernels_add_up_to_their_operators():
    module = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    for kind in "FBIW":
        for operator, work in works(module, torch.randn(2, 4, 8, 8), kind).items():
            assert sum(k.count * k.flops.at(5) for k in work.kernels) == work.flops.at(5)
            if operator not in ("batch-norm", "convolution"):
                assert sum(k.count * k.bytes.at(5) for k in work.kernels) == work.bytes.at(5)


def test_a_batch_norm_reads_its_images_twice():
    image = 2 * 4 * 8 * 8 * 4
    for kind, images in (("F", 3), ("B", 5)):
        work = works(nn.BatchNorm2d(4), torch.randn(2, 4, 8, 8), kind)["batch-norm"]
        kernel = work.kernels[0].bytes.at(2)
        assert images * image <= kernel < images * image + 500


def test_the_backward_of_a_layer_norm_has_a_kernel_for_its_input_and_one_for_its_weights():
    tokens = 2 * 500 * 64 * 4
    for kind, passes in (("B", [3, 2]), ("I", [3]), ("F", [2])):
        work = works(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), torch.randn(2, 500, 64), kind)["layer-norm"]
        assert [round(kernel.bytes.at(2) / tokens) for kernel in work.kernels] == passes
        assert sum(kernel.count for kernel in work.kernels) == len(passes)


def test_dropout_draws_a_number_for_each_of_its_own():
    class Dropout(nn.Module):
        def forward(self, x):
            return torch.native_dropout(x, 0.1, True)[0]

    (work,) = works(Dropout(), torch.randn(2, 30), "F").values()
    assert [kernel.random.at(5) for kernel in work.kernels] == [5 * 30]
    (work,) = works(Dropout(), torch.randn(2, 30), "B").values()
    assert [kernel.random.at(5) for kernel in work.kernels] == [0]
