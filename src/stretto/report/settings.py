"""A resolved configuration as text that reads like the TOML file it came from."""

import json
from collections.abc import Mapping
from typing import Any


def as_toml(settings: Mapping[str, Any]) -> str:
    """Write scalars first, then tables, each key in its given order. What is None is written as a comment.

    >>> print(as_toml({"steps": 10, "model": {"name": "mlp", "width": None}}))
    steps = 10
    <BLANKLINE>
    [model]
    name = "mlp"
    # width is not set
    """
    return "\n\n".join(_tables("", settings))


def _tables(path: str, table: Mapping[str, Any]) -> list[str]:
    lines = [_line(name, value) for name, value in table.items() if not isinstance(value, Mapping)]
    head = [f"[{path}]"] if path and (lines or not table) else []
    blocks = ["\n".join(head + lines)] if head or lines else []
    for name, value in table.items():
        if isinstance(value, Mapping):
            blocks += _tables(f"{path}.{_key(name)}" if path else _key(name), value)
    return blocks


def _line(name: str, value: Any) -> str:
    return f"# {name} is not set" if value is None else f"{_key(name)} = {_value(value)}"


def _key(name: object) -> str:
    text = str(name)
    return text if text and all((c.isalnum() and c.isascii()) or c in "-_" for c in text) else json.dumps(text)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(name)} = {_value(each)}" for name, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(each) for each in value) + "]"
    return json.dumps(str(value), ensure_ascii=False)
