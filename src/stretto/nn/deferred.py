"""Parameters whose values are read, or drawn, only in the process that holds their stage.

A placeholder has a shape and a dtype, and takes one number of memory: all its elements are the same one. A model of
placeholders can be split, and its stages counted, without room for its weights.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from stretto.errors import UsageError
from stretto.nn.preserve import unique


class RemoteStage(nn.Module):
    """A stage of another process, without parameters here; a call raises UsageError that names its worker."""

    def __init__(self, stage: int, worker: int) -> None:
        super().__init__()
        self.stage = stage
        self.worker = worker

    def forward(self, *inputs: Any) -> NoReturn:
        """Raise UsageError: the stage runs in its worker's process only."""
        raise UsageError(
            f"stage {self.stage} lives in the process of worker {self.worker}: use trainer.evaluate, or "
            "trainer.gather() and load the weights into a model of your own on rank 0"
        )

    def extra_repr(self) -> str:
        return f"stage {self.stage} on worker {self.worker}"


M = TypeVar("M")


class Source(Protocol):
    """Where a model's values come from."""

    def fill(self, parameters: Sequence[nn.Parameter], *, mapped: bool = False) -> None:
        """Give placeholders of the model their values: `parameter.data` becomes a tensor of its own.

        `mapped`: values that are only read may stay in their files, whose pages come and go as memory allows.
        """


_sources = WeakIdKeyDictionary()  # parameter -> Source, of each placeholder


def defer(model: nn.Module, source: Source) -> None:
    """Put a placeholder on the CPU in place of each parameter on the meta device; ties stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    value = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                    made[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
                    _sources[made[id(parameter)]] = source
                module._parameters[name] = made[id(parameter)]


def forget_values(modules: Iterable[nn.Module], kept: Iterable[nn.Module]) -> None:
    """Leave one number of memory to each parameter of `modules` that no module in `kept` holds.

    There is no way back: whoever holds such a parameter sees zeros of its shape.
    """
    needed = {id(parameter) for module in kept for parameter in module.parameters()}
    for parameter in {id(p): p for module in modules for p in module.parameters()}.values():
        if id(parameter) not in needed and parameter not in _sources:
            parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)


def placeholders(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The placeholders among the parameters of modules, each once."""
    found = {id(p): p for module in modules for p in module.parameters() if p in _sources}
    return list(found.values())


def fill(module: nn.Module, *, mapped: bool = False) -> None:
    """Give the placeholders of a module their values; `mapped`: they are only read, and may stay in their files."""
    for parameter in _give_values(placeholders([module]), mapped=mapped):
        del _sources[parameter]


def _give_values(waiting: list[nn.Parameter], *, mapped: bool = False) -> list[nn.Parameter]:
    for source in {id(_sources[p]): _sources[p] for p in waiting}.values():
        source.fill([p for p in waiting if _sources[p] is source], mapped=mapped)
    return waiting


def deep_copy(modules: M) -> M:
    """A deep copy of a module, or of several in lists and tuples: with values where these have placeholders."""
    found = unique([module for module in tree_flatten(modules)[0] if isinstance(module, nn.Module)])
    memo = {
        id(tensor): as_fake(tensor, tensor.fake_mode)
        for _, _, tensor in held(found)
        if isinstance(tensor, FakeTensor)  # its own copy warns
    }
    with filled(found):
        return copy.deepcopy(modules, memo)


@contextmanager
def filled(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Placeholders of modules have their values in this block, and give the memory back after it."""
    waiting = placeholders(modules)
    before = [parameter.data for parameter in waiting]
    _give_values(waiting)
    try:
        yield
    finally:
        for parameter, one_number in zip(waiting, before, strict=True):
            parameter.data = one_number


def without_values(modules: Sequence[nn.Module]) -> FakeTensorMode:
    """Exchange all parameters and buffers for fake tensors; return the mode in which the modules compute with them.

    There is no way back.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}
    for own, name, tensor in held(modules):
        if id(tensor) not in fakes:
            fakes[id(tensor)] = as_fake(tensor, mode)
        own[name] = fakes[id(tensor)]
    return mode


@contextmanager
def faked(modules: Sequence[nn.Module]) -> Iterator[bool]:
    """If modules have placeholders, compute without numbers in this block; whether that is so."""
    if not placeholders(modules):
        yield False
        return
    before = held(modules)
    try:
        with without_values(modules):
            yield True
    finally:
        for own, name, tensor in before:
            own[name] = tensor


def held(modules: Sequence[nn.Module]) -> list[tuple[dict[str, Any], str, Tensor]]:
    """The tensors that modules hold: each in which dict, under which name."""
    return [
        (own, name, tensor)
        for module in unique(modules)
        for own in (module._parameters, module._buffers)
        for name, tensor in own.items()
        if tensor is not None
    ]


def as_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A tensor's fake, of the same kind; that of a placeholder is as if it had a value."""
    with mode:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
