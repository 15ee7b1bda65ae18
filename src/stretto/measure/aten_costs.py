"""What torch's operators do, one by one: which sort they are, their FLOPs, and the bytes they read and write."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.measure.kernels import Kernel, kernels_of, kind_of
from stretto.nn.flop_counter import flops_of
from stretto.nn.memory_limit import bytes_of

SORTS = (  # what stands in an operator's name, the first that fits
    ("attention-2022", ("attention_2022",)),
    ("attention", ("scaled_dot_product", "flash_attention", "efficient_attention")),
    ("convolution", ("conv",)),
    ("batch-norm", ("batch_norm",)),
    ("layer-norm", ("layer_norm", "group_norm", "rms_norm")),
    ("embedding", ("embedding",)),
    ("pooling", ("pool",)),
    ("recurrence", ("rnn", "lstm", "gru")),
    ("transcendental", ("gelu", "silu", "softmax", "tanh", "sigmoid", "exp", "log", "softplus", "mish", "erf")),
)
PRODUCTS = (  # whole names
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "mv",
    "addmv",
    "dot",
    "linear",
)
PICKING = ("embedding", "gather")
ADDING = ("scatter_add_",)
SHORT = ("exp", "log", "erf")
FREE = ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "item")


# What causal kernels compute beside the half: tiles that the diagonal cuts, and waves that end unevenly. Forwards of
# 1,024 to 16,384 tokens take 210, 260, 284, 230 and 130 tokens' work more than half of what they take without a mask
# (github.com/triton-lang/triton/pull/1917, A100), FlashAttention-2's of 2,048 156 to 278 (github.com/Dao-AILab/
# flash-attention/issues/1310, H20). Backwards of the former kernel take more: 330 to 730.
CAUSAL_TOKENS = 220


class Done(NamedTuple):
    """What ran: [calls, FLOPs, bytes] by sort, and kernel by kernel."""

    sorts: Mapping[str, Sequence[float]]
    kernels: Sequence[Kernel] = ()


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what runs inside, by sort: [calls, FLOPs, bytes]. Views are free, and what only makes room."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0])
        self.kernels: list[Kernel] = []

    @property
    def all(self) -> Done:
        """All that has run so far."""
        return Done(dict(self.done), tuple(self.kernels))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, and asks it at each operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and write down what it does."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if counts(func):
            name = func._schema.name.partition("::")[2]
            flops = causal_share(func, args, kwargs) * flops_of(func, args, kwargs, made)
            kind = kind_of(name, sort(name), args, kwargs)
            operator = Kernel(sort(name), flops, moved(name, args, kwargs, made), kind=kind)
            taken = self.done[operator.sort]
            for index, amount in enumerate((1, operator.flops, operator.bytes)):
                taken[index] += amount
            self.kernels += kernels_of(name, operator, args, made)
        return made


@cache
def counts(func: Any) -> bool:
    """Whether an operator does any work: views are free, and what only makes room."""
    space, _, name = func._schema.name.partition("::")
    return space != "prim" and name not in FREE and not is_view(func)


@cache
def sort(name: str) -> str:
    """Which sort of operator a name belongs to; element-wise, with sums and copies, where no other fits.

    >>> sort("native_batch_norm_backward"), sort("addmm"), sort("gelu"), sort("expand_copy")
    ('batch-norm', 'linear', 'transcendental', 'elementwise')
    """
    if name in PRODUCTS:
        return "linear"
    words = name.removeprefix("_").split("_")
    return next((kind for kind, parts in SORTS if any(fits(part, name, words) for part in parts)), "elementwise")


def fits(part: str, name: str, words: Sequence[str]) -> bool:
    """Whether a name holds a part: exp is no part of expand, log none of logical."""
    return part in words if part in SHORT else part in name


def causal_share(func: Any, args: Any, kwargs: Any) -> float:
    """The share of an operator's FLOPs that a GPU computes: of fused causal attention a half and CAUSAL_TOKENS a token.

    >>> causal_share(torch.ops.aten.mm.default, (), {})
    1
    """
    given = arguments_of_attention(func, args, kwargs)
    return min(1, 0.5 + CAUSAL_TOKENS / given["key"].shape[2]) if given.get("is_causal") else 1


def arguments_of_attention(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a fused attention, or of its backward, by name; none of other operators."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs if {"is_causal", "query", "key"} <= {*names} else {}


def is_view(func: Any) -> bool:
    """Whether an operator gives back its operand's memory, unchanged."""
    returned = func._schema.returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)


def moved(name: str, args: Any, kwargs: Any, made: Any) -> int:
    """Bytes read and written; of a tensor from which, or to which, some numbers are picked only those."""
    if name in PICKING:
        return nbytes(args[1:]) + 2 * nbytes(made)
    if name in ADDING:
        return nbytes(args[1:]) + 2 * nbytes(args[-1])
    return nbytes((args, kwargs)) + nbytes(made)


def nbytes(values: Any) -> int:
    """Bytes of the elements of all tensors in a nest of values."""
    return bytes_of(tensors(values))


def tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in a nest of values."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, tuple | list | dict):
                yield from tensors(value)
    elif isinstance(values, dict):
        yield from tensors(tuple(values.values()))
