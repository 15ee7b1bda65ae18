"""The kernels that a GPU runs for torch's operators: what each computes and moves, and the sizes of its product.

Tensor cores take and give images with channels last. Where a convolution's images are contiguous, [N, C, H, W], cuDNN
transposes its two operands before and its result behind, each in a kernel that reads and writes the tensor once: images
and weights to the output in a forward; gradients and weights to the images' gradient, and images and gradients to
the weights' in a backward. Sources: NVIDIA's Convolutional Layers User's Guide, "Tensor Layouts In Memory: NCHW vs
NHWC"; two nchwToNhwcKernel and one nhwcToNchwKernel a convolution in float16 on a V100, and none in float32 (Paddle's
guide on data types of operators, cuDNN 8.2); the same three, by name, on an H100 (arXiv 2512.23236, Conv1d). A tensor
with one channel or one pixel has both formats at once.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

Sizes = tuple[int, int, int, int]  # of a product: how many, and the rows, columns and inner size of each


class Kernel(NamedTuple):
    """What a kernel computes, the bytes that it must move and the random numbers that it draws.

    `product` has its sizes if it is a matrix product. `transposed` are the bytes that are moved beside, in so many
    `transposes`, where it runs on tensor cores. `kind` is one of KINDS, or empty.
    """

    sort: str
    flops: float
    bytes: float
    product: Sizes | None = None
    random: float = 0.0
    transposed: float = 0.0
    transposes: int = 0
    kind: str = ""


LAYER_NORM, SUM, GELU = "layer-norm", "sum", "gelu"
KINDS = (LAYER_NORM, SUM, GELU)  # of kernels that move fewer bytes a second than a copy
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
    both of which read the gradient and the input (`LayerNormBackwardKernelImplInternal`, ATen/native/
    layer_norm_kernel.cu).
    """
    if name == "convolution_backward":
        gradient, images, weight = args[:3]
        wanted = args[-1]
        pixels, channels, window, groups = window_product(gradient, weight, args[9])
        of_images = (groups, pixels, window, channels), (gradient, weight), images
        of_weight = (groups, channels, window, pixels), (images, gradient), weight
        kernels = [of_images] * wanted[0] + [of_weight] * wanted[1]
        for product, operands, result in kernels:
            half = Kernel(operator.sort, operator.flops / len(kernels), sum(map(nbytes, args[:3])), product)
            yield with_transposes(fitting(half), operands, result, channels_last(images, weight, args[9]))
    elif name == "convolution":
        images, weight = args[:2]
        pixels, channels, window, groups = window_product(made, weight, args[8])
        whole = fitting(operator._replace(product=(groups, pixels, channels, window)))
        yield with_transposes(whole, (images, weight), made, channels_last(images, weight, groups))
    elif operator.sort == "batch-norm":
        images = [each for each in args[:2] if isinstance(each, Tensor) and each.dim() > 1]
        yield operator._replace(bytes=operator.bytes + sum(map(nbytes, images)))
    elif operator.sort == "layer-norm" and name.endswith("norm_backward") and isinstance(args[1], Tensor):
        yield operator
        if gives_weight_gradients(made):
            yield Kernel(operator.sort, 0.0, nbytes(args[0]) + nbytes(args[1]), kind=operator.kind)
    else:
        drawn = numbers_of(made) if name.rstrip("_") in DRAWING else 0
        yield fitting(operator._replace(product=matrix_product(name, args), random=drawn))


def kind_of(name: str, sort: str, args: Any, kwargs: Any) -> str:
    """The kind of an operator's kernels, as KINDS; empty for others.

    A sum is one over rows, which keeps the last dim, as a bias' gradient is. GELU by its formula computes an erf for
    each number; its approximation by a tanh is as quick as a copy.
    """
    if sort == LAYER_NORM:
        return LAYER_NORM
    if name in ("gelu", "gelu_backward"):
        return GELU if kwargs.get("approximate", "none") == "none" else ""
    if name == "sum" and len(args) > 1 and args[1]:
        dims = {dim % args[0].dim() for dim in args[1]}
        return SUM if args[0].dim() - 1 not in dims else ""
    return ""


def gives_weight_gradients(made: Any) -> bool:
    """Whether the backward of a norm made more than the input's gradient."""
    return isinstance(made, tuple | list) and any(isinstance(gradient, Tensor) for gradient in made[1:])


def with_transposes(kernel: Kernel, operands: tuple[Tensor, ...], result: Tensor, last: bool | None) -> Kernel:
    """A convolution's kernel with the transposes of operands and of a result like this one; none if `last` is None."""
    if last is None:
        return kernel
    turned = [x for x in operands if not has_channels_last(x)] + [result] * (not last and not has_channels_last(result))
    return kernel._replace(transposed=2.0 * sum(map(nbytes, turned)), transposes=len(turned))


def has_channels_last(x: Tensor) -> bool:
    """Whether channels lie next to each other in memory, in images of any dimensions."""
    return x.movedim(1, -1).is_contiguous()


def channels_last(images: Tensor, weight: Tensor, groups: int) -> bool | None:
    """Whether torch has cuDNN work with channels last: where images or weights are so, and not contiguous as well.

    As `cudnn_conv_suggest_memory_format` (ATen/native/ConvUtils.h); tensors with both formats do not tell. None for
    one channel a group, for which there are no tensor cores.
    """
    if groups > 1 and weight.shape[1] == 1:
        return None
    return any(has_channels_last(x) and not x.is_contiguous() for x in (images, weight))


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
