"""A batch as users write it, and as stages take it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.errors import UsageError, nearest
from stretto.options.checks import shown

IGNORED = -100
"""A target that asks for nothing, as torch.nn.functional.cross_entropy has it: padding, pixels of no class."""
FORMS = "a tensor or a NumPy array, a tuple or list of them, or a dict of them by the names of stage 0's arguments"


class Named(tuple[Tensor, ...]):
    """The tensors of a batch that came as a dict: stage 0 takes each by its name, `names[i]` for the i-th."""

    names: tuple[str, ...]

    def __new__(cls, tensors: Iterable[Tensor], names: Sequence[str] = ()) -> "Named":
        """`names` is left out where copying calls this: they follow as an attribute."""
        made = super().__new__(cls, tensors)
        made.names = tuple(names)
        return made


def like(inputs: Sequence[Tensor], tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """A tuple of `tensors`, with the names that `inputs` have, if any."""
    return Named(tensors, inputs.names) if isinstance(inputs, Named) else tuple(tensors)


def call(module: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """What a module makes of a batch's tensors, each by position, or by its name."""
    if isinstance(inputs, Named):
        return module(**dict(zip(inputs.names, inputs, strict=True)))
    return module(*inputs)


def inputs_of(x: Any, name: str = "x") -> tuple[Tensor, ...]:
    """The tensors of x, which is one of FORMS. Raises UsageError for anything else, and for what has no numbers."""
    if isinstance(x, Tensor):
        return (with_numbers(x, name),)
    if isinstance(x, Mapping):
        if not all(isinstance(key, str) for key in x):
            raise UsageError(
                f"{name} is a dict with the keys {shown(list(x))}: give stage 0's arguments by their names"
            )
        parts = {f"{name}[{key!r}]": part for key, part in x.items()}
    elif isinstance(x, tuple | list):
        parts = {f"{name}[{index}]": part for index, part in enumerate(x)}
    else:
        parts = {name: x}
    if not parts:
        raise UsageError(f"{name} is an empty {type(x).__name__}: give {FORMS}")
    tensors = [with_numbers(as_tensor(part, where), where) for where, part in parts.items()]
    return Named(tensors, tuple(x)) if isinstance(x, Mapping) else like(x, tensors)


def as_tensor(value: Any, name: str) -> Tensor:
    """A tensor, or an array as one that shares its memory where it can."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray):
        raise UsageError(f"{name} is {shown(value)}, a {type(value).__name__}: give {FORMS}")
    usable = value.flags.writeable and min(value.strides, default=0) >= 0
    try:
        return torch.from_numpy(value if usable else value.copy())
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} is an array that torch cannot take ({error}): give an array of numbers") from error


def with_numbers(tensor: Tensor, name: str) -> Tensor:
    """The tensor. Raises UsageError for one on the meta device, which has a shape and nothing in it."""
    if tensor.is_meta:
        raise UsageError(f"{name} is {shown(tensor)}: such a tensor holds no numbers; give one on the CPU or a GPU")
    return tensor


def inputs_on(x: Any, device: torch.device) -> tuple[Tensor, ...]:
    """The tensors of x on the device; x is one of FORMS."""
    tensors = inputs_of(x)
    return like(tensors, [tensor.to(device) for tensor in tensors])


def target_of(y: Any, name: str = "y") -> Any:
    """The target, arrays as tensors and lists as tuples, in a dict too; any other thing is the loss's own business.

    Raises UsageError for a sparse tensor, which cannot be cut into micro-batches.
    """
    if isinstance(y, Tensor):
        if y.layout != torch.strided:
            raise UsageError(f"{name} is a sparse tensor, {shown(y)}: give a dense one, {name}.to_dense()")
        return with_numbers(y, name)
    if isinstance(y, np.ndarray):
        return as_tensor(y, name)
    if isinstance(y, tuple | list):
        return tuple([target_of(part, f"{name}[{index}]") for index, part in enumerate(y)])
    if isinstance(y, Mapping):
        return {key: target_of(part, f"{name}[{key!r}]") for key, part in y.items()}
    return y


def target_on(y: Any, device: torch.device) -> Any:
    """The target, as `target_of` gives it, on the device."""
    return moved(target_of(y), device)


def moved(target: Any, device: torch.device) -> Any:
    """Every tensor of a target on the device."""
    if isinstance(target, Tensor):
        return target.to(device)
    if isinstance(target, tuple):
        return tuple([moved(part, device) for part in target])
    if isinstance(target, dict):
        return {key: moved(part, device) for key, part in target.items()}
    return target


def cut(value: Any, pieces: int, what: str = "micro-batches") -> list[Any]:
    """Cut a tensor, or a tuple or dict of tensors, along the first dimension as torch.tensor_split cuts."""
    if pieces == 1:
        return [value]
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise UsageError(f"{shown(value)} is {value.layout}: only dense tensors can be cut into {pieces} {what}")
    if isinstance(value, Tensor) and value.dim():
        return list(value.tensor_split(pieces))
    if isinstance(value, tuple) and value:
        return [like(value, each) for each in zip(*(cut(part, pieces, what) for part in value), strict=True)]
    if isinstance(value, dict) and value:
        parts = zip(*(cut(part, pieces, what) for part in value.values()), strict=True)
        return [dict(zip(value, each, strict=True)) for each in parts]
    raise UsageError(
        f"a target of type {type(value).__name__} cannot be cut into {pieces} {what}: give a tensor, or "
        "a tuple or dict of tensors, whose first dimension is the examples'"
    )


def check_examples(x: tuple[Tensor, ...] | None, y: Any, *, cuts: bool) -> int | None:
    """How many examples x and y are of; None if that is not known.

    Raises UsageError unless it is the same number, at least one. None is a part that is not read here.

    What is not cut is looked at as far as it has to be: x's first tensor, and y where it is a single tensor, which may
    then hold several entries for each example in one dimension.
    """
    if x is not None and len(x) == 1 and isinstance(y, Tensor) and x[0].dim() and y.dim():
        count = x[0].shape[0]
        if 0 < count == y.shape[0]:
            return count
    examples = None if x is None else size(x[0], "x" if len(x) == 1 else "x's first tensor")
    if cuts and x is not None:
        for number, tensor in enumerate(x):
            if size(tensor, f"x[{number}]") != examples:
                raise UsageError(f"x holds tensors of {shapes(x)}: they are cut along their first dimension, the "
                                 "examples', which has to be as long in all of them")  # fmt: skip
    for where, part in tensors_in(y, "y") if cuts or isinstance(y, Tensor) else ():
        own = size(part, where)
        entries_each = not cuts and examples is not None and not (own % examples and examples % own)
        if examples is not None and own != examples and not entries_each:
            raise UsageError(
                f"x has {examples} examples and {where} has {own} ({shapes([part])}): the first dimension of both is "
                "the examples'; a target for each token is [N, T], and the loss may flatten it"
            )
        examples = own
    return examples


def size(tensor: Tensor, name: str) -> int:
    """The number of examples of a tensor; UsageError if there are none."""
    if not tensor.dim():
        raise UsageError(f"{name} is a single number without dimensions: its first dimension has to be the examples'")
    if not tensor.shape[0]:
        raise UsageError(f"{name} has the shape {list(tensor.shape)}, a batch without examples: leave it out")
    return tensor.shape[0]


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a target, each with its place."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple | dict):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(part, f"{name}[{key!r}]")


def shapes(tensors: Iterable[Tensor]) -> str:
    """For messages."""
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)


def check_names(inputs: tuple[Tensor, ...], known: Mapping[str, bool] | None, what: str) -> None:
    """Raise UsageError for names that a stage's forward does not take, or lacks.

    `known` says of each of its arguments whether it must be given; None if it takes any.
    """
    if isinstance(inputs, Named) and known is not None:
        for name in inputs.names:
            if name not in known:
                raise UsageError(
                    f"x names {name!r}, no argument of {what}: {nearest(name, known)}; or give a tensor, or a tuple of "
                    "tensors in the order of the arguments"
                )
        missing = [name for name, required in known.items() if required and name not in inputs.names]
        if missing:
            raise UsageError(f"x names {', '.join(inputs.names)}, but {what} also needs {', '.join(missing)}")


def several(value: Any) -> tuple[Any, ...]:
    """One value as a tuple; a tuple of several as it is."""
    return value if isinstance(value, tuple) else (value,)


def first_size(value: Any) -> int:
    """The first dimension of a batch's first tensor; 0 where there is none."""
    if isinstance(value, Tensor | np.ndarray):
        return int(value.shape[0]) if value.ndim else 0
    if isinstance(value, Mapping):
        value = list(value.values())
    return first_size(value[0]) if isinstance(value, tuple | list) and value else 0


def entries(value: Any, examples: int) -> int:
    """How many entries a batch's first tensor has, which is about what a loss counts; `examples` without a tensor."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        value = list(value.values())
    return entries(value[0], examples) if isinstance(value, tuple | list) and value else examples
