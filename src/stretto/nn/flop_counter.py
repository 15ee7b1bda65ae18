"""FLOPs: torch's counter and its formulas, with the kernels of the CPU that it does not know (torch 2.13)."""

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


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Count the FLOPs of what runs inside: matrix products, convolutions, attention, LSTM; the rest counts nothing.

    A multiplication and an addition are two. Ask `get_total_flops()` of what this gives, afterwards. torch's fused
    transformer kernel is switched off meanwhile: it is not counted, and a layer would cost 0. What is compiled runs as
    if it were not: up to torch 2.13 torch.compile gives up for good on what first ran under a dispatch mode.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        counter = FlopCounterMode(display=False, custom_mapping=CPU_KERNELS)
        counter.mod_tracker = NoModuleTracker()  # type: ignore[assignment]
        with torch.compiler.set_stance("force_eager"), counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


class NoModuleTracker:
    """Stands for the counter's tracker of modules: only totals are asked for.

    torch's own asserts on a module that returns a view of a parameter while no gradients are recorded (torch 2.13).
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> "NoModuleTracker":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOPs of softmax(Q K') V from shapes [N, H, T, d], by torch's own formula; K and V may have fewer heads."""
    flops: int = sdpa_flop_count(query, each_head(query, key), each_head(query, value))  # type: ignore[no-untyped-call]
    return flops


def attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOPs of attention's backward, by torch's own formula."""
    key, value = each_head(query, key), each_head(query, value)
    flops: int = sdpa_backward_flop_count(gradient, query, key, value)  # type: ignore[no-untyped-call]
    return flops


def each_head(query: Any, shape: Any) -> tuple[int, ...]:
    """Keys or values for each head of the queries: torch 2.11's formula knows no groups of heads."""
    return (shape[0], query[1], *shape[2:])


def recurrence(x: Any, weight: Any, recurrent: Any, *_: Any, **__: Any) -> int:
    """FLOPs of one LSTM layer in one direction from shapes: x [T, N, d], weights [4h, d] and [4h, h]."""
    return int(2 * x[0] * x[1] * weight[0] * (weight[1] + recurrent[1]))


def recurrence_backward(*shapes: Any, **named: Any) -> int:
    """An LSTM layer's backward: every product of the forward twice, for its input and for its weight."""
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
    """FLOPs of one call of an operator (an OpOverload), by the formulas that `counting` uses; 0 where there is none."""
    formula = FORMULAS.get(operator._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
