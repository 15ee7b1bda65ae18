"""A TOML file of settings: weaker than the command line, stronger than the defaults."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cyclopts import Token

from stretto.errors import UsageError, nearest

TAKES_PATH = ("--out", "--svg")  # options whose value may end in .toml and is no configuration


def file_first(words: list[str]) -> list[str]:
    """Move a configuration file to right behind the verb: after a list of values it would be taken for one of them."""
    found = [
        i
        for i, (before, word) in enumerate(zip(words, words[1:], strict=False), start=1)
        if word.endswith(".toml") and not word.startswith("-") and before not in TAKES_PATH
    ]
    if len(found) > 1:
        raise UsageError(f"{len(found)} configuration files ({', '.join(words[i] for i in found)}): give one")
    return words if not found else [words[0], words[found[0]], *words[1 : found[0]], *words[found[0] + 1 :]]


def settings_from_file(app: Any, commands: tuple[str, ...], arguments: Any) -> None:
    """Cyclopts calls this between reading the words and converting them: give open options the file's values."""
    given = next((argument for argument in arguments if argument.name == "CONFIG" and argument.tokens), None)
    if given is None:
        return
    file = Path(given.tokens[0].value)
    options = {argument.name.removeprefix("--").replace("-", "_"): argument for argument in arguments[1:]}
    for key, value in read(file).items():
        name = key.replace("-", "_")
        if name not in options:
            raise UsageError(f"{file}: unknown key {key!r}: {nearest(name, [each for each in options if each != '*'])}")
        argument = options[name]
        if isinstance(value, dict) != (get_origin(argument.hint) is dict):
            raise UsageError(f"{file}: {key} = {value!r}: " + (NO_TABLE if isinstance(value, dict) else A_TABLE))
        for token in tokens(f"{key} in {file}", value, argument.tokens):
            argument.append(token)


NO_TABLE = "this is no table; write {key} = value"
A_TABLE = "this is a table; write its options as {key}.NAME = value"


def tokens(where: str, value: Any, given: Sequence[Token]) -> Iterator[Token]:
    """A value as the words it would have been on the command line, less what was `given` there."""
    if isinstance(value, dict):
        taken = [token.keys[-1] for token in given if token.keys]
        for name, each in value.items():
            if name not in taken:
                yield Token(keyword=where, value=str(each), keys=(name,), source="file")
    elif not given:
        for index, each in enumerate(value if isinstance(value, list) else [value]):
            yield Token(keyword=where, value=str(each), index=index, source="file")


def read(file: Path) -> dict[str, Any]:
    """The file's content. Raises UsageError where there is none."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no configuration file {file}") from error
    except OSError as error:
        raise UsageError(f"cannot read the configuration file {file}: {error.strerror}") from error
    except ValueError as error:  # TOML or UTF-8
        raise UsageError(f"{file} is no TOML file: {error}") from error
