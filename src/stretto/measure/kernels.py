"""The kernels that a GPU runs for torch's operators: what each computes and moves, and the sizes of its product."""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

Sizes = tuple[int, int, int, int]  # of a product: how many, and the rows, columns and inner size of each


class Kernel(NamedTuple):
    """What a kernel computes, the bytes that it must move and the random numbers that it draws.

    `product` has its sizes if it is a matrix product.
    """

    sort: str
    flops: float
    bytes: float
    product: Sizes | None = None
    random: float = 0.0


DRAWING = (
    "native_dropout",
    "dropped_sum",
    "bernoulli",
    "uniform",
    "normal",
    "rand",
    "rand_like",
    "randn",
    "randn_like",
)


def kernels_of(name: str, operator: Kernel, args: Any, made: Any) -> Iterator[Kernel]:
    """The kernels of an operator, `operator` as a whole.

    A convolution has one for each gradient. A batch norm reads its images twice: for the statistics, and to normalise.
    The backward of a layer norm has a kernel for the input's gradient, by rows, and one for the weights', by columns,
    both of which read the gradient and the input (`LayerNormBackwardKernelImplInternal`, ATen/native/cuda/
    layer_norm_kernel.cu).
    """
    if name == "convolution_backward":
        wanted = args[-1]
        pixels, channels, window, groups = window_product(args[0], args[2], args[9])
        sizes = [(groups, pixels, window, channels)] * wanted[0] + [(groups, channels, window, pixels)] * wanted[1]
        for product in sizes:
            yield fitting(Kernel(operator.sort, operator.flops / len(sizes), sum(map(nbytes, args[:3])), product))
    elif name == "convolution":
        pixels, channels, window, groups = window_product(made, args[1], args[8])
        yield fitting(operator._replace(product=(groups, pixels, channels, window)))
    elif operator.sort == "batch-norm":
        images = [each for each in args[:2] if isinstance(each, Tensor) and each.dim() > 1]
        yield operator._replace(bytes=operator.bytes + sum(map(nbytes, images)))
    elif operator.sort == "layer-norm" and name.endswith("norm_backward") and isinstance(args[1], Tensor):
        yield operator
        if gives_weight_gradients(made):
            yield Kernel(operator.sort, 0.0, nbytes(args[0]) + nbytes(args[1]))
    else:
        drawn = numbers_of(made) if name.rstrip("_") in DRAWING else 0
        yield fitting(operator._replace(product=matrix_product(name, args), random=drawn))


def gives_weight_gradients(made: Any) -> bool:
    """Whether the backward of a norm made more than the input's gradient."""
    return isinstance(made, tuple | list) and any(isinstance(gradient, Tensor) for gradient in made[1:])


def numbers_of(made: Any) -> int:
    """The random numbers that are drawn for an operator's result: one for each of its numbers."""
    result = made[0] if isinstance(made, tuple | list) else made
    return result.numel() if isinstance(result, Tensor) else 0


def matrix_product(name: str, args: Any) -> Sizes | None:
    """The sizes of a product of matrices; None for other operators."""
    if name not in ("mm", "addmm", "bmm", "baddbmm"):
        return None
    left, right = args[-2:]
    *batch, rows, inner = left.shape
    return prod(batch), rows, right.shape[-1], inner


def window_product(output: Tensor, weight: Tensor, groups: int) -> Sizes:
    """Pixels of a convolution's output, channels of a group, numbers that one of them is computed from, and groups."""
    return output.numel() // output.shape[1], output.shape[1] // groups, weight[0].numel(), groups


def fitting(kernel: Kernel) -> Kernel:
    """The kernel without sizes that are not those of its FLOPs, as of a transposed convolution."""
    return kernel if kernel.product and 2 * prod(kernel.product) == kernel.flops else kernel._replace(product=None)


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
