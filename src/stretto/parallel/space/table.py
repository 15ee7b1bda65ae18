"""The handler of each of torch's functions for slabs, by the function's name.

Other functions are refused, unless torch itself marks them as pointwise.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from stretto.nn.devices import SPECIFIC_ATTRIBUTES, SPECIFIC_METHODS
from stretto.parallel.space import convolution, elementwise, normalization, pooling, resampling, slab_shapes
from stretto.parallel.space.convolution import convolution_windows, paddings, per_dim, transposed_windows
from stretto.parallel.space.geometry import CellWindow, Window
from stretto.parallel.space.pooling import pool_windows
from stretto.parallel.space.slab import Slab, refusal, slab

Func = Callable[..., Any]

ON_LOCAL_TENSOR = (
    "dim ndimension stride is_floating_point is_complex is_contiguous element_size get_device data_ptr is_pinned "
    "requires_grad_ retain_grad register_hook __repr__ __hash__ __format__ is_tensor is_shared is_inference"
)
SHAPE_PRESERVING = (
    "to float double half bfloat16 type_as contiguous detach detach_ clone zeros_like ones_like empty_like "
    "full_like dropout1d dropout2d dropout3d feature_dropout local_response_norm channel_shuffle hardswish logsigmoid "
    "log_sigmoid softsign tanhshrink absolute alias bool int long zero fill leaky_relu"
)
PER_CHANNEL = "prelu"
SHARED_CHANNELS = "enter leave"  # `parallel.operator.exchange`, among processes with the same rows
CUT_CHANNELS = "join part"
ALONG = "softmax log_softmax softmin glu cumsum cumprod"
ATTRIBUTES = (
    "dtype device layout ndim requires_grad grad grad_fn is_leaf is_sparse is_quantized is_mkldnn "
    "is_meta is_mps is_xpu is_nested retains_grad output_nr names _version itemsize nbytes _grad _backward_hooks"
)
HANDLERS: dict[str, Func] = {
    **dict.fromkeys(ON_LOCAL_TENSOR.split(), elementwise.on_local_tensor),
    **dict.fromkeys((*SHAPE_PRESERVING.split(), *SPECIFIC_METHODS), elementwise.shape_preserving),
    **dict.fromkeys(PER_CHANNEL.split(), elementwise.per_channel),
    **dict.fromkeys(ALONG.split(), elementwise.along_dim),
    **dict.fromkeys(SHARED_CHANNELS.split(), elementwise.shape_preserving),
    **dict.fromkeys(CUT_CHANNELS.split(), elementwise.along_channels),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution.convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), convolution.transposed),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), pooling.max_pool),
    **{f"max_pool{count}d_with_indices": pooling.max_pool for count in (1, 2, 3)},
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), pooling.average_pool),
    **dict.fromkeys(
        ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"), pooling.adaptive_average_pool
    ),
    **dict.fromkeys(("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"), pooling.adaptive_max_pool),
    "batch_norm": normalization.batch_norm,
    "group_norm": normalization.group_norm,
    "instance_norm": normalization.instance_norm,
    "layer_norm": elementwise.layer_norm,
    "linear": elementwise.linear,
    "dropout": elementwise.dropout,
    "normalize": elementwise.normalize,
    "pad": resampling.pad,
    "interpolate": resampling.interpolate,
    "pixel_shuffle": resampling.pixel_shuffle,
    "pixel_unshuffle": resampling.pixel_unshuffle,
    "size": slab_shapes.size,
    "__len__": slab_shapes.length,
    "permute": slab_shapes.permute,
    "flatten": slab_shapes.flatten,
    "unsqueeze": slab_shapes.unsqueeze,
    "stack": slab_shapes.stacked,
    "__getitem__": slab_shapes.getitem,
    "narrow": slab_shapes.narrow,
    **dict.fromkeys(("numel", "nelement"), slab_shapes.numel),
    **dict.fromkeys(("transpose", "swapaxes"), slab_shapes.transpose),
    **dict.fromkeys(("view", "reshape"), slab_shapes.view),
    **dict.fromkeys(("chunk", "split"), slab_shapes.pieces),
    **dict.fromkeys(("cat", "concat"), slab_shapes.joined),
    **dict.fromkeys(("mean", "sum"), slab_shapes.reduced),
    **dict.fromkeys(("amax", "amin"), slab_shapes.extreme),
}


@lru_cache(maxsize=1024)
def handler_of(func: Func) -> Func:
    """The function to call instead of `func`, with `func` itself and then its arguments."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return attribute
    handler = HANDLERS.get(name) or HANDLERS.get(name.removesuffix("_"))
    if handler is not None:
        return handler
    return elementwise.pointwise if is_pointwise(name) else unknown


def is_pointwise(name: str) -> bool:
    """Whether torch itself marks an operator as working element by element."""
    packet = getattr(torch.ops.aten, name.removesuffix("_") if not name.endswith("__") else name, None)
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def attribute(func: Func, x: Slab, *rest: Any) -> Any:
    """An attribute of a slab; its shape is the image's. Raises UsageError if the attribute is not known for slabs."""
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "shape":
        return x.cut.whole(x.shape)
    if name == "data":
        return slab(x.detach(), x.cut)
    if name not in (*ATTRIBUTES.split(), *SPECIFIC_ATTRIBUTES):
        raise refusal(func, "this attribute is not known for slabs")
    return func(x, *rest)


def unknown(func: Func, *args: Any, **kwargs: Any) -> Tensor:
    """Refuse a function that has no handler."""
    raise refusal(func, "it has no handler for a part of an image")


Slab.handler_of = staticmethod(handler_of)


AtOneRow = Literal["refused", "gathered", "summed"]  # what becomes of an output with one row along each cut axis
AT_ONE_ROW: Mapping[str, AtOneRow] = {
    "conv2d": "refused",
    "conv_transpose2d": "refused",
    "max_pool2d": "gathered",
    "avg_pool2d": "gathered",
    "adaptive_max_pool2d": "gathered",
    "adaptive_avg_pool2d": "summed",
}


class WindowCall(NamedTuple):
    """A convolution or pool of images `x`, [N, C, H, W], with its windows along height and width."""

    x: Tensor
    windows: tuple[Window, Window]
    at_one_row: AtOneRow


def window_call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> WindowCall | None:
    """The windows of a call; None for other functions, and for what is no batch of images."""
    name = getattr(func, "__name__", "")
    if name not in AT_ONE_ROW:
        return None
    bound = signature(HANDLERS[name]).bind(func, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given["input"].ndim != 4:
        return None
    height, width = windows_of(name, given)
    return WindowCall(given["input"], (height, width), AT_ONE_ROW[name])


def windows_of(name: str, given: Mapping[str, Any]) -> Sequence[Window]:
    """The windows of a function called with these arguments, along height and width."""
    if name == "conv2d":
        kernels, dilation = tuple(given["weight"].shape[2:]), per_dim(given["dilation"], 2)
        around = paddings(given["padding"], kernels, dilation)
        return convolution_windows(kernels, given["stride"], dilation, around)
    if name == "conv_transpose2d":
        kernels = tuple(given["weight"].shape[2:])
        padding = given["padding"], given["output_padding"]
        return transposed_windows(kernels, given["stride"], given["dilation"], *padding)
    if name.startswith("adaptive"):
        wanted = zip(per_dim(given["output_size"], 2), given["input"].shape[2:], strict=True)
        return [CellWindow(size if count is None else count) for count, size in wanted]
    kernel, stride = given["kernel_size"], given["stride"]
    return pool_windows(
        given["input"], 2, kernel, stride, given["padding"], given.get("dilation", 1), given["ceil_mode"]
    )
