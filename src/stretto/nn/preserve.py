"""Contexts for running a model to inspect it: modes, buffers, attributes and random generators are restored."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.nn.carried_attributes import PLAIN, is_container, own_attributes
from stretto.nn.devices import forked_generators
from stretto.nn.nested import tensors_of


class UnrestoredError(UsageError):
    """A look at a model has changed weights that it could not put back."""


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


def plain_attributes(module: nn.Module) -> dict[str, object]:
    """The numbers, texts and truth values among a module's attributes, but for its mode."""
    return {name: value for name, value in vars(module).items() if isinstance(value, PLAIN) and name != "training"}


@contextmanager
def held_restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """After this block the tensors and containers among the modules' attributes hold what they held.

    A forward may append to a list, write into a dict, or change a tensor that is no buffer: a state that it carries
    from one batch to the next. Objects of other kinds are not looked into.
    """
    containers: list[tuple[Any, Any]] = []
    tensors: list[tuple[Tensor, Tensor, int]] = []
    known: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in known:
            return
        known.add(id(value))
        if isinstance(value, Tensor):
            if not (isinstance(value, nn.Parameter) or value.is_inference()):
                tensors.append((value, value.detach().clone(), value._version))
        elif is_container(value):
            containers.append((value, value.copy()))
            for each in value.values() if isinstance(value, dict) else value:
                visit(each)
        elif isinstance(value, tuple):
            for each in value:
                visit(each)

    for module in unique(modules):
        for value in own_attributes(module).values():
            visit(value)
    try:
        yield
    finally:
        for held, before in containers:
            if not holds(held, before):
                held.clear()
                (held.update if isinstance(held, dict | set) else held.extend)(before)
        with torch.no_grad():
            for tensor, value, version in tensors:
                if tensor._version != version:
                    tensor.copy_(value)


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
        raise UnrestoredError(
            f"the model's forward changes its parameter {lost[0]} in place, and the model is too large to put it back: "
            "split the same network in a smaller configuration, or keep what moves in buffers"
        )


def has_own_memory(parameter: nn.Parameter) -> bool:
    """Whether a parameter has values, whole and each its own: no placeholder, share or sparse tensor."""
    if parameter.is_meta or parameter.layout is not torch.strided or type(parameter.data) is not Tensor:
        return False
    return parameter.untyped_storage().nbytes() >= parameter.nbytes


def holds(container: Any, before: Any) -> bool:
    """Whether a container has the same objects, under the same keys, as its copy from before."""
    parts = [
        [*each.items()] if isinstance(each, dict) else [(None, part) for part in each] for each in (container, before)
    ]
    return len(parts[0]) == len(parts[1]) and all(
        one == two and value is other for (one, value), (two, other) in zip(*parts, strict=True)
    )


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
    attributes = [(vars(module), plain_attributes(module)) for module in unique(modules)]
    grad_enabled = torch.is_grad_enabled()
    generators = forked_generators(device), python_generators_restored()
    with ExitStack() as stack:
        for context in (*generators, evaluating(modules), held_restored(modules), weights_restored(modules)):
            stack.enter_context(context)
        try:
            yield
        finally:
            torch.set_grad_enabled(grad_enabled)  # a forward that switches it may have been cut short
            for now, before in attributes:  # and may count its calls
                now.update(before)
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
    try:
        with held_restored([model]):
            yield
    finally:
        torch.set_grad_enabled(grad_enabled)
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
    return list({id(module): module for root in modules for module in root.modules()}.values())


def device_of(modules: Sequence[nn.Module]) -> torch.device:
    """The device of the modules' first parameter or buffer; the CPU without any."""
    for root in modules:
        for tensor in (*root.parameters(), *root.buffers()):
            return tensor.device
    return torch.device("cpu")


def output_tensors(output: object) -> tuple[Tensor, ...]:
    return tuple(tensors_of(output))
