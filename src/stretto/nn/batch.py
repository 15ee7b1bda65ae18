"""A batch as users write it (tensors, arrays, tuples, dicts) and as stages take it (a tuple of tensors)."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing import current_process
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.errors import UsageError, nearest
from stretto.nn.input_errors import explaining_misfits
from stretto.options.checks import refuse, shown

IGNORED = -100
"""The target that a loss ignores, torch.nn.functional.cross_entropy's default: padding, pixels of no class."""
NO_TARGETS = (
    "a loss takes an output and a target, so give pairs: (x, x) to an autoencoder, (x, torch.zeros(len(x))) to a loss "
    "that reads no target"
)
NOT_CUT = "a method without micro-batches takes them as they are, without replicas"
FORMS = "a tensor or a NumPy array, a tuple or list of them, or a dict of them by the names of stage 0's arguments"


class Named(tuple[Tensor, ...]):
    """The tensors of a batch given as a dict: stage 0 takes the i-th as keyword argument `names[i]`."""

    names: tuple[str, ...]

    def __new__(cls, tensors: Iterable[Tensor], names: Sequence[str] = ()) -> "Named":
        """`names` has a default for copy and pickle, which call this with the tensors alone and set the names later."""
        named = super().__new__(cls, tensors)
        named.names = tuple(names)
        return named


def counted(target: Tensor) -> Tensor:
    """Which targets are classes: whole numbers from 0. All below are padding, whichever of them a loss leaves out."""
    return target >= 0


class Examples(ABC):
    """A target of another form than tensors, tuples and dicts of them, which knows how to cut itself.

    `size` is the number of examples; None where that is not known, and nothing can be cut.
    """

    size: int | None

    @abstractmethod
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that differ where the target does."""

    @abstractmethod
    def cut(self, pieces: int) -> Sequence["Examples"]:
        """The examples in `pieces` parts, of the sizes that torch.tensor_split gives."""

    @abstractmethod
    def joined(self, other: "Examples") -> "Examples":
        """These examples and then the others."""


def with_names_of(inputs: Sequence[Tensor], tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The `tensors` as a tuple, with the argument names of `inputs` if it is `Named`."""
    return Named(tensors, inputs.names) if isinstance(inputs, Named) else tuple(tensors)


def call(module: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """Call a module with a batch's tensors, as keyword arguments if they are `Named`, else by position."""
    if isinstance(inputs, Named):
        return module(**dict(zip(inputs.names, inputs, strict=True)))
    return module(*inputs)


def inputs_of(x: Any, name: str = "x") -> tuple[Tensor, ...]:
    """The tensors of x, given in one of FORMS. Raises UsageError for other objects and for meta tensors."""
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
    return Named(tensors, tuple(x)) if isinstance(x, Mapping) else with_names_of(x, tensors)


def as_tensor(value: Any, name: str) -> Tensor:
    """A tensor as it is, a NumPy array as a tensor, which shares the array's memory if torch can use that memory."""
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
    """Return the tensor. Raises UsageError if it is on the meta device, where tensors have a shape and no values."""
    if tensor.is_meta:
        raise UsageError(f"{name} is {shown(tensor)}: such a tensor holds no numbers; give one on the CPU or a GPU")
    return tensor


def inputs_on(x: Any, device: torch.device) -> tuple[Tensor, ...]:
    tensors = inputs_of(x)
    return with_names_of(tensors, [tensor.to(device) for tensor in tensors])


def target_of(y: Any, name: str = "y") -> Any:
    """The target with arrays as tensors and lists as tuples, also inside dicts; other objects stay as they are.

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
    return to_device(target_of(y), device)


def to_device(target: Any, device: torch.device) -> Any:
    """A target with every tensor on the device."""
    if isinstance(target, Tensor):
        return target.to(device)
    if isinstance(target, tuple):
        return tuple([to_device(part, device) for part in target])
    if isinstance(target, dict):
        return {key: to_device(part, device) for key, part in target.items()}
    return target


def cut(value: Any, pieces: int, what: str = "micro-batches") -> list[Any]:
    """Cut a tensor, or a tuple or dict of tensors, along the first dimension into `pieces`, as torch.tensor_split does.

    `Examples` cut themselves. Raises UsageError for any other value; `what` names the pieces in the message.
    """
    if pieces == 1:
        return [value]
    if isinstance(value, Examples):
        return list(value.cut(pieces))
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise UsageError(f"{shown(value)} is {value.layout}: only dense tensors can be cut into {pieces} {what}")
    if isinstance(value, Tensor) and value.dim():
        return list(value.tensor_split(pieces))
    if isinstance(value, tuple) and value:
        return [with_names_of(value, piece) for piece in zip(*(cut(part, pieces, what) for part in value), strict=True)]
    if isinstance(value, dict) and value:
        cuts = zip(*(cut(part, pieces, what) for part in value.values()), strict=True)
        return [dict(zip(value, piece, strict=True)) for piece in cuts]
    raise UsageError(
        f"a target of type {type(value).__name__} cannot be cut into {pieces} {what}: give a tensor, or "
        "a tuple or dict of tensors, whose first dimension counts the examples"
    )


def check_examples(x: tuple[Tensor, ...] | None, y: Any, *, cuts: bool) -> int | None:
    """The number of examples in x and y; None if neither is given. Each is None in a process that does not read it.

    Raises UsageError unless x and y have the same number of examples, at least one.

    With `cuts` the batch is cut into micro-batches and every tensor is checked. Otherwise only x's first tensor is, and
    y if it is a single tensor; its first dimension may then hold several entries for each example. Where x's tensors
    have several lengths, as those of graphs, none of them counts examples.
    """
    if x is not None and len(x) == 1 and isinstance(y, Tensor) and x[0].dim() and y.dim():
        count = x[0].shape[0]
        if 0 < count == y.shape[0]:
            return count
    examples = None if x is None else num_examples(x[0], "x" if len(x) == 1 else "x's first tensor")
    if cuts and x is not None:
        for number, tensor in enumerate(x):
            if num_examples(tensor, f"x[{number}]") != examples:
                raise UsageError(
                    f"x holds tensors of {shapes(x)}: they are cut along their first dimension, the "
                    f"examples, so all of them need the same length there; {NOT_CUT}"
                )
    if cuts and isinstance(y, tuple) and len(y) > 1 and len(y) == examples and all(isinstance(p, dict) for p in y):
        raise UsageError(
            f"y is a list of {len(y)} dicts, one for each example: only tensors whose first dimension counts the "
            f"examples can be cut; {NOT_CUT}"
        )
    if not cuts and x is not None and len({tensor.shape[:1] for tensor in x}) > 1:
        return examples
    for where, part in tensors_in(y, "y") if cuts or isinstance(y, Tensor) else ():
        count = num_examples(part, where)
        multiple = not cuts and examples is not None and not (count % examples and examples % count)
        if examples is not None and count != examples and not multiple:
            raise UsageError(
                f"x has {examples} examples and {where} has {count} ({shapes([part])}): the first dimension of both "
                "counts examples; a target for each token is [N, T], and the loss may flatten it"
            )
        examples = count
    return examples


def num_examples(tensor: Tensor, name: str) -> int:
    """The length of a tensor's first dimension. Raises UsageError for a scalar and for a length of 0."""
    if not tensor.dim():
        raise UsageError(
            f"{name} is a single number without dimensions: give a tensor whose first dimension counts the examples"
        )
    if not tensor.shape[0]:
        raise UsageError(f"{name} has the shape {list(tensor.shape)}, a batch without examples: leave it out")
    return tensor.shape[0]


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a target, each with its place as text, such as y[0]['mask']."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple | dict):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(part, f"{name}[{key!r}]")


def shapes(tensors: Iterable[Tensor]) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)


def arguments_of(stage: nn.Module) -> tuple[dict[str, bool] | None, str]:
    """Whether each argument of a stage's forward is required, by name; and the forward's signature, for messages.

    None instead of names if the forward takes **kwargs: then any name will do.
    """
    inner = getattr(stage, "_orig_mod", stage)  # the module that torch.compile wrapped
    parameters = inspect.signature(inner.forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    title = f"stage 0, {type(inner).__name__}.forward({', '.join(p.name for p in named)})"
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None, title
    return {p.name: p.default is p.empty for p in named}, title


def remedy_for_names(names: Sequence[str], known: Iterable[str], required: Sequence[str]) -> str:
    """What to write instead of tensors by `names`, some of which are not in `known`, a forward's arguments.

    `required` are those without a default. A forward that takes a whole dict as its one argument is shown what to take.
    """
    known = list(known)
    unknown = [name for name in names if name not in known]
    remedy = nearest(unknown[0], known)
    if len(required) != 1 or len(unknown) < len(names):
        return remedy
    signature = f"def forward(self, {', '.join(names)})"
    whole = f"a dict of tensors is passed as keyword arguments: write {signature}"
    return whole if len(names) > 1 else f"{remedy}; {whole}"


def check_names(inputs: tuple[Tensor, ...], known: Mapping[str, bool] | None, what: str) -> None:
    """Raise UsageError if a named batch has a name that a stage's forward does not take, or lacks one it requires.

    `known` maps each argument of the forward to whether it is required; None if the forward takes any (**kwargs).
    `what` names the stage in the message.
    """
    if isinstance(inputs, Named) and known is not None:
        for name in inputs.names:
            if name not in known:
                required = [argument for argument, needed in known.items() if needed]
                raise UsageError(
                    f"x names {name!r}, no argument of {what}: {remedy_for_names(inputs.names, known, required)}; or "
                    "give a tensor, or a tuple of tensors in the order of the arguments"
                )
        missing = [name for name, required in known.items() if required and name not in inputs.names]
        if missing:
            raise UsageError(f"x names {', '.join(inputs.names)}, but {what} also needs {', '.join(missing)}")


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A tuple as it is, any other value as a tuple of one."""
    return value if isinstance(value, tuple) else (value,)


def first_size(value: Any) -> int:
    """The length of the first dimension of a batch's first tensor; 0 without a tensor or a dimension."""
    if isinstance(value, Examples):
        return value.size or 0
    if isinstance(value, Tensor | np.ndarray):
        return int(value.shape[0]) if value.ndim else 0
    if isinstance(value, Mapping):
        value = list(value.values())
    return first_size(value[0]) if isinstance(value, tuple | list) and value else 0


def common_length(x: Any) -> int:
    """The length of the first dimension of all tensors in x; 0 where they have several, as those of graphs."""
    lengths = lengths_in(x)
    return lengths.pop() if len(lengths) == 1 else 0


def lengths_in(x: Any) -> set[int]:
    """The lengths of the first dimensions of all tensors and arrays in x."""
    if isinstance(x, Tensor | np.ndarray):
        return {int(x.shape[0])} if x.ndim else set()
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else ()
    return {length for part in parts for length in lengths_in(part)}


def examples_of(x: Any, y: Any) -> int:
    """The number of examples of a batch: of its targets where x's tensors have several lengths."""
    return common_length(x) or first_size(y) or first_size(x)


def num_entries(value: Any, examples: int) -> int:
    """The number of elements of a target's first tensor, about what a loss counts; `examples` if it has no tensor."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        value = list(value.values())
    return num_entries(value[0], examples) if isinstance(value, tuple | list) and value else examples


BATCHES = "an iterable of batches (x, y), such as a DataLoader or a list"


def refuse_workers(loader: Any, where: str) -> None:
    """Raise UsageError for a DataLoader whose workers this process may not start: Python's daemons have no children."""
    workers = getattr(loader, "num_workers", 0)
    if workers and current_process().daemon:
        raise UsageError(
            f"{where} is {shown(loader)} with num_workers={workers}, but this process is a daemon, as those are that "
            "Stretto starts, and may start no others: give num_workers=0, or start the processes with torchrun"
        )


class Batches:
    """Iterates over `batches` once and remembers the current one, for messages; `who` is the function the user called.

    `read` gives other forms of a batch as (x, y); it is called with the batch and its place in words. Raises UsageError
    for anything that is not a pair (x, y) with the same number of examples.
    """

    wanted = BATCHES
    unfit: tuple[type, ...] = (str, bytes, Mapping, type)
    takers, remedy = "the model or the loss", "Give batches as in training"

    def __init__(
        self, who: str, batches: Iterable[Any], read: Callable[[Any, str], Any] = lambda batch, _: batch
    ) -> None:
        if isinstance(batches, self.unfit) or not hasattr(batches, "__iter__"):
            refuse(f"{who}: batches", batches, self.wanted)
        refuse_workers(batches, f"{who}: batches")
        self._who = who
        self._batches = batches
        self._read = read
        self._current = "its first batch"

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self._batches):
            batch = self._read(batch, f"{self._who}: batch {index}")
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise UsageError(f"{self._who}: batch {index} is {shown(batch)}: give {BATCHES}")
            x, y = batch
            self._current = f"batch {index}, x {shown(x)} and y {shown(y)}"
            if x is not None:  # None in a process that does not read x
                x = inputs_of(x, f"{self._who}: x of batch {index}")
            y = target_of(y, f"{self._who}: y of batch {index}")
            check_examples(x, y, cuts=False)
            yield x, y

    def explaining_misfits(self) -> AbstractContextManager[None]:
        """In this block an error of the model or the loss becomes UsageError that names the current batch."""
        return explaining_misfits(
            lambda: f"{self._who}: {self.takers} cannot take {self._current}", self.remedy.format(who=self._who)
        )


class InputBatches(Batches):
    """As `Batches`, of inputs alone: iterates over the tensors of each x."""

    wanted = "an iterable of batches of inputs, such as [x]"
    unfit = (*Batches.unfit, Tensor, np.ndarray)
    takers, remedy = "the model", "Give inputs as in training, without targets: {who}(x for x, y in loader)"

    def __iter__(self) -> Iterator[tuple[Tensor, ...] | None]:
        for index, x in enumerate(self._batches):
            self._current = f"batch {index}, x {shown(x)}"
            yield None if x is None else inputs_of(x, f"{self._who}: batch {index}")
