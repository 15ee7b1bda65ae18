"""Resolved settings as text of a TOML file."""

from collections.abc import Mapping
from typing import Any


def as_toml(settings: Mapping[str, Any]) -> str:
    """Settings as TOML; one that is None, which TOML cannot say, becomes a comment.

    >>> print(as_toml({"clip": None, "steps": 10}))
    # clip is not set
    steps = 10
    """
    import tomli_w

    unset = [f"# {name} is not set" for name, value in settings.items() if value is None]
    return "\n".join([*unset, tomli_w.dumps(without_none(settings))]).strip()


def without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that are None, on every level."""
    return {
        name: without_none(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if value is not None
    }
