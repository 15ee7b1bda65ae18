"""A resolved configuration as the TOML file it could have come from."""

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
    return "\n".join([*unset, tomli_w.dumps(given(settings))]).strip()


def given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that is not None, on every level."""
    return {
        name: given(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if value is not None
    }
