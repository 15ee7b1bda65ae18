"""How messages show values, and fields of dataclasses that are checked against their annotations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
import torch

from stretto.errors import UsageError
from stretto.options.checks import function, of_fields, shown


@dataclass(frozen=True)
class Made:
    kind: ClassVar[str] = "of no instance"
    count: Annotated[int, "words"] = 1
    rate: float | None = None
    word: Literal["one", "two"] = "one"
    names: tuple[str, ...] = ()
    sizes: Mapping[str, int | float] = field(default_factory=dict)
    call: Callable[[int], int] = abs
    folder: str | PathLike[str] = "."
    anything: Any = None


@pytest.mark.parametrize(
    "given",
    [
        {}, {"rate": 1}, {"rate": float("nan")}, {"rate": np.float64(0.5)}, {"word": "two"}, {"names": ("a", "b")},
        {"sizes": {"a": 1.5}}, {"call": int}, {"folder": Path("a")}, {"anything": object()},
    ],
)  # fmt: skip
def test_fields_that_fit(given):
    of_fields("Made: ", Made(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 1.0}, "Made: count=1.0: give a whole number"),
        ({"count": True}, "Made: count=True: give a whole number"),
        ({"rate": "1"}, "Made: rate='1': give a number or None"),
        ({"rate": torch.ones(2)}, "Made: rate=Tensor [2] of torch.float32: give a number or None"),
        ({"word": "three"}, "Made: word='three': give 'one' or 'two'"),
        ({"names": [1]}, "Made: names=[1]: give a tuple, each member text"),
        ({"names": ("a", 5)}, "Made: names=('a', 5): give a tuple, each member text"),
        ({"sizes": {"a": "b"}}, "Made: sizes={'a': 'b'}: give a dict from text to a whole number or a number"),
        ({"call": 5}, "Made: call=5: give a function"),
        ({"folder": 5}, "Made: folder=5: give text or a path"),
    ],
)
def test_fields_that_do_not(given, message):
    with pytest.raises(UsageError) as refused:
        of_fields("Made: ", Made(**given))
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2, 3), "Tensor [2, 3] of torch.float32"),
        ((torch.ones(2), None), "(Tensor [2] of torch.float32, None)"),
        ({"a": [np.ones(3)]}, "{'a': [ndarray [3] of float64]}"),
        ([1, (2, {})], "[1, (2, {})]"),
        ([torch.ones(1)] * 5, "[" + "Tensor [1] of torch.float32, " * 5),
        ("a\nb", r"'a\nb'"),
    ],
)
def test_values_in_messages(value, text):
    """The numbers of a tensor never are, also inside of others."""
    assert shown(value) == (text if len(text) <= 80 else f"{text[:76]} ...")


def test_functions_of_so_many_arguments():
    for fits in (lambda a, b: None, lambda *each: None, lambda a, b, c=1: None, dict, max):
        function("f", fits, "a function", 2)
    for other in (lambda a: None, lambda a, b, c: None, lambda a, b, *, c: None, 5):
        with pytest.raises(UsageError, match="give a function"):
            function("f", other, "a function", 2)
