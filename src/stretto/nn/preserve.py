"""Contexts for running a model to inspect it: modes, buffers, attributes and random generators are restored."""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.nn.devices import forked_generators

PLAIN = (bool, int, float, str, bytes, type(None))
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
COPIED = 1 << 26  # bytes of parameters that are copied before a model is looked at


@contextmanager
def modes_restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """After this block every submodule has its former mode, training or evaluation, frozen norms included."""
    modes = [(module, module.training) for root in modules for module in root.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode in this block; afterwards as before."""
    with modes_restored(modules):
        for root in modules:
            root.eval()
        yield


@contextmanager
def python_generators_restored() -> Iterator[None]:
    """After this block the generators of Python's random and of numpy.random are as before."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class Held:
    """What modules hold as attributes, to be put back: plain values, and the contents of lists, dicts and tensors."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._attributes = [(vars(module), attributes(module)) for module in modules]
        self._contents: dict[int, tuple[Any, Any]] = {}
        for _, held in self._attributes:
            self._remember([*held.values()])

    def _remember(self, value: Any) -> None:
        if id(value) in self._contents:
            return
        if isinstance(value, Tensor) and not value.is_meta:
            self._contents[id(value)] = value, (value._version, value.detach().clone())
        elif isinstance(value, CONTAINERS):
            self._contents[id(value)] = value, copy.copy(value)
            for part in value.values() if isinstance(value, dict) else value:
                self._remember(part)

    def put_back(self) -> None:
        """Put back what was held."""
        for now, before in self._attributes:
            now.update(before)
        for value, before in self._contents.values():
            if isinstance(value, Tensor):
                version, content = before
                if value._version != version:
                    with torch.no_grad():
                        value.copy_(content)
            elif isinstance(value, dict | set):
                value.clear()
                value.update(before)
            elif isinstance(value, list | deque):
                value.clear()
                value.extend(before)


def attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that are plain values, tensors or containers, but for those of every module."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in OF_EVERY_MODULE and isinstance(value, (*PLAIN, Tensor, *CONTAINERS))
    }


@contextmanager
def weights_restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """After this block parameters that it wrote to, as a moving average in a forward does, have their values again.

    They are copied beforehand up to COPIED bytes, frozen ones first. Raises UsageError for others that were changed.
    """
    named = {id(p): (name, p) for root in modules for name, p in root.named_parameters() if has_own_memory(p)}
    kept: list[tuple[str, nn.Parameter, int, Tensor | None]] = []
    room = COPIED
    for name, parameter in sorted(named.values(), key=lambda pair: pair[1].requires_grad):
        room -= parameter.nbytes
        kept.append((name, parameter, parameter._version, parameter.detach().clone() if room >= 0 else None))
    lost = []
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter, version, value in kept:
                if parameter._version != version:
                    lost += [name] if value is None else []
                    parameter.copy_(parameter if value is None else value)
    if lost:
        raise UsageError(
            f"the model's forward changes its parameter {lost[0]} in place, and the model is too large to put it back: "
            "split the same network in a smaller configuration, or keep what moves in buffers"
        )


def has_own_memory(parameter: nn.Parameter) -> bool:
    """Whether a parameter has values, whole and each its own: no placeholder, share or sparse tensor."""
    if parameter.is_meta or parameter.layout is not torch.strided or type(parameter.data) is not Tensor:
        return False
    return parameter.untyped_storage().nbytes() >= parameter.nbytes


@contextmanager
def undisturbed(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Evaluation mode in this block; afterwards modes, weights, buffers, attributes and generators are as before.

    The caller may switch modules to training mode in the block, and resets gradients itself.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in unique(modules)
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    held = Held(unique(modules))
    grad_enabled = torch.is_grad_enabled()
    with ExitStack() as stack:
        for context in (forked_generators(device), python_generators_restored(), evaluating(modules)):
            stack.enter_context(context)
        stack.enter_context(weights_restored(modules))
        try:
            yield
        finally:
            torch.set_grad_enabled(grad_enabled)  # a forward that switches it may have been cut short
            held.put_back()  # it may count its calls
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    module._buffers[name] = buffer  # the same object: the forward may have assigned another
                    if not buffer.is_meta and not torch.equal(buffer, value):
                        buffer.copy_(value)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """In this block calls of the module, hooks apart, run `forward`."""
    attributes = vars(module)
    own = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del attributes["forward"]
        else:
            attributes["forward"] = own


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards every module has its former attributes: tracers add constants, and forwards may store values."""
    before, grad_enabled = [(module, dict(vars(module))) for module in model.modules()], torch.is_grad_enabled()
    held = Held([*model.modules()])
    try:
        yield
    finally:
        torch.set_grad_enabled(grad_enabled)
        held.put_back()
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


@contextmanager
def without_fused_transformers() -> Iterator[None]:
    """Without torch's fused transformer kernel, which evaluation takes where no gradient is wanted.

    With a mask of padding nn.TransformerEncoder gives zeros there then, other than in training.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def trainable(model: nn.Module) -> Iterator[None]:
    """In this block every floating-point parameter requires a gradient, frozen ones included."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def unique(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules and all their submodules, each once."""
    return list({id(module): module for root in modules for module in root.modules()}.values())


def device_of(modules: Sequence[nn.Module]) -> torch.device:
    """The device of the modules' first parameter or buffer; the CPU without any."""
    for root in modules:
        for tensor in (*root.parameters(), *root.buffers()):
            return tensor.device
    return torch.device("cpu")


def output_tensors(output: object) -> tuple[Tensor, ...]:
    """The tensors of a module's output: a tensor, or the tensors in a tuple."""
    return tuple(t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, Tensor))
