"""What training in 16 bits with float32 masters moves beside products, as large models are run. No torch here.

Bytes of each number in a step of the optimizer, in Megatron-LM (megatron/optimizer/optimizer.py, May 2022):

    norm of the gradients                  4                    they are read
    clipping                               8                    scaled: always by torch, by Megatron where it clips
    the optimizer                          4 x its accesses     masters, gradients and state in float32
    masters rounded to weights             6                    float32 read, 16 bits written
    bfloat16: sums set to zero             4                    gradients are summed in float32
    float16: gradients to float32          6                    they are summed in 16 bits
             scale of the loss removed     8
             sums set to zero              2

The product of a weight's gradient adds to the sum itself (gradient accumulation fusion): in bfloat16 it reads and
writes float32 instead of writing 16 bits, else it reads the sum beside. Other gradients are added by operators of
their own. Under autocast weights' gradients are cast, and added by operators of their own.
"""

from collections.abc import Iterator
from dataclasses import replace

from stretto.cost.attained import BYTES, TENSOR_CORES, DevicePeaks, one_kernel
from stretto.cost.layer_table import Affine, Kernels, LayerCost, Work
from stretto.cost.stage_prediction import Machine, pass_parts
from stretto.optimizers import optimizer_of

FLOAT32 = 4
NORM, CLIPPING, ROUNDING = 4, 8, 6
SUMS = {"bfloat16": 4, "float16": 6 + 8 + 2}


def step_factor(optimizer: str, dtype: str) -> float:
    """The bytes of a step with masters over those of a step of 16-bit weights alone."""
    accesses = optimizer_of(optimizer).accesses
    return (FLOAT32 * accesses + NORM + CLIPPING + ROUNDING + SUMS[dtype]) / (BYTES[dtype] * accesses)


def sum_seconds(layer: LayerCost, machine: Machine, examples: float, *, in_products: bool = True) -> float:
    """Seconds that a backward takes longer as it adds its gradients to those of earlier micro-batches.

    Unless products add them, operators of their own do for all.
    """
    attained, dtype = machine.device.attained, machine.dtype
    assert attained is not None, "kernels are priced where a device says what it attains"
    item = BYTES.get(dtype, FLOAT32)
    wide = FLOAT32 if dtype == "bfloat16" else item  # of a number of the sum
    peaks = DevicePeaks(machine.device.peak_of(dtype), machine.device.memory_bandwidth, item, dtype in TENSOR_CORES)
    longer = summed = 0.0
    for kernel in gradient_products(layer) if in_products else ():
        assert kernel.product is not None, "only products are given"
        amounts = (kernel.product.number, kernel.product.rows, kernel.product.columns)
        number, rows, columns = (amount.at(examples) for amount in amounts)
        more = replace(kernel, bytes=kernel.bytes + Affine((2 * wide - item) * number * rows * columns))
        alone, adding = (one_kernel("linear", each, attained, peaks, examples) for each in (kernel, more))
        longer += kernel.count * (adding - alone)
        summed += kernel.count * number * rows * columns
    others = max(0.0, layer.gradient_bytes / item - summed)
    apart = Work("elementwise", layer.parameter_tensors, Affine(), Affine((2 * wide + item) * others))
    return longer + pass_parts((apart,), "forward", machine, 0).device


def gradient_products(layer: LayerCost) -> Iterator[Kernels]:
    """The products that give gradients of weights: as large for any batch, which is summed over inside."""
    for work in layer.backward:
        for kernel in work.kernels if work.operator == "linear" else ():
            sizes = kernel.product
            if (
                sizes is not None
                and sizes.inner.each
                and not (sizes.number.each or sizes.rows.each or sizes.columns.each)
            ):
                yield kernel
