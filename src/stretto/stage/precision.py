"""How precise a Trainer computes: as its modules are, in bfloat16 with float32 masters, or under autocast."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError, nearest
from stretto.losses import CrossEntropy, Loss
from stretto.nn.batch import like
from stretto.optim import Masters
from stretto.options.checks import shown

PRECISIONS = ("bf16", "bf16-autocast")
LOW = torch.bfloat16


class Precision:
    """`Precision(name)`, name None, "bf16" or "bf16-autocast". Each question has an answer for each of them.

    bf16: weights, activations and the gradients between stages are bfloat16, half the memory and half the messages;
    optimizers step float32 masters, the loss is computed in float32. Norms that track running statistics stay in
    float32, weights included: an average that moves by 10 % of a difference is soon lost in 8 bits, and torch's
    kernels take float32 weights and statistics with bfloat16 inputs, but no other mixture.
    bf16-autocast: weights stay as they are, forwards, heads and losses run under torch.autocast.
    """

    def __init__(self, name: str | None) -> None:
        if name is not None and not (isinstance(name, str) and name in PRECISIONS):
            raise UsageError(
                f"unknown precision {shown(name)}: {nearest(str(name), PRECISIONS)}; None for the modules' own"
            )
        self.name = name

    def masters(self, parts: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> Masters:
        """Masters, with the values of now, for those trainable parameters of the parts that `convert` will lower."""
        if self.name != "bf16":
            return Masters()
        norms = [module for part in parts for module in part.modules() if tracks_statistics(module)]
        kept = {p for norm in norms for p in norm.parameters(recurse=False)}
        low = [p for p in parameters if p.is_floating_point() and p not in kept]
        return Masters({p: nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in low})

    def convert(self, modules: Iterable[nn.Module | None]) -> None:
        """Give the modules the dtypes they are to train in, in place; parameters stay the objects they are."""
        for module in modules:
            if self.name == "bf16" and module is not None:
                convert(module)

    def inputs(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What stage 0 is given."""
        if self.name != "bf16":
            return tensors
        return like(tensors, [tensor.to(LOW) if tensor.is_floating_point() else tensor for tensor in tensors])

    def outputs(self, output: Any) -> Any:
        """What a loss is given of an output."""
        return output if self.name != "bf16" else raised(output)

    def loss(self, loss: Loss) -> Loss:
        """The loss of a low-precision output."""
        if self.name != "bf16":
            return loss
        if isinstance(loss, CrossEntropy):
            return replace(
                loss, function=lambda output, *given, **options: loss.function(raised(output), *given, **options)
            )
        return lambda output, target: loss(raised(output), target)

    def forward(self, device: torch.device) -> AbstractContextManager[object]:
        """What a forward runs in, with its head and its loss; make one for each forward.

        Autocast keeps its casts of the weights until the outermost one is left, be it the user's around many steps: a
        cast must not live through an update.
        """
        torch.clear_autocast_cache()
        return self.autocast(device)()

    def autocast(self, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
        """What makes the context of a forward; the cache of an outer autocast has to be cleared before."""
        return partial(torch.autocast, device.type, dtype=LOW) if self.name == "bf16-autocast" else nullcontext


def convert(module: nn.Module) -> None:
    """Floating-point parameters and buffers to bfloat16, or float32 in norms that track statistics; in place."""
    for part in module.modules():
        dtype = torch.float32 if tracks_statistics(part) else LOW
        for parameter in part.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(part, name, buffer.to(dtype))
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()


def tracks_statistics(module: nn.Module) -> bool:
    """Whether it is a norm with running statistics: torch's batch norms, and instance norms where asked for."""
    return bool(getattr(module, "track_running_stats", False))


def raised(output: Any) -> Any:
    """Tensors of low precision in float32."""
    if isinstance(output, tuple):
        return tuple(raised(part) for part in output)
    return output.float() if isinstance(output, Tensor) and output.dtype == LOW else output
