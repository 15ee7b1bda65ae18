"""Values from files are checked by type hints: what is of another kind is named with its place and its value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from stretto.errors import UsageError
from stretto.options.kinds import check_kind, check_values, naming, parse_toml, read_json


@dataclass
class Pair:
    name: str
    sizes: tuple[int, int]


FITS = [
    (3, int), (3, float), (0.5, float), ("a", str), (None, int | None), (True, bool), ([1, 2], tuple[int, ...]),
    ([], list[str]), ({"a": 1}, dict[str, int]), ({"a": [1]}, Mapping[str, Any]),
    ({"name": "a", "sizes": [1, 2]}, Pair), ([{"name": "a", "sizes": [1, 2]}], list[Pair]), ("x", str | int | float),
    (None, Pair | None), ([None, 2.0], list[float | None]),
]  # fmt: skip
DIFFERS = [
    (True, int, "x = True: a whole number belongs here"),
    (1, bool, "x = 1: true or false belongs here"),
    (0.5, int, "x = 0.5: a whole number belongs here"),
    ("1", float, "x = '1': a number belongs here"),
    (2**63, int, "x = 9223372036854775808: a whole number belongs here, finite and of at most 64 bits"),
    (float("nan"), float, "x = nan: a number belongs here, finite"),
    (float("inf"), float | None, "x = inf: a number, or null belongs here, finite"),
    ([1, "a"], tuple[int, ...], "x[1] = 'a': a whole number belongs here"),
    ([1, 2, 3], tuple[int, int], "x = [1, 2, 3]: a list of 2 values belongs here"),
    ("ab", list[str], "x = 'ab': a list belongs here"),
    ([], dict[str, int], "x = []: a table belongs here"),
    ({"a": None}, dict[str, int], "x.a = None: a whole number belongs here"),
    ([[1]], list[int] | None, "x[0] = [1]: a whole number belongs here"),
    ({3: 1}, dict[str, int], "x: a key = 3: a text belongs here"),
    ({"name": 3}, Pair | None, "x: name = 3: a text belongs here"),
]


@pytest.mark.parametrize(("value", "hint"), FITS)
def test_what_fits(value, hint):
    check_kind("x", value, hint)


@pytest.mark.parametrize(("value", "hint", "said"), DIFFERS)
def test_what_does_not(value, hint, said):
    with pytest.raises(UsageError) as raised:
        check_kind("x", value, hint)
    assert said in str(raised.value)


def test_values_of_a_class():
    check_values("here", {"name": "a", "other": 3}, Pair)  # a newer version's key
    with pytest.raises(UsageError, match=r"here: sizes\[1\] = '2'"):
        check_values("here", {"sizes": [1, "2"]}, Pair)
    with pytest.raises(UsageError, match=r"here = \[\]: a table belongs here"):
        check_values("here", [], Pair)
    with pytest.raises(UsageError, match="there lacks name"), naming("there"):
        _ = {}["name"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json(tmp_path, content):
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.json is no"):
        read_json(file)
    with pytest.raises(UsageError, match=r"a\.json, line 3 is no JSON"):
        read_json(file, "{", 3)
    with pytest.raises(UsageError, match=r"gone cannot be read: No such file"):
        read_json(tmp_path / "gone")


def test_what_is_no_toml():
    assert parse_toml("a = [[1]]") == {"a": [[1]]}
    for text in ("a = ", "a = " + "[" * 100_000):
        with pytest.raises(ValueError, match=r"nested too deeply|Invalid value"):
            parse_toml(text)
