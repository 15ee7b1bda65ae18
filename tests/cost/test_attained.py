"""What devices attain: laws of kernels and products, a layer of a large model by hand, hosts, and memory on chips."""

import itertools
import math
from dataclasses import replace
from functools import cache
from statistics import NormalDist

import pytest

from stretto import UsageError
from stretto.cost import Cluster, Device, Group, LayerCost, Link, ModelCosts, Work, find_cluster, stage_times
from stretto.cost.attained import (
    SHORTEST,
    SPLITS,
    TILES,
    Attained,
    DevicePeaks,
    TileSpeeds,
    one_kernel,
    product_seconds,
)
from stretto.cost.cluster_file import parse, to_toml
from stretto.cost.layer_table import Affine, Kernels, ProductSizes
from stretto.cost.stage_prediction import Machine, layer_seconds, times_by_part
from stretto.measure.layer_flops import layer_costs

A100 = find_cluster("70-nodes-of-8-a100").devices["a100"]
SPEEDS = TileSpeeds(1 / 312e12, 2 / 5e12, 8 / 2e12, 108)
IDEAL = TileSpeeds(1 / 312e12, 0.0, 0.0, 108)


def by_hand(count, rows, columns, inner, speeds):
    """A product's tiles handed out one by one to the multiprocessor that is free first; the best way to cut it."""
    ways = []
    for (height, width), split in itertools.product(TILES, SPLITS):
        step = speeds.multiprocessors * max(2 * height * width * speeds.flop, (height + width) * speeds.number)
        free = [0.0] * speeds.multiprocessors
        for _ in range(count * -(-rows // height) * -(-columns // width) * split):
            first = free.index(min(free))
            free[first] += max(inner / split, SHORTEST) * step
        ways.append(max(free) + (split > 1) * split * count * rows * columns * speeds.partial)
    return min(ways)


@pytest.mark.parametrize("sizes", [(1, 64, 64, 64), (1, 512, 768, 96), (3, 100, 1000, 4096), (1, 128, 128, 100_000)])
def test_a_product_takes_waves_of_tiles(sizes):
    assert product_seconds(*sizes, SPEEDS) == pytest.approx(by_hand(*sizes, SPEEDS))


def test_a_large_product_attains_the_peak_and_none_more():
    sizes = (1.0, 108 * 256.0, 4 * 128.0, 4096.0)  # whole waves
    assert product_seconds(*sizes, IDEAL) == pytest.approx(2 * math.prod(sizes) / 312e12)
    assert product_seconds(1, 30_000, 30_000, 8192, IDEAL) == pytest.approx(2 * 30_000**2 * 8192 / 312e12, rel=0.02)
    for sizes in itertools.product((1, 8), (1, 65, 3000), (7, 640), (16, 5000)):
        assert product_seconds(*sizes, SPEEDS) >= 2 * math.prod(sizes) / 312e12


def test_products_and_kernels_never_take_less_time_for_more_work():
    grid = [1, 63, 64, 65, 200, 257, 1000, 4097]
    for fixed in itertools.product((100, 3000), repeat=2):
        for place in range(3):
            sizes = [(*fixed[:place], size, *fixed[place:]) for size in grid]
            seconds = [product_seconds(1, *each, SPEEDS) for each in sizes]
            assert seconds == sorted(seconds)
    times = [
        layer_seconds(small_layers()[0], "F", Machine(A100, "bfloat16"), examples)
        for examples in (0.5, 1, 2, 3, 8, 64, 65)
    ]
    assert times == sorted(times)


@cache
def small_layers():
    """A block's linear layers and what is between them, small."""
    import torch
    from torch import nn

    wide = nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96))
    return layer_costs([wide, nn.Linear(96, 96)], torch.randn(4, 96)).layers


def test_a_layer_of_a_large_model_by_hand():
    """A forward and a backward of a block of width 6144, 4 x 2048 tokens: every kernel written down by hand."""
    import torch

    from stretto.models.transformer import language_model

    tokens, width, heads = 4 * 2048, 6144, 64
    with torch.device("meta"):
        block = language_model(1000, 2048, depth=1, width=width, heads=heads)[1]().to(torch.bfloat16)
        example = torch.zeros(4, 2048, width, dtype=torch.bfloat16)
    _, row = layer_costs([torch.nn.Identity(), block], example).layers
    peak, memory, kernel = 312e12 * 0.825, 2.039e12 * 0.81, 1.4e-6

    def product(rows, columns, inner):
        speeds = TileSpeeds(1 / peak, 2 / 5.4e12, 8 / memory, 108)
        moved = 2 * (rows * inner + inner * columns + rows * columns)
        computing, moving = product_seconds(1, rows, columns, inner, speeds), moved / memory
        return (computing**1.5 + moving**1.5) ** (2 / 3) + kernel

    def traffic(numbers, share=0.81):
        return 2 * numbers / (2.039e12 * share) + kernel

    stream = tokens * width
    linear = [(tokens, columns, inner) for columns, inner in
              [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]]  # fmt: skip
    scores = (0.5 + 220 / 2048) * 4 * 2048**2 * width * 4 / (312e12 * 0.575)
    norms, gelu = 2 * traffic(2 * stream, 0.553), traffic(2 * 4 * stream, 0.377)
    forward = sum(product(*each) for each in linear) + scores + kernel + norms + gelu
    forward += 2 * traffic(3 * stream)  # the two additions
    predicted = layer_seconds(row, "F", Machine(A100, "bfloat16"), 4)
    assert predicted == pytest.approx(forward, rel=0.01)
    assert 1.15 < predicted / (sum(2 * a * b * c for a, b, c in linear) / 312e12) < 1.5


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "teraflops"),
    [(8192, 8192, 8192, 253.7), (6144, 12288, 12288, 250.8), (4096, 4096, 4096, 228.0), (2048, 2048, 2048, 221.8),
     (1024, 1024, 1024, 119.4), (16384, 16384, 16384, 256.5), (802816, 192, 768, 157.8)],
)  # fmt: skip
def test_products_as_they_were_measured_on_an_a100(rows, columns, inner, teraflops):
    """github.com/Azure/AI-benchmarking-guide, ND_A100_v4_results.md; only the last two set figures of the device.

    Left out is 1024 x 2145 x 1024, whose columns tensor cores cannot take as they are: 132.8, and 165 here.
    """
    flops = 2 * rows * columns * inner
    sizes = ProductSizes(*(Affine(size) for size in (1.0, rows, columns, inner)))
    moved = 2 * (rows * inner + inner * columns + rows * columns)
    work = Work("linear", 1, Affine(flops), Affine(moved), (Kernels(1, Affine(flops), Affine(moved), sizes),))
    row = replace(small_layers()[0], forward=(work,))
    device = replace(A100, attained=replace(A100.attained, per_launch=0.0))
    assert flops / layer_seconds(row, "F", Machine(device, "float16"), 1) / 1e12 == pytest.approx(teraflops, rel=0.1)


def test_a_small_layer_takes_as_long_as_its_host_starts_kernels():
    forward, backward = (sum(k.count for w in small_layers()[0].works(kind) for k in w.kernels) for kind in "FB")
    machine = Machine(A100, "float32")
    assert layer_seconds(small_layers()[0], "F", machine, 4) == pytest.approx(forward * 21e-6)
    assert layer_seconds(small_layers()[0], "B", machine, 4) == pytest.approx(backward * 21e-6 + 6 * 19e-6)
    assert times_by_part(ModelCosts(small_layers()[:1], "float32"), machine, 4)[0].alone.update == pytest.approx(
        6 * 7e-6
    )
    free = Machine(replace(A100, attained=A100.attained.without_host()), "float32")
    assert layer_seconds(small_layers()[0], "F", free, 4) < forward * 7e-6


def test_sorts_of_operators_have_launches_of_their_own_and_updates_those_of_others_unless_said():
    kernels = (Kernels(3, Affine(), Affine()),)
    works = tuple(Work(sort, 3, Affine(), Affine(), kernels) for sort in ("convolution", "elementwise"))
    row = replace(small_layers()[0], forward=works, measured=None)
    slow = replace(A100.attained, per_kernel=0.0)
    assert layer_seconds(row, "F", Machine(replace(A100, attained=slow), "float32"), 1) == pytest.approx(3 * 105e-6)
    plain = replace(slow, per_update=None)
    assert (slow.update_of_tensor, plain.update_of_tensor) == (7e-6, 21e-6)
    assert plain.at_speed(2).launch_of("convolution") == 42e-6
    cluster = replace(find_cluster("8-a100"), devices={"a100": replace(A100, attained=plain)})
    assert parse(to_toml(cluster), "again").devices["a100"].attained == plain


def test_without_what_is_attained_it_is_the_roofline_and_so_it_is_with_shares_of_one():
    plain = replace(A100, attained=None)
    work = Work("elementwise", 3, Affine(), Affine(0, 3e6), (Kernels(3, Affine(), Affine(0, 1e6)),))
    row = replace(small_layers()[0], forward=(work,), measured=None)
    roofline = layer_seconds(row, "F", Machine(plain, "float32"), 8)
    assert roofline == pytest.approx(24e6 / 2.039e12)
    assert layer_seconds(row, "F", Machine(replace(A100, attained=Attained()), "float32"), 8) == pytest.approx(roofline)
    unknown = replace(row, forward=(replace(work, kernels=()),))  # a table without kernels: equal ones
    machine = Machine(A100, "float32")
    assert layer_seconds(unknown, "F", machine, 8) == pytest.approx(layer_seconds(row, "F", machine, 8))


def test_dropout_takes_as_long_as_its_random_numbers():
    def seconds(drawn):
        kernels = (Kernels(1, Affine(), Affine(0, 5e6), None, Affine(0, drawn)),)
        row = replace(small_layers()[0], forward=(Work("elementwise", 1, Affine(), Affine(0, 5e6), kernels),))
        return layer_seconds(row, "F", Machine(A100, "float32"), 100)

    assert seconds(0) == seconds(1e3) == pytest.approx(5e8 / (2.039e12 * 0.81) + 1.4e-6)
    assert seconds(1e6) == pytest.approx(1e8 / 2.38e11 + 1.4e-6)


def seconds_of(work, device, dtype):
    return layer_seconds(replace(small_layers()[0], forward=(work,)), "F", Machine(device, dtype), 1)


def test_shares_of_a_dtype_and_of_early_attention():
    def device(**shares):
        return replace(A100, attained=Attained(**shares))

    flops = Affine(3.12e12)
    for operator, of_dtype in (("linear", 0.25), ("convolution", 0.25), ("attention", 0.5), ("attention-2022", 0.125)):
        work = Work(operator, 1, flops, Affine(), (Kernels(1, flops, Affine()),))
        given = device(products=0.5, convolutions=0.5, attention=0.5, attention_2022=0.125,
                       products_in={"float16": 0.25})  # fmt: skip
        assert seconds_of(work, given, "float16") == pytest.approx(0.01 / of_dtype)
        assert seconds_of(work, device(attention=0.5, products=0.5, convolutions=0.5), "float16") == pytest.approx(0.02)


@pytest.mark.parametrize("sizes", [(2048, 2048, 2048, 78.2), (4096, 4096, 4096, 95.7), (8192, 8192, 8192, 97.4),
                                   (10240, 10240, 10240, 89.4)])  # fmt: skip
def test_products_as_they_were_measured_on_a_v100(sizes):
    """github.com/zzc0721/torch-performance-test-data/issues/140; only the last one set a figure of the device."""
    *sides, teraflops = sizes
    flops, moved = Affine(2 * math.prod(sides)), Affine(2 * 3 * sides[0] ** 2)
    product = ProductSizes(*(Affine(size) for size in (1.0, *sides)))
    work = Work("linear", 1, flops, moved, (Kernels(1, flops, moved, product),))
    v100 = find_cluster("8-v100").devices["v100"]
    assert flops.fixed / seconds_of(work, v100, "float16") / 1e12 == pytest.approx(teraflops, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"products": 1.2}, "products = 1.2: a share of the peak is more than 0, and 1 at most"),
        ({"memory": 0.0}, "memory = 0: a share"),
        ({"products_in": {"float32": 0.0}}, "products_in.float32 = 0: a share"),
        ({"products_in": {"float23": 0.5}}, "products_in.float23 is no dtype: did you mean 'float32'"),
        ({"attention_2022": 1.5}, "attention_2022 = 1.5: a share"),
        ({"per_launch": -1.0}, "per_launch = -1: it must be 0 or more seconds"),
        ({"multiprocessors": 0}, "multiprocessors = 0: it must be 1 or more; leave it out"),
        ({"overlap": 0.5}, "overlap = 0.5: it must be 1 or more"),
        ({"cache_bandwidth": 0.0}, "cache_bandwidth = 0: it must be more than 0"),
    ],
)
def test_what_cannot_be_attained(changes, said):
    with pytest.raises(UsageError, match=said):
        Attained(**changes)


CHIP = Device(memory=1e9, memory_bandwidth=1e9, peak={"float32": 1e15}, on_chip_memory=1000.0, on_chip_bandwidth=1e11)


def chips(device=CHIP, workers=4):
    group = Group(nodes=1, workers=workers, device="chip", within="wire")
    return Cluster(
        name="chips", groups=(group,), devices={"chip": device}, links={"wire": Link(latency=0, bandwidth=1e15)}
    )


def row(number):
    def work(num_bytes):
        return (Work("elementwise", 1, Affine(), Affine(num_bytes)),)

    return LayerCost(
        name=f"{number}", type="Linear", forward=work(800), backward=work(1600), input_gradient=work(800),
        weight_gradient=work(800), differentiated=True, parameters=150, parameter_tensors=1, parameter_bytes=600,
        gradient_bytes=600, activation=Affine(0, 100), shared=Affine(), input=Affine(0, 8), output=Affine(0, 8),
        loose_input=Affine(), loose_output=Affine(),
    )  # fmt: skip


COSTS = ModelCosts(tuple(map(row, range(4))), "float32")


def test_a_stage_on_its_chip_reads_its_weights_there():
    one_a_worker = stage_times(COSTS, [0, 1, 2, 3, 4], chips(), 1)
    assert one_a_worker[1].compute.forward == pytest.approx(800 / 1e11)
    two_a_worker = stage_times(COSTS, [0, 2, 4], chips(), 1)
    assert two_a_worker[1].compute.forward == pytest.approx(1600 / 1e9)
    assert stage_times(COSTS, [0, 1, 2, 3, 4], chips(), 5)[1].compute.forward == pytest.approx(800 / 1e9)


def test_a_plan_gives_each_chip_one_layer():
    from stretto.plan import Problem, search

    def best(device, method="pb", workers=4):
        problem = Problem(costs=COSTS, cluster=chips(device), workers=workers, batch_sizes=(1,), methods=(method,),
                          tensors=(1,))  # fmt: skip
        return search(problem).best

    assert best(CHIP).candidate.stages == 4
    alone = best(CHIP, "backprop", 1)
    assert alone.seconds > 20 * best(CHIP).seconds  # far more than the work divided by the workers
    ordinary = replace(CHIP, on_chip_memory=None, on_chip_bandwidth=None)
    assert alone.seconds == best(ordinary, "backprop", 1).seconds
    everything, fast = replace(CHIP, on_chip_memory=1e9), replace(ordinary, memory_bandwidth=1e11)
    assert best(everything, workers=2).seconds == pytest.approx(best(fast, workers=2).seconds)


def test_figures_on_chips_are_read_back_and_checked():
    assert parse(to_toml(chips()), "here") == chips()
    with pytest.raises(UsageError, match=r"on_chip_memory = 1000.0, on_chip_bandwidth = None: give both"):
        replace(CHIP, on_chip_bandwidth=None)


def test_transposes_take_time_on_tensor_cores_and_none_without():
    def seconds(dtype, transposed):
        kernels = (Kernels(2, Affine(0, 1e9), Affine(0, 5e6), None, Affine(), Affine(0, transposed), 3),)
        row = replace(small_layers()[0], forward=(Work("convolution", 2, Affine(0, 2e9), Affine(0, 1e7), kernels),))
        return layer_seconds(row, "F", Machine(A100, dtype), 100)

    assert seconds("float32", 1e6) == seconds("float32", 0)
    for dtype in ("tfloat32", "bfloat16", "float16-autocast"):
        longer = seconds(dtype, 1e6) - seconds(dtype, 0)
        assert longer == pytest.approx(2 * 1e8 / (2.039e12 * 0.66))
    channels_last = (Kernels(2, Affine(0, 1e9), Affine(0, 5e6)),)
    row = replace(small_layers()[0], forward=(Work("convolution", 2, Affine(0, 2e9), Affine(0, 1e7), channels_last),))
    least = layer_seconds(row, "F", Machine(A100, "tfloat32"), 100)
    assert seconds("tfloat32", 0) == pytest.approx(least + 2 * 3 * 1.4e-6)
    assert seconds("float16-autocast", 0) == seconds("float16", 0)


def test_plain_products_of_contiguous_images_wait_for_no_transposes_where_a_device_takes_them():
    kernel = Kernels(1, Affine(0, 1e9), Affine(0, 5e6), transposed=Affine(0, 1e6), transposes=3, plain=True)
    peaks = DevicePeaks(1e14, 1e12, 2, True)
    taken, waited = (
        one_kernel("convolution", kernel, Attained(plain_products=plain), peaks, 100) for plain in (True, None)
    )
    assert waited - taken == pytest.approx(1e8 / 1e12)


# Milliseconds in a profile of a step of ResNet-50 in float16, 128 contiguous images of 224 x 224, on an A100 of 40 GB
# (github.com/apuaaChen/EVT_AE at 917438b, benchmark/resnet/torch_result.md): (channels, side) of batch norms.
NORMS = {
    "the first": ([(64, 112)], 2.124, 2.938),
    "of 56 x 56": ([(64, 56)] * 6 + [(256, 56)] * 4 + [(128, 56)], 6.868, 9.944),
    "of 28 x 28": ([(128, 28)] * 7 + [(512, 28)] * 5 + [(256, 28)], 3.151, None),
}


@pytest.mark.parametrize("name", NORMS)
def test_batch_norms_of_contiguous_images_take_what_a_profile_of_a_resnet_says(name):
    shapes, *milliseconds = NORMS[name]
    device = find_cluster("16-nodes-of-8-a100-40gb").devices["a100"]
    peaks = DevicePeaks(device.peak_of("float16"), device.memory_bandwidth, 2, True)
    for passes, measured in zip((3, 5), milliseconds, strict=True):
        kernels = [
            Kernels(1, Affine(), Affine(0, 2.0 * passes * c * side**2), numbers=Affine(0, 1.0 * passes * c * side**2),
                    blocks=c) for c, side in shapes
        ]  # fmt: skip
        taken = sum(one_kernel("batch-norm", kernel, device.attained, peaks, 128) for kernel in kernels)
        assert measured is None or 1e3 * taken == pytest.approx(measured, rel=0.18)


# Microseconds of kernels in a profile of BERT-large, float16, 32 x 512 tokens, A100 40 GB (github.com/apuaaChen/EVT_AE
# at 445ba71, benchmark/bert/torch_result.md), beside their bytes: of the stream, of scores, and of a perceptron.
STREAM, SCORE, HIDDEN = 32 * 512 * 1024 * 2, 32 * 16 * 512 * 512 * 2, 32 * 512 * 4096 * 2
PROFILED = {
    "layer norms": (
        [(2 * STREAM, "layer-norm"), (3 * STREAM, "layer-norm"), (2 * STREAM, "layer-norm")],
        73 + 94 + 120,
    ),
    "sums of biases": ([(5 * STREAM + HIDDEN, "sum")], 302e6 / 8.28e9 * 9549),
    "GELU": ([(2 * HIDDEN, "gelu"), (3 * HIDDEN, "gelu")], 279 + 594),
    "softmax": ([(2 * SCORE, ""), (3 * SCORE, "")], 429 + 593),  # of which no figure was made
    "scaling of scores": ([(2 * SCORE, "")], 387),
}


@pytest.mark.parametrize("name", PROFILED)
def test_kernels_of_each_kind_take_what_a_profile_of_bert_says(name):
    kernels, microseconds = PROFILED[name]
    device = find_cluster("16-nodes-of-8-a100-40gb").devices["a100"]
    peaks = DevicePeaks(device.peak_of("float16"), device.memory_bandwidth, 2, True)
    taken = sum(
        one_kernel("elementwise", Kernels(1, Affine(), Affine(moved), kind=kind), device.attained, peaks, 1)
        for moved, kind in kernels
    )
    assert 1e6 * taken == pytest.approx(microseconds, rel=0.08)


def test_shares_of_kinds_are_written_read_and_checked():
    cluster = find_cluster("8-a100")
    assert parse(to_toml(cluster), "x") == cluster
    assert cluster.devices["a100"].attained.memory_of["gelu"] < cluster.devices["a100"].attained.memory
    with pytest.raises(UsageError, match=r"memory_of\.gelus is no kind of kernel.*gelu"):
        Attained(memory_of={"gelus": 0.5})
    with pytest.raises(UsageError, match=r"memory_of\.sum = 2"):
        Attained(memory_of={"sum": 2})


def test_the_slowest_of_some_devices_is_the_largest_of_so_many_normal_numbers():
    """E max of N by its integral, x N phi(x) Phi(x)^(N - 1): 1.42 deviations of 8, 2.97 of 512."""
    device = replace(A100, variation=0.02)
    normal, step = NormalDist(), 0.01
    for workers in (2, 8, 64, 512):
        grid = [step * i for i in range(-800, 801)]
        largest = sum(x * workers * normal.pdf(x) * normal.cdf(x) ** (workers - 1) * step for x in grid)
        assert device.slowest_of(workers) == pytest.approx(1 + 0.02 * largest, abs=0.02 * 0.1)
    assert device.slowest_of(1) == replace(A100, variation=None).slowest_of(8) == 1
