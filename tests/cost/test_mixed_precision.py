"""What masters and sums of gradients take: against lists of accesses, and a product with its sum by hand."""

from dataclasses import replace

import pytest

from stretto.cost import find_cluster
from stretto.cost.attained import Attained
from stretto.cost.layer_table import Affine, Kernels, LayerCost, ProductSizes, Work
from stretto.cost.mixed_precision import gradient_products, step_factor, sum_seconds
from stretto.cost.stage_prediction import Machine

READ, WRITTEN = {"half": 2, "full": 4}, {"half": 2, "full": 4}
COMMON = [("norm", ["full"], []), ("clip", ["full"], ["full"]), ("round", ["full"], ["half"])]
OPTIMIZERS = {
    "adam": ("step", ["full"] * 4, ["full"] * 3),  # weight, gradient, two states; weight and states
    "sgd": ("step", ["full"] * 3, ["full"] * 2),
}
OWN = {
    "bfloat16": [("zero", [], ["full"])],
    "float16": [("zero", [], ["half"]), ("copy", ["half"], ["full"]), ("unscale", ["full"], ["full"])],
}


@pytest.mark.parametrize("dtype", OWN)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_moves_what_its_operators_read_and_write(optimizer, dtype):
    operators = [*COMMON, OPTIMIZERS[optimizer], *OWN[dtype]]
    moved = sum(sum(READ[x] for x in reads) + sum(WRITTEN[x] for x in writes) for _, reads, writes in operators)
    _, reads, writes = OPTIMIZERS[optimizer]
    assert step_factor(optimizer, dtype) == moved / (2 * (len(reads) + len(writes)))


def layer(rows, columns, inner, vectors):
    """A layer with one product for its weight's gradient, one for its input's, and some vectors as parameters."""

    def product(*sizes, grows):
        rows, columns, inner = (Affine(0, n) if key in grows else Affine(n) for key, n in sizes)
        numbers = [n for _, n in sizes]
        flops = 2 * numbers[0] * numbers[1] * numbers[2]
        return Kernels(
            1,
            Affine(0, flops),
            Affine(2 * rows.fixed * columns.fixed, 64),
            ProductSizes(Affine(1), rows, columns, inner),
        )

    of_weight = product(("r", rows), ("c", columns), ("i", inner), grows="i")
    of_input = product(("r", inner), ("c", columns), ("i", rows), grows="r")
    works = (Work("linear", 2, Affine(), Affine(), (of_input, of_weight)),)
    weights, nothing = rows * columns + vectors, Affine()
    return of_weight, LayerCost(
        name="l", type="Linear", forward=(), backward=works, input_gradient=works, weight_gradient=works,
        differentiated=True, parameters=weights, parameter_tensors=2, parameter_bytes=2.0 * weights,
        gradient_bytes=2.0 * weights, activation=nothing, shared=nothing, input=nothing, output=nothing,
        loose_input=nothing, loose_output=nothing,
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "more", "apart"), [("bfloat16", 6, 10), ("float16", 2, 6)])
def test_a_product_adds_to_its_sum_while_it_computes(dtype, more, apart):
    kernel, one = layer(512, 256, 64, 1000)
    assert list(gradient_products(one)) == [kernel]
    device = replace(
        find_cluster("8-a100").devices["a100"], peak={dtype: 1e12}, memory_bandwidth=1e10,
        attained=Attained(products=0.5, memory=0.5, overlap=2),
    )  # fmt: skip
    computing = 2 * 512 * 256 * 64 * 4 / 5e11
    moving, adding = ((2 * 512 * 256 + 64 * 4 + extra * 512 * 256) / 5e9 for extra in (0, more))
    longer = (computing**2 + adding**2) ** 0.5 - (computing**2 + moving**2) ** 0.5
    assert sum_seconds(one, Machine(device, dtype), 4) == pytest.approx(longer + apart * 1000 / 5e9)
    alone = sum_seconds(one, Machine(device, dtype), 4, in_products=False)
    assert alone == pytest.approx(apart * (512 * 256 + 1000) / 5e9)
