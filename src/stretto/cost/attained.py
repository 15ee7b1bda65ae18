"""What operators attain of a device's peaks, and what each takes beside: seconds of kernels one by one. No torch here.

A kernel takes the longest of its FLOPs, its bytes and its random numbers, and `per_kernel` beside; a matrix product
(FLOPs^p + bytes^p)^(1/p) seconds with p = `overlap`, since it neither computes all the while nor moves bytes:

    bytes / (memory_bandwidth x memory)                            or x its kind's share of `memory_of`
    random numbers / random_numbers                                dropout
    FLOPs / (peak x share)                                         attention, and products whose sizes are not known
    waves x (inner / split) x step + partial sums                  matrix products, and convolutions as such
    numbers of a block / block_numbers                             batch norms of contiguous images, a block a channel
    numbers of all blocks / multiprocessor_numbers, in waves       the same
    numbers compared / pooled_numbers                              max pools

A product of size rows x columns x inner is computed in tiles, `multiprocessors` of them at a time, in waves; the least
over TILES, and over splits of the inner size, counts. A step of a tile is the longer of its FLOPs at a multiprocessor's
share of the peak, and of its operands at a multiprocessor's share of `cache_bandwidth`: small tiles read more for each
FLOP. Splits write their sums in float32 and read them again. So small products attain less, with no figures but those
of a data sheet.

A convolution on tensor cores (TENSOR_CORES) is such a product, and waits for transposes of contiguous images, by their
bytes; one in float32 takes images as they are (measure/kernels.py has the sources). It takes the longer of its FLOPs
and its bytes: cuDNN then has fewer FLOPs for windows of 3 x 3 than are counted (Winograd), which is not priced.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from stretto.cost.layer_table import Kernels, Work
from stretto.errors import UsageError, nearest

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))  # of cuBLAS
SPLITS = (1, 2, 4, 8, 16, 32)  # of the inner size, where there are fewer tiles than multiprocessors
SHORTEST = 64  # of the inner size, that a tile takes at once
BYTES = {"float64": 8, "float32": 4, "tfloat32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
AUTOCAST = "-autocast"  # behind the dtype that products have under torch.autocast, beside float32 weights
TENSOR_CORES = ("tfloat32", "bfloat16", "float16", "float8")  # dtypes of products
SPEEDS = ("cache_bandwidth", "random_numbers", "block_numbers", "multiprocessor_numbers", "pooled_numbers")
KINDS = ("layer-norm", "sum", "gelu")  # of kernels, as measure/kernels.py has them
SECONDS = ("per_kernel", "per_launch", "per_gradient", "per_reduction", "per_update")
OPERATORS = (  # sorts of operators, as measure/aten_costs.py has them
    "attention", "attention-2022", "convolution", "batch-norm", "layer-norm", "embedding", "pooling", "recurrence",
    "transcendental", "linear", "elementwise",
)  # fmt: skip
SHARES = ("memory", "transposes", "products", "convolutions", "attention", "attention_2022")


@dataclass(frozen=True, kw_only=True)
class Attained:
    """What large operators attain of a device's peaks, and the seconds that small ones take beside their work.

    `products`, `convolutions` and `attention` are shares of the peak, `memory` of the memory's bandwidth. `transposes`
    is that of transposes around convolutions, and as `memory` if it is left out; with `plain_products` convolutions of
    1 x 1 need none where contiguous images are aligned. `products_in` has shares of products and convolutions in the
    dtypes whose share is another one. `attention_2022` is that of the first kernels of fused attention, and as
    `attention` if it is left out. `memory_of` has the shares of KINDS of kernels that move fewer bytes a second: layer
    norms, sums over rows (gradients of biases), and GELU by erf. `multiprocessors` compute the tiles of a product, read
    at `cache_bandwidth` bytes/s; without them, products of any size attain their share. `overlap` is 1 for products
    that compute and move bytes in turn; without it they do both at the same time.

    `random_numbers` is how many are drawn a second, for dropout; `block_numbers` how many a block of threads reads and
    writes that takes one at a time, `multiprocessor_numbers` how many do all blocks of a multiprocessor;
    `pooled_numbers` how many a max pool compares. Each kernel takes `per_kernel` seconds beside its work.

    The others are the host's seconds; it runs ahead of the device (`plan/host_lags.py`): `per_launch` for an operator's
    kernel, module and autograd included, or for one of a sort in `per_launch_of`; `per_gradient` for a weight's
    gradient that a backward keeps, `per_reduction` for one that goes into the bucket of a sum among replicas, and
    `per_update` for a weight that an optimizer steps, as `per_launch` if it is left out.
    Raises UsageError for numbers out of range.
    """

    memory: float = 1.0
    products: float = 1.0
    convolutions: float = 1.0
    attention: float = 1.0
    attention_2022: float | None = None
    products_in: Mapping[str, float] = field(default_factory=dict)
    memory_of: Mapping[str, float] = field(default_factory=dict)
    multiprocessors: int | None = None
    cache_bandwidth: float | None = None
    overlap: float | None = None
    random_numbers: float | None = None
    block_numbers: float | None = None
    multiprocessor_numbers: float | None = None
    pooled_numbers: float | None = None
    transposes: float | None = None
    plain_products: bool | None = None
    per_kernel: float = 0.0
    per_launch: float = 0.0
    per_launch_of: Mapping[str, float] = field(default_factory=dict)
    per_gradient: float = 0.0
    per_reduction: float = 0.0
    per_update: float | None = None

    def __post_init__(self) -> None:
        shares = {key: getattr(self, key) for key in SHARES if getattr(self, key) is not None}
        shares |= {f"products_in.{dtype}": share for dtype, share in self.products_in.items()}
        shares |= {f"memory_of.{kind}": share for kind, share in self.memory_of.items()}
        for key, share in shares.items():
            if not 0 < share <= 1:
                raise UsageError(f"{key} = {share:g}: a share of the peak is more than 0, and 1 at most")
        for dtype in self.products_in:
            if dtype not in BYTES:
                raise UsageError(f"products_in.{dtype} is no dtype: {nearest(dtype, BYTES)}")
        for kind in self.memory_of:
            if kind not in KINDS:
                raise UsageError(f"memory_of.{kind} is no kind of kernel: {nearest(kind, KINDS)}")
        seconds = {key: getattr(self, key) for key in SECONDS if getattr(self, key) is not None}
        seconds |= {f"per_launch_of.{sort}": each for sort, each in self.per_launch_of.items()}
        for key, each in seconds.items():
            if not 0 <= each < math.inf:
                raise UsageError(f"{key} = {each:g}: it must be 0 or more seconds")
        for sort in self.per_launch_of:
            if sort not in OPERATORS:
                raise UsageError(f"per_launch_of.{sort} is no sort of operator: {nearest(sort, OPERATORS)}")
        if self.overlap is not None and not self.overlap >= 1:
            raise UsageError(f"overlap = {self.overlap:g}: it must be 1 or more; leave it out for a perfect overlap")
        if self.multiprocessors is not None and self.multiprocessors < 1:
            raise UsageError(f"multiprocessors = {self.multiprocessors}: it must be 1 or more; leave it out instead")
        for key in SPEEDS:
            speed = getattr(self, key)
            if speed is not None and not speed > 0:
                raise UsageError(f"{key} = {speed:g}: it must be more than 0; leave it out instead")

    def in_dtype(self, dtype: str) -> "Attained":
        """What the device attains of the peak of a dtype."""
        share = self.products_in.get(dtype)
        return self if share is None else replace(self, products=share, convolutions=share)

    def with_persistent_norms(self) -> "Attained":
        """What a device attains where layer norms are as quick as a copy."""
        return replace(self, memory_of={kind: share for kind, share in self.memory_of.items() if kind != KINDS[0]})

    def without_host(self) -> "Attained":
        """The rates of a device that never waits for its host to launch kernels, as in a graph of them."""
        return replace(self, per_launch=0.0, per_launch_of={}, per_gradient=0.0, per_reduction=0.0, per_update=0.0)

    def at_speed(self, speed: float) -> "Attained":
        """What a device attains that is `speed` times as fast, its host included."""
        rates = {key: getattr(self, key) * speed for key in SPEEDS if getattr(self, key) is not None}
        seconds = {key: getattr(self, key) / speed for key in SECONDS if getattr(self, key) is not None}
        launches = {sort: each / speed for sort, each in self.per_launch_of.items()}
        return replace(self, **rates, **seconds, per_launch_of=launches)

    def launch_of(self, operator: str) -> float:
        """Seconds of the host for a kernel of a sort of operator."""
        return self.per_launch_of.get(operator, self.per_launch)

    @property
    def update_of_tensor(self) -> float:
        """Seconds of the host for a weight that an optimizer steps."""
        return self.per_launch if self.per_update is None else self.per_update


class DevicePeaks(NamedTuple):
    """A device's peaks: FLOP/s, bytes/s of its memory, the bytes of a number; and whether tensor cores compute."""

    flops: float
    bandwidth: float
    item: int
    tensor_cores: bool


def dtype_of_products(dtype: str) -> str:
    """The dtype whose peak products have: float16 of float16-autocast."""
    return dtype.removesuffix(AUTOCAST)


class KernelSeconds(NamedTuple):
    """Seconds of kernels on the device, and of the host that starts them."""

    device: float
    host: float


def kernel_seconds(work: Work, attained: Attained, peaks: DevicePeaks, examples: float) -> KernelSeconds:
    """Seconds of the operators of one sort, kernel by kernel."""
    kernels = work.kernels or mean_kernels(work)
    device = sum(each.count * one_kernel(work.operator, each, attained, peaks, examples) for each in kernels)
    return KernelSeconds(device, attained.launch_of(work.operator) * sum(each.count for each in kernels))


def mean_kernels(work: Work) -> tuple[Kernels, ...]:
    """The operators as equal kernels, where kernels are not known."""
    if not work.calls:
        return ()
    flops, num_bytes = (
        replace(x, fixed=x.fixed / work.calls, each=x.each / work.calls) for x in (work.flops, work.bytes)
    )
    return (Kernels(work.calls, flops, num_bytes),)


def one_kernel(operator: str, kernel: Kernels, attained: Attained, peaks: DevicePeaks, examples: float) -> float:
    """Seconds of a kernel on the device."""
    flops, moved = kernel.flops.at(examples), kernel.bytes.at(examples)
    rate = peaks.flops * share_of(operator, attained)
    computing = flops / rate if flops else 0.0
    memory = peaks.bandwidth * attained.memory
    if kernel.product is not None and attained.multiprocessors is not None:
        sizes = kernel.product
        amounts = (size.at(examples) for size in (sizes.number, sizes.rows, sizes.columns, sizes.inner))
        cache = peaks.item / attained.cache_bandwidth if attained.cache_bandwidth else 0.0
        computing = product_seconds(*amounts, TileSpeeds(1 / rate, cache, 8 / memory, attained.multiprocessors))
    drawn = kernel.random.at(examples)
    drawing = drawn / attained.random_numbers if attained.random_numbers else 0.0
    moving = moved / (peaks.bandwidth * attained.memory_of.get(kernel.kind, attained.memory))
    transposing = 0.0
    if peaks.tensor_cores and kernel.transposes and not (kernel.plain and attained.plain_products):
        rate = peaks.bandwidth * (attained.transposes or attained.memory)
        transposing = kernel.transposed.at(examples) / rate + kernel.transposes * attained.per_kernel
    is_product = operator == "linear" or (operator == "convolution" and peaks.tensor_cores)
    if is_product and attained.overlap is not None and computing:
        longer: float = (1 + (moving / computing) ** attained.overlap) ** (1 / attained.overlap)
        return computing * longer + attained.per_kernel + transposing
    taking = numbers_seconds(kernel.numbers.at(examples), kernel.blocks, attained)
    return max(computing, moving, drawing, taking) + attained.per_kernel + transposing


def numbers_seconds(numbers: float, blocks: int, attained: Attained) -> float:
    """Seconds of a kernel that takes numbers one at a time: of one multiprocessor with most blocks, or of a pool."""
    if not blocks:
        return numbers / attained.pooled_numbers if attained.pooled_numbers else 0.0
    if attained.block_numbers is None or attained.multiprocessor_numbers is None or attained.multiprocessors is None:
        return 0.0
    most = math.ceil(blocks / attained.multiprocessors)
    return numbers / blocks * max(1 / attained.block_numbers, most / attained.multiprocessor_numbers)


def share_of(operator: str, attained: Attained) -> float:
    """The share of the peak that large operators of a sort attain."""
    if operator == "attention-2022" and attained.attention_2022 is not None:
        return attained.attention_2022
    if operator.startswith("attention"):
        return attained.attention
    return attained.convolutions if operator == "convolution" else attained.products


class TileSpeeds(NamedTuple):
    """Seconds of a FLOP on the whole device, of reading a number from its cache, of a partial sum; and how many tiles
    are computed at a time.
    """

    flop: float
    number: float
    partial: float
    multiprocessors: int


@lru_cache(maxsize=1 << 16)
def product_seconds(number: float, rows: float, columns: float, inner: float, speeds: TileSpeeds) -> float:
    """Seconds of `number` matrix products of one size."""
    best, parallel, sums = math.inf, speeds.multiprocessors, number * rows * columns * speeds.partial
    for height, width in TILES:
        tiles = number * in_tiles(rows, height) * in_tiles(columns, width)
        step = parallel * max(2 * height * width * speeds.flop, (height + width) * speeds.number)
        for split in SPLITS:
            waves = math.ceil(tiles * split / parallel - 1e-9)
            seconds = waves * max(inner / split, SHORTEST) * step + (split * sums if split > 1 else 0.0)
            best = min(best, seconds)
    return best


def in_tiles(size: float, tile: int) -> int:
    """How many tiles cover a size."""
    return math.ceil(size / tile - 1e-9)
