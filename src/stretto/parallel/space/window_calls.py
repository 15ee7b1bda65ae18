"""The windows that a call of torch's functions slides over a whole image: what it would exchange on slabs.

The arguments are read by the signatures of the functions that run on slabs (`table.HANDLERS`).
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, Literal, NamedTuple

from torch import Tensor

from stretto.parallel.space.convolution import convolution_windows, paddings, per_dim, transposed_windows
from stretto.parallel.space.geometry import CellWindow, Window
from stretto.parallel.space.pooling import pool_windows
from stretto.parallel.space.table import HANDLERS

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
