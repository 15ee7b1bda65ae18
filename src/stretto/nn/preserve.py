"""Running a model only to look at it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stretto.nn.devices import forked_generators


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every submodule is in the mode it was in, frozen norms included."""
    modes = [(module, module.training) for root in modules for module in root.modules()]
    try:
        for root in modules:
            root.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def undisturbed(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Modules in evaluation mode; afterwards modes, buffers (statistics, counters) and generators are as they were.

    Inside, modules may be put into training mode. Gradients are the caller's business.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in unique(modules)
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with forked_generators(device), evaluating(modules):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    module._buffers[name] = buffer  # the very object, should the forward have put another there
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards modules have the attributes that they had: tracers hang constants on them, forwards keep things."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


@contextmanager
def trainable(model: nn.Module) -> Iterator[None]:
    """While it lasts, every parameter wants a gradient, frozen ones too: they may be thawed later."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def unique(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules and all within them, each once."""
    return list({id(module): module for root in modules for module in root.modules()}.values())


def home(modules: Sequence[nn.Module]) -> torch.device:
    """The device of the first parameter or buffer; the CPU if there is none."""
    for root in modules:
        for tensor in (*root.parameters(), *root.buffers()):
            return tensor.device
    return torch.device("cpu")


def members(output: object) -> tuple[Tensor, ...]:
    """The tensors that a module returned, alone or in a tuple."""
    return tuple(t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, Tensor))
