"""Counts FLOPs: torch's counter and formulas, plus formulas for CPU kernels that torch 2.13 lacks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

from stretto.nn.preserve import without_fused_transformers


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Count the FLOPs of this block: matrix products, convolutions, attention and LSTMs; other operators count 0.

    A multiplication and an addition are 2 FLOPs. Call `get_total_flops()` on the yielded counter afterwards. torch's
    fused transformer kernel is off in the block, as the counter would count it as 0. Compiled modules run uncompiled:
    up to torch 2.13, torch.compile never compiles a module whose first call ran under a dispatch mode.
    """
    with without_fused_transformers():
        counter = FlopCounterMode(display=False, custom_mapping=CPU_KERNELS)
        counter.mod_tracker = NoModuleTracker()  # type: ignore[assignment]
        with torch.compiler.set_stance("force_eager"), counter:
            yield counter


class NoModuleTracker:
    """Replaces the counter's module tracker, which FLOPs per module need and totals do not.

    torch's tracker fails an assertion on a module that returns a view of a parameter under no_grad (torch 2.13).
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> "NoModuleTracker":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOPs of softmax(Q K') V from shapes [N, H, T, d], by torch's own formula; K and V may have fewer heads."""
    flops: int = sdpa_flop_count(query, shape_per_head(query, key), shape_per_head(query, value))  # type: ignore[no-untyped-call]
    return flops


def attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOPs of the backward of softmax(Q K') V, by torch's own formula."""
    key, value = shape_per_head(query, key), shape_per_head(query, value)
    flops: int = sdpa_backward_flop_count(gradient, query, key, value)  # type: ignore[no-untyped-call]
    return flops


def shape_per_head(query: Any, shape: Any) -> tuple[int, ...]:
    """The shape of keys or values repeated for each query head: torch 2.11's formula takes no grouped queries."""
    return (shape[0], query[1], *shape[2:])


def recurrence(x: Any, weight: Any, recurrent: Any, *_: Any, **__: Any) -> int:
    """FLOPs of one LSTM layer in one direction, from the shapes of x [T, N, d] and the weights [4h, d] and [4h, h]."""
    return int(2 * x[0] * x[1] * weight[0] * (weight[1] + recurrent[1]))


def recurrence_backward(*shapes: Any, **named: Any) -> int:
    """FLOPs of an LSTM layer's backward: twice the forward's, for the gradients of inputs and of weights."""
    return 2 * recurrence(*shapes, **named)


_aten = torch.ops.aten
CPU_KERNELS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    _aten.mkldnn_rnn_layer: recurrence,
    _aten.mkldnn_rnn_layer_backward: recurrence_backward,
}
FORMULAS: dict[Any, Any] = dict(flop_registry)
for _kernel, _formula in CPU_KERNELS.items():
    FORMULAS[_kernel] = shape_wrapper(_formula)  # type: ignore[no-untyped-call]


def flops_of(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of one call of an operator (an OpOverload), by the formulas that `counting` uses; 0 without a formula."""
    formula = FORMULAS.get(operator._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
