"""An optimizer's step that leaves the former weights where they are, without copying them beforehand."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode

# Their steps change parameters themselves, never a view of their memory.
OPTIMIZERS = (SGD, Adam, AdamW)
LARGE = 1 << 17  # bytes of a parameter; a smaller one is copied faster than the step's operations are looked at

aten = torch.ops.aten
OUT_OF_PLACE: Mapping[Any, Any] = {
    aten.add_.Tensor: aten.add.out,
    aten.mul_.Tensor: aten.mul.out,
    aten.addcdiv_.default: aten.addcdiv.out,
}


def step_elsewhere(parameters: Sequence[nn.Parameter], step: Callable[[], object]) -> None:
    """Call `step`, whose changes of the parameters do not reach tensors that share their storage now.

    A copy before the step would read and write each weight once more. Where the step is that of a known optimizer, the
    first operation that changes a parameter writes to fresh storage instead, with the same numbers to the last bit.
    Otherwise the parameters are copied.
    """
    known = is_known(step)
    large: list[nn.Parameter] = []
    for parameter in parameters:
        if known and parameter.nbytes >= LARGE and not parameter.is_complex():  # those are changed by a view
            large.append(parameter)
        else:
            move(parameter)
    with WritesElsewhere(large) if large else nullcontext():
        step()


def is_known(step: Callable[[], object]) -> bool:
    """Whether `step` is the own step of one of OPTIMIZERS, without a user's code in front of it."""
    optimizer: Any = getattr(step, "__self__", None)
    if type(optimizer) not in OPTIMIZERS:
        return False
    own = getattr(step, "__func__", None) is type(optimizer).step or hasattr(step, "_wrapped_by_lr_sched")
    return own and not (optimizer._optimizer_step_pre_hooks or torch_optimizer._global_optimizer_pre_hooks)


def move(parameter: Tensor) -> None:
    """Give the parameter a copy of its values as its storage."""
    parameter.data = parameter.data.clone()


def is_dense(argument: object) -> bool:
    """Whether it is no sparse tensor."""
    return not isinstance(argument, Tensor) or argument.layout == torch.strided


class WritesElsewhere(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The first operation that changes one of `parameters` gives it fresh storage with the result."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waiting = {id(parameter): parameter for parameter in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for each operation below autograd; for all but those first ones, it is run as it is."""
        kwargs = kwargs or {}
        if not (self._waiting and func._schema.is_mutable):
            return func(*args, **kwargs)
        first = self._waiting.get(id(args[0])) if args else None
        if first is not None and func in OUT_OF_PLACE and all(map(is_dense, args)):
            del self._waiting[id(first)]
            fresh = torch.empty_like(first)
            OUT_OF_PLACE[func](*args, **kwargs, out=fresh)
            first.data = fresh
            return first
        for argument in args:  # of a fused step, or one on lists of tensors
            for tensor in argument if isinstance(argument, list | tuple) else (argument,):
                parameter = self._waiting.pop(id(tensor), None)
                if parameter is not None:
                    move(parameter)
        return func(*args, **kwargs)
