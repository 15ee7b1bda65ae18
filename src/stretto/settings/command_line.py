"""How words of the command line become values of settings; those of a TOML file are given as such words."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import CoercionError, Group, Parameter, Token

from stretto.errors import UsageError
from stretto.optimizers import OPTIMIZERS
from stretto.options.import_object import is_function
from stretto.options.named import split_list

Option = str | int | float | bool  # a value of --model-options.NAME and the like
KINDS: dict[Callable[[str], Any], str] = {int: "whole number", float: "number", str: "text"}


def product(text: str) -> int:
    """A whole number, also as a product: 8x3 stages are three on each of eight workers.

    >>> product("24"), product("8x3")
    (24, 24)
    """
    return math.prod(int(factor) for factor in text.split("x"))


KINDS[product] = "whole number, nor a product such as 8x3"


def read(kind: Callable[[str], Any], text: str, token: Token) -> Any:
    """Read one value. Raises CoercionError for one of another kind: 3.5 is no whole number."""
    try:
        return kind(text)
    except ValueError as error:
        raise CoercionError(msg=f"{text!r} is no {KINDS[kind]}", token=token) from error


def single(kind: Callable[[str], Any]) -> Parameter:
    """An option with one value, `--steps 9`."""
    return Parameter(converter=lambda _, tokens: read(kind, tokens[0].value, tokens[0]))


def list_of(kind: Callable[[str], Any]) -> Parameter:
    """Let `--lr 0.1,0.3` and `--lr 0.1 0.3` mean the same; commas inside parentheses belong to a method's options."""

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        return tuple(read(kind, part, token) for token in tokens for part in split_list(token.value))

    return Parameter(consume_multiple=True, converter=convert, negative="")


def pairs(_: Any, tokens: Sequence[Token]) -> tuple[tuple[int, int], ...]:
    """The pairs of `--space 2,1 1,1`, ((2, 1), (1, 1)); also with the option repeated. Raises CoercionError."""
    numbers = [read(int, part, token) for token in tokens for part in split_list(token.value)]
    if len(numbers) % 2:
        written = " ".join(token.value for token in tokens)
        raise CoercionError(msg=f"{written!r} is {len(numbers)} numbers: give pairs, 2,1 1,1", token=tokens[0])
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def options(_: Any, tokens: Any) -> dict[str, Option]:
    """The options of `--model-options.width 256 --model-options.depth 4`, {"width": 256, "depth": 4}."""
    if not isinstance(tokens, Mapping):
        remedy = f"write {tokens[0].keyword}.NAME VALUE"
        raise CoercionError(msg=f"{tokens[0].value!r} has no name: {remedy}", token=tokens[0])
    return {name.replace("-", "_"): option(values[-1].value) for name, values in tokens.items()}


def option(text: str) -> Option:
    """The value of an option of a network or a data set: true, false, a number where it looks like one, else text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


WHOLE, NUMBER = single(int), single(float)
TEXTS, NUMBERS, WHOLES = list_of(str), list_of(float), list_of(int)
PRODUCTS = list_of(product)
PAIRS = Parameter(n_tokens=1, consume_multiple=True, converter=pairs, negative="")
OPTIONS = Parameter(converter=options)
FLAG = Parameter(negative="")
ANY_OPTIMIZER = (
    f"{', '.join(OPTIMIZERS)}, any other of torch.optim, or path/to/file.py:function, which takes parameters and lr="
)
SUITING = "auto: adamw for transformers and tokens, else sgd."

# of the help of train and compare, in this order
NETWORK, TRAINING, WORKERS, PROCESSES, OUTPUT = (
    Parameter(group=Group.create_ordered(name))
    for name in (
        "Network and data",
        "Training",
        "Stages, workers and replicas",
        "Checkpoints and processes",
        "Evaluation and output",
    )
)


@dataclass(frozen=True, kw_only=True)
class Trusted:
    """The functions that a folder's settings name are called only if the command names them, too.

    A folder may come from somebody else, and what it names would be executed.
    """

    model: str | None = None
    """The run's own network, path/to/file.py:function, where it has one: it is called only if it is named here."""
    data: str | None = None
    """Its data, alike."""
    loss: str | None = None
    """Its loss, alike."""
    metric: Annotated[tuple[str, ...], TEXTS] = ()
    """Its metrics, alike: NAME=path/to/file.py:function."""
    optimizer: str | None = None
    """Its optimizer, alike."""
    method: Annotated[tuple[str, ...], TEXTS] = ()
    """Its methods of your own, alike."""

    @property
    def functions(self) -> tuple[str, ...]:
        """All that are named."""
        named = [text for text in (self.model, self.data, self.loss, self.optimizer) if text is not None]
        return (*named, *self.method, *(parse_metric(text)[1] for text in self.metric))


def parse_metric(text: str) -> tuple[str, str, bool]:
    """The name of a metric, its function, and whether higher is better: "f1=own.py:f1:higher".

    Raises UsageError for any other form.
    """
    name, equals, function = text.partition("=")
    direction = function.rpartition(":")[2]
    function = function.rpartition(":")[0] if direction in ("higher", "lower") else function
    twice = function.count(":") > 1 and function.rpartition(":")[0].rpartition(":")[0].endswith(".py")
    if not equals or not name.isidentifier() or not is_function(function) or twice:
        raise UsageError(
            f"metric {text!r}: write NAME=path/to/file.py:function, and :higher behind it if more is better"
        )
    return name, function, direction == "higher"
