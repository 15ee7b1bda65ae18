"""A function of the user's, named in a setting: called with its options, and told apart from its former versions."""

import ast
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from stretto.errors import UsageError, nearest
from stretto.options.given_objects import given_digest, is_given
from stretto.options.import_object import import_object
from stretto.options.user_errors import error_place

FOLDER = "hf:"


def is_function(text: str) -> bool:
    """Whether a setting names something of the user's: package.module:function, path/to/file.py:function, hf:FOLDER."""
    return ":" in text


def is_model_folder(text: str) -> bool:
    """Whether a setting names the folder of a Hugging Face model, hf:FOLDER."""
    return text.startswith(FOLDER)


def call(text: str, what: str, options: Mapping[str, Any]) -> Any:
    """What the function `text` returns for these keyword arguments.

    Raises UsageError, which calls it `what`, if there is none, if it does not take the options, or if it raises.
    """
    function = import_object(text, what)
    refuse_options(function, f"{what} {text!r}", options)
    try:
        return function(**options)
    except Exception as error:
        place = error_place(error)
        raise UsageError(f"{what} {text} raised {type(error).__name__}: {error}{place}") from error


def refuse_options(function: Any, owner: str, options: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that a function does not take, or an argument that is missing."""
    if not callable(function):
        raise UsageError(f"{owner} is no function: {function!r:.80}")
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return  # written in C, without a signature: its own error is told
    takes = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in options:
        if name not in takes and not takes_all:
            raise UsageError(f"{owner} takes no argument {name!r}: {nearest(name, takes)}")
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    missing = positional + [name for name in takes if parameters[name].default is inspect.Parameter.empty]
    for name in missing:
        if name not in options:
            raise UsageError(f"{owner} needs the argument {name!r}: give it a default, or pass it as an option")


def source_digest(text: str, what: str = "model") -> str:
    """Sixteen characters that differ once the function's file, or one beside it that it imports, has been edited.

    Raises UsageError, which calls it `what`, if there is no such function.
    """
    value = import_object(text, what)
    if is_given(text):
        return given_digest(value)
    place = text.rpartition(":")[0]
    file = Path(place) if place.endswith(".py") else source_of(place)
    return "no source" if file is None or not file.is_file() else digest_of_files(file)


def digest_of_files(file: Path) -> str:
    """Sixteen characters that differ once a Python file, or one beside it that it imports, has been edited."""
    digest = sha256()
    for path in sorted(with_neighbours(file.resolve())):
        digest.update(f"{path.name} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def source_of(module: str) -> Path | None:
    """The file of an importable module; None for one that is no Python file."""
    spec = importlib.util.find_spec(module)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def with_neighbours(file: Path) -> set[Path]:
    """A Python file and those in its folder, or in folders there, that it imports, directly or not."""
    reached, waiting = {file}, [file]
    while waiting:
        path = waiting.pop()
        for name in imported_names(path.read_bytes()):
            candidates = (file.parent.joinpath(*name.split(".")), path.parent.joinpath(*name.split(".")))
            for stem in candidates:
                for found in (stem.with_suffix(".py"), stem / "__init__.py"):
                    if found.is_file() and found not in reached:
                        reached.add(found)
                        waiting.append(found)
    return reached


@lru_cache
def imported_names(source: bytes) -> tuple[str, ...]:
    """The modules that Python code imports, by name; `from a import b` may import a.b."""
    return tuple(_imported_names(source))


def _imported_names(source: bytes) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return  # the import itself tells
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield from ([base] if base else [])
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "*")
