"""The precision a Trainer computes in: that of its modules, bfloat16 with float32 masters, or autocast."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError, nearest
from stretto.heads.head import TrainedLoss
from stretto.losses import CrossEntropy, Loss
from stretto.nn.batch import with_names_of
from stretto.nn.nested import map_tensors
from stretto.optim import Masters
from stretto.options.checks import is_among, refuse_float16, shown

PRECISIONS = ("bf16", "bf16-autocast")
LOW = torch.bfloat16


class Precision:
    """The conversions of weights, inputs, outputs and losses in one precision: None, "bf16" or "bf16-autocast".

    None: everything stays as the modules have it.
    bf16: weights, activations and the gradients between stages are bfloat16, half the memory and half the messages;
    optimizers step float32 masters, the loss is computed in float32, with its own parameters.
    Norms that track running statistics stay in
    float32, weights included: an average that moves by 10 % of a difference is soon lost in 8 bits, and torch's
    kernels take float32 weights and statistics with bfloat16 inputs, but no other mixture.
    bf16-autocast: weights stay as they are, forwards, heads and losses run under torch.autocast.
    """

    def __init__(self, name: str | None) -> None:
        refuse_float16(name)
        if not is_among(name, (None, *PRECISIONS)):
            raise UsageError(
                f"unknown precision {shown(name)}: {nearest(str(name), PRECISIONS)}; None for the modules' own"
            )
        self.name = name

    def masters(self, parts: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> Masters:
        """Float32 masters, with the current values, of the `parameters` that `convert` will turn to bfloat16."""
        if not self.converts:
            return Masters()
        norms = [module for part in parts for module in part.modules() if tracks_statistics(module)]
        kept = {p for norm in norms for p in norm.parameters(recurse=False)}
        kept |= {p for part in parts if isinstance(part, TrainedLoss) for p in part.parameters()}
        low = [p for p in parameters if p.is_floating_point() and p not in kept]
        return Masters({p: nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in low})

    def convert(self, modules: Iterable[nn.Module | None]) -> None:
        """Give the modules the dtypes they are to train in, in place; parameters stay the objects they are."""
        for module in modules:
            if self.converts and module is not None and not isinstance(module, TrainedLoss):
                convert(module)

    @property
    def converts(self) -> bool:
        """Whether modules, inputs, outputs and losses are converted at all."""
        return self.name == "bf16"

    def inputs(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Stage 0's inputs, converted."""
        if not self.converts:
            return tensors
        return with_names_of(tensors, [tensor.to(LOW) if tensor.is_floating_point() else tensor for tensor in tensors])

    def outputs(self, output: Any) -> Any:
        """The output as the loss gets it: in float32 under bf16."""
        return raised(output) if self.converts else output

    def loss(self, loss: Loss) -> Loss:
        """The loss as a function of outputs in this precision."""
        if not self.converts:
            return loss
        if isinstance(loss, CrossEntropy):

            def on_float32(output: Tensor, target: Tensor, **options: Any) -> Tensor:
                output = raised(output)
                if loss.weight is not None:  # not as rounded for the output
                    options["weight"] = loss.weight.to(output.device, output.dtype)
                return loss.function(output, target, **options)

            return loss.computed_by(on_float32)
        return lambda output, target: loss(raised(output), target)

    def forward(self, device: torch.device) -> AbstractContextManager[object]:
        """The context for one forward with its head and its loss; make a new one for each forward.

        Autocast caches its casts of the weights until the outermost autocast ends, which may be the user's, around many
        steps. The cache is cleared here, since no cast may live through an update.
        """
        torch.clear_autocast_cache()
        return self.autocast(device)()

    def autocast(self, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
        """The function that makes a forward's context. Clear the autocast cache before each call, as `forward` does."""
        return partial(torch.autocast, device.type, dtype=LOW) if self.name == "bf16-autocast" else nullcontext


def convert(module: nn.Module) -> None:
    """Convert floating-point parameters and buffers to bfloat16, or to float32 in norms with statistics; in place."""
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
    """Whether a module is a norm with running statistics: torch's batch norms, and instance norms that track them."""
    return bool(getattr(module, "track_running_stats", False))


def raised(output: Any) -> Any:
    """An output, however nested, with its bfloat16 tensors converted to float32."""
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype == LOW else tensor, output)
