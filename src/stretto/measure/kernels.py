"""The kernels that a GPU runs for torch's operators: what each computes and moves, and the sizes of its product.

A convolution is a matrix product without a matrix of windows: of pixels of the output and channels, of pixels of the
images and channels for their gradient, of channels and windows for the weights' (NVIDIA's Convolutional Layers User's
Guide, "Convolution Algorithms"). torch adds its bias in a kernel of its
own behind cuDNN, and sums the gradient for it in another (`_convolution`, `convolution_backward` in ATen/native/
Convolution.cpp).

Tensor cores take and give images with channels last. Where a convolution's images are contiguous, [N, C, H, W], cuDNN
transposes its two operands before and its result behind, each in a kernel that reads and writes the tensor once: images
and weights to the output in a forward; gradients and weights to the images' gradient, and images and gradients to
the weights' in a backward. Sources: NVIDIA's Convolutional Layers User's Guide, "Tensor Layouts In Memory: NCHW vs
NHWC"; two nchwToNhwcKernel and one nhwcToNchwKernel a convolution in float16 on a V100, and none in float32 (Paddle's
guide on data types of operators, cuDNN 8.2); the same three, by name, on an H100 (arXiv 2512.23236, Conv1d). A tensor
with one channel or one pixel has both formats at once.

Of kernels of 1 x 1, without strides, contiguous images are matrices already, one each, which an A100's products take as
they are where they are aligned: to 16 bytes an image for the weights' gradient, else to 8 (`is_plain_product`). EVT's
step has 158 transposes to channels last and 68 back. The 20 other convolutions have 112 and 56; those of 1 x 1 whose
images are not aligned so, 17 of 14 x 14 and 7 x 7 and of these 5 of 7 x 7, make 156 and 66, and all 33 would make 244
and 122. A V100 transposes for nearly all: 226 to channels last (github.com/PaddlePaddle/Paddle/issues/19425, cuDNN 7).

EVT: benchmark/resnet/torch_result.md and torch_cl_result.md, github.com/apuaaChen/EVT_AE at 917438b: ResNet-50, 128
images of 224 x 224, float16, torch 2.1, cuDNN 8.9, an A100 of 40 GB.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

Sizes = tuple[int, int, int, int]  # of a product: how many, and the rows, columns and inner size of each


class Kernel(NamedTuple):
    """What a kernel computes, the bytes that it must move and the random numbers that it draws.

    `product` has its sizes if it is a matrix product. `transposed` are the bytes that are moved beside, in so many
    `transposes`, where it runs on tensor cores. `numbers` are those that it reads and writes one at a time, in so many
    `blocks` of threads, or that a pool compares (0 blocks). `plain` convolutions are products of contiguous images.
    `kind` is one of KINDS, or empty.
    """

    sort: str
    flops: float
    bytes: float
    product: Sizes | None = None
    random: float = 0.0
    transposed: float = 0.0
    transposes: int = 0
    numbers: float = 0.0
    blocks: int = 0
    plain: bool = False
    kind: str = ""


# What a number that a pool compares costs, in those of a forward of contiguous images. EVT's pool of 3 x 3 compares 231
# million numbers in 0.652 ms, with channels last in 0.770; its backward takes 2.28 and 1.455 ms.
COMPARED = {
    ("max_pool2d_with_indices", False): 1.0,
    ("max_pool2d_with_indices", True): 1.18,
    ("max_pool2d_with_indices_backward", False): 3.5,
    ("max_pool2d_with_indices_backward", True): 2.23,
}  # by name, and whether channels are last
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

    A convolution has one for each gradient. The backward of a layer norm has a kernel for the input's gradient, by
    rows, and one for the weights', by columns, both of which read the gradient and the input
    (`LayerNormBackwardKernelImplInternal`, ATen/native/layer_norm_kernel.cu); and a copy of a gradient that lies in
    another order.
    """
    if name == "convolution_backward":
        yield from convolution_backward(operator, args)
    elif name == "convolution":
        yield from convolution(operator, args, made)
    elif operator.sort == "batch-norm":
        yield batch_norm(operator, args)
    elif operator.sort == "layer-norm" and name.endswith("norm_backward") and isinstance(args[1], Tensor):
        yield operator
        if not args[0].is_contiguous():
            yield Kernel(operator.sort, 0.0, 2.0 * nbytes(args[0]))
        if gives_weight_gradients(made):
            yield Kernel(operator.sort, 0.0, nbytes(args[0]) + nbytes(args[1]), kind=operator.kind)
    elif name in ("max_pool2d_with_indices", "max_pool2d_with_indices_backward"):
        backward = name.endswith("backward")
        output, window = (args[0], args[2]) if backward else (made[0], args[1])
        compared = COMPARED[name, has_channels_last(args[1] if backward else args[0])]
        yield operator._replace(numbers=compared * output.numel() * prod(window))
    else:
        drawn = numbers_of(made) if name.rstrip("_") in DRAWING else 0
        sizes = matrix_product(name, args)
        yield fitting(operator._replace(product=sizes, random=drawn))


def convolution(operator: Kernel, args: Any, made: Tensor) -> Iterator[Kernel]:
    """The kernels of a convolution: its product, and the sum with its bias."""
    images, weight, bias, stride, padding = args[:5]
    groups = args[8]
    pixels, channels, window, groups = window_product(made, weight, groups)
    whole = fitting(operator._replace(product=(groups, pixels, channels, window)))
    last = channels_last(images, weight, groups)
    plain = last is False and is_plain_product(images, weight, (stride, padding), 8)
    yield with_transposes(whole._replace(plain=plain), (images, weight), made, last)
    if bias is not None:
        yield Kernel(operator.sort, 0.0, 2 * nbytes(made) + nbytes(bias))


def convolution_backward(operator: Kernel, args: Any) -> Iterator[Kernel]:
    """The kernels of a convolution's backward: one for each gradient that is wanted."""
    gradient, images, weight, _, stride, padding, _, transposed = args[:8]
    wanted = args[-1]
    pixels, channels, window, groups = window_product(gradient, weight, args[9])
    image_product = image_gradient_product(images, weight, stride, groups)
    of_images = (groups, pixels, window, channels) if transposed else image_product, (gradient, weight), images, 8
    of_weight = (groups, channels, window, pixels), (images, gradient), weight, 16
    kernels = [of_images] * wanted[0] + [of_weight] * wanted[1]
    last = channels_last(images, weight, args[9])
    for product, operands, result, aligned in kernels:
        plain = last is False and is_plain_product(images, weight, (stride, padding), aligned)
        half = Kernel(operator.sort, operator.flops / len(kernels), sum(map(nbytes, args[:3])), product, plain=plain)
        fits = half if product is image_product else fitting(half)
        yield with_transposes(fits, operands, result, last)
    if wanted[2]:
        yield Kernel(operator.sort, 0.0, nbytes(gradient))


def image_gradient_product(images: Tensor, weight: Tensor, stride: Sequence[int], groups: int) -> Sizes:
    """The product of an images' gradient: of all their pixels and channels, with each position of a window.

    Also of windows that reach over the edge, or would: a window of 7 x 7 on 7 x 7 pixels multiplies 49 times as much as
    it has to. Of strides only those positions that meet a pixel. NVIDIA's Convolutional Layers User's Guide,
    "Convolution Algorithms", table of activation gradients: N H W, C and K R S.
    """
    channels = weight.shape[0] // groups * weight[0, 0].numel()
    return groups, images.numel() // images.shape[1], images.shape[1] // groups, -(-channels // prod(stride))


def batch_norm(operator: Kernel, args: Any) -> Kernel:
    """The kernel of a batch norm, which reads its images twice: for the statistics, and to normalise.

    Of contiguous images cuDNN has one block of threads for each channel, which takes one number after the other
    (`bn_fw_tr_1C11_kernel_NCHW`, `bn_bw_1C11_kernel_new`: EVT; torch's own kernel for statistics as well).
    """
    images = [each for each in args[:2] if isinstance(each, Tensor) and each.dim() > 1]
    kernel = operator._replace(bytes=operator.bytes + sum(map(nbytes, images)))
    if images[0].dim() == 2 or has_channels_last(images[0]):
        return kernel
    return kernel._replace(numbers=(2.0 * len(images) + 1) * images[0].numel(), blocks=images[0].shape[1])


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


def is_plain_product(images: Tensor, weight: Tensor, moves: tuple[Sequence[int], Sequence[int]], aligned: int) -> bool:
    """Whether each pixel of an output is computed from one pixel, all are, and a channel takes a multiple of bytes.

    `moves` are strides and padding, `aligned` the bytes.
    """
    strides, padding = moves
    one = all(size == 1 for size in (*weight.shape[2:], *strides)) and not any(padding)
    return one and images[0, 0].numel() * images.element_size() % aligned == 0


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
