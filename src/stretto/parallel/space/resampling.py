"""Functions that change an image's size: padding, interpolation, pixel shuffle."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.parallel.space.exchange import fetch
from stretto.parallel.space.geometry import RowRange, SlidingWindow, cuts, padded_rows, want, want_rows
from stretto.parallel.space.halo import AxisRows
from stretto.parallel.space.pooling import adaptive_average_pool
from stretto.parallel.space.slab import ImageCut, Slab, place_of_call, refusal, slab

Func = Callable[..., Any]
MODES = ("nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic")


def pad(func: Func, input: Slab, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    """torch.nn.functional.pad on a slab: only the image's border is padded, and the padded image is cut anew."""
    cut = input.cut
    amounts = {-1 - at: tuple(pad[2 * at : 2 * at + 2]) for at in range(len(pad) // 2)}
    around = [amounts.get(dim, (0, 0)) for dim in cut.dims]
    for size, (before, after), dim in zip(cut.sizes, around, cut.dims, strict=True):
        maximum = {"reflect": size - 1, "circular": size}.get(mode, max(before, after))
        if max(before, after) > maximum or (mode != "constant" and min(before, after) < 0):
            raise refusal(func, f"{mode} padding of {(before, after)} for {size} rows along dim {dim}")
    sizes = tuple(size + sum(pair) for size, pair in zip(cut.sizes, around, strict=True))
    output_cut = cut.resized(sizes, f"pad {place_of_call()}by {tuple(pad)}")
    axis_rows = tuple(
        padded_axis_rows(size, *pair, mode, parts)
        for size, pair, parts in zip(cut.sizes, around, cut.grid.parts, strict=True)
    )
    uncut_pad = [0 if -1 - at // 2 in cut.dims else amount for at, amount in enumerate(pad)]
    result = fetch(input, cut, axis_rows, value or 0.0)
    if any(uncut_pad):
        result = func(result, uncut_pad, mode, value)
    return cut_anew(result, input, output_cut)


def cut_anew(result: Tensor, input: Slab, cut: ImageCut) -> Tensor:
    """The result as a slab of an image that is cut so; it may be the input, if its rows are the ones to have."""
    if result is input:
        if cut == input.cut:
            return input
        result = input.clone()
    return slab(result, cut)


def rows_of_hulls(cut: ImageCut, hulls: Sequence[Sequence[RowRange]]) -> tuple[AxisRows, ...]:
    """Along each cut axis, the input rows of every process, and the rows in the hull that it wants."""
    axes = zip(hulls, cut.sizes, cut.grid.parts, strict=True)
    return tuple(AxisRows(cuts(size, p), tuple(want(rows, size) for rows in axis)) for axis, size, p in axes)


@lru_cache(maxsize=256)
def padded_axis_rows(size: int, before: int, after: int, mode: str, parts: int) -> AxisRows:
    """The rows of one axis on every process, and the rows that it wants of the padded axis."""
    rows = padded_rows(size, before, after, mode)
    return AxisRows(cuts(size, parts), tuple(want_rows(rows[slice(*out)]) for out in cuts(len(rows), parts)))


def interpolate(
    func: Func,
    input: Slab,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """torch.nn.functional.interpolate on a slab: along each axis, output rows are weighted sums of a few input rows."""
    whole = input.cut.whole(input.shape)[2:]
    count = len(whole)
    factors = scale_factor if isinstance(scale_factor, (tuple, list)) else (scale_factor,) * count
    output_sizes = size if isinstance(size, (tuple, list)) else (size,) * count
    if size is None:
        output_sizes = [math.floor(float(n) * f) for n, f in zip(whole, factors, strict=True)]
    if mode == "area":
        return adaptive_average_pool(getattr(F, f"adaptive_avg_pool{count}d"), input, tuple(output_sizes))
    if mode not in MODES or antialias:
        raise refusal(
            func, f"mode {mode!r}{' with antialias' if antialias else ''} is not supported; use {', '.join(MODES)}"
        )
    scale_given = size is None and not recompute_scale_factor
    scales = [1 / f if scale_given else n / m for n, m, f in zip(whole, output_sizes, factors, strict=True)]
    cut = input.cut
    output_cut = cut.resized(
        tuple(output_sizes[dim] for dim in cut.dims), f"interpolate {place_of_call()}to {tuple(output_sizes)}"
    )
    axes = [
        taps(n, m, scale, mode, bool(align_corners)) for n, m, scale in zip(whole, output_sizes, scales, strict=True)
    ]
    parts = zip(cut.dims, cut.grid.parts, output_cut.sizes, strict=True)
    hulls = [[hull(axes[dim][0][slice(*out)]) for out in cuts(m, p)] for dim, p, m in parts]
    result = fetch(input, cut, rows_of_hulls(cut, hulls))
    origins = {dim: axis[at].start for dim, axis, at in zip(cut.dims, hulls, cut.grid.place, strict=True)}
    outs = dict(zip(cut.dims, output_cut.spans, strict=True))
    for dim in range(-count, 0):
        rows = slice(*outs.get(dim, (0, output_sizes[dim])))
        index, weight = axes[dim][0][rows] - origins.get(dim, 0), axes[dim][1][rows]
        result = combined(result, dim, index, weight)
    return cut_anew(result, input, output_cut)


def hull(index: Any) -> RowRange:
    return RowRange(int(index.min()), int(index.max()) + 1)


@lru_cache(maxsize=256)
def taps(n: int, m: int, scale: float, mode: str, align_corners: bool) -> tuple[Any, Any]:
    """Which input rows [m, taps] each output row uses, and their weights, by torch's own arithmetic."""
    out = np.arange(m)
    if mode in ("nearest", "nearest-exact"):  # torch computes these in float32, whatever the image
        half = np.float32(0.5 if mode == "nearest-exact" else 0)
        at = np.floor((out.astype(np.float32) + half) * np.float32(scale)).astype(int)
        if n == m:
            at = out
        return np.minimum(at, n - 1)[:, None], np.ones((m, 1))
    at = out * ((n - 1) / (m - 1) if m > 1 else 0.0) if align_corners else (out + 0.5) * scale - 0.5
    if mode == "bicubic":
        first = np.floor(at).astype(int)
        return np.clip(first[:, None] + np.arange(-1, 3), 0, n - 1), cubic(at - first)
    at = np.maximum(at, 0)
    first = np.minimum(np.floor(at).astype(int), n - 1)
    fraction = at - first
    return np.stack([first, np.minimum(first + 1, n - 1)], 1), np.stack([1 - fraction, fraction], 1)


def cubic(t: Any, a: float = -0.75) -> Any:
    """The weights [outputs, 4] of the four rows around a place, which is t rows behind the second; `a` as in torch."""

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return np.stack([far(t + 1), near(t), near(1 - t), far(2 - t)], 1)


def combined(x: Tensor, dim: int, index: Any, weight: Any) -> Tensor:
    """x resampled along one dim: output row i is the sum over taps of weight[i, tap] times row index[i, tap]."""
    if index.shape == (x.size(dim), 1) and bool((index[:, 0] == np.arange(len(index))).all()):
        return x
    shape = (-1, *(1,) * (-dim - 1))
    result: Tensor | None = None
    for tap in range(index.shape[1]):
        rows = x.index_select(dim, torch.from_numpy(index[:, tap].copy()).to(x.device))
        if index.shape[1] > 1:
            rows = rows * torch.from_numpy(weight[:, tap].copy()).to(x).view(shape)
        result = rows if result is None else result + rows
    assert result is not None
    return result


def pixel_shuffle(func: Func, input: Slab, upscale_factor: int) -> Any:
    """torch's pixel_shuffle on a slab: r^2 channels of a pixel become r x r pixels.

    The output is cut anew, so pixels near a cut are fetched.
    """
    r, cut = upscale_factor, input.cut
    output_cut = cut.resized(tuple(size * r for size in cut.sizes), f"pixel_shuffle {place_of_call()}")
    parts = zip(output_cut.sizes, cut.grid.parts, strict=True)
    hulls = [[RowRange(out.start // r, -(-out.stop // r)) for out in cuts(size, p)] for size, p in parts]
    result = func(fetch(input, cut, rows_of_hulls(cut, hulls)), r)
    for dim, axis, at, out in zip(cut.dims, hulls, cut.grid.place, output_cut.spans, strict=True):
        result = result.narrow(dim, out.start - axis[at].start * r, out.size)
    return slab(result, output_cut)


def pixel_unshuffle(func: Func, input: Slab, downscale_factor: int) -> Any:
    """torch's pixel_unshuffle on a slab: r x r pixels become r^2 channels of one; the inverse of `pixel_shuffle`."""
    r, cut = downscale_factor, input.cut
    if any(size % r for size in cut.sizes):
        raise refusal(func, f"the image's sizes {cut.sizes} along the cut dims are not multiples of {r}")
    output_cut = cut.resized(tuple(size // r for size in cut.sizes), f"pixel_unshuffle {place_of_call()}")
    window = SlidingWindow(r, r)
    parts = zip(cut.sizes, cut.grid.parts, strict=True)
    hulls = [[window.hull(out) for out in cuts(size // r, p)] for size, p in parts]
    return slab(func(fetch(input, cut, rows_of_hulls(cut, hulls)), r), output_cut)


__all__ = ["ImageCut", "interpolate", "pad", "pixel_shuffle", "pixel_unshuffle"]
