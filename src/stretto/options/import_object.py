"""Import an object by its name, `package.module:name` or `path/to/file.py:name`."""

import importlib
import importlib.util
import sys
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.errors import UsageError, nearest
from stretto.options.given_objects import is_given, registered
from stretto.options.parse import parse
from stretto.options.user_errors import error_place


def import_object(text: str, what: str = "model") -> Any:
    """The object that `text` names. Raises UsageError, which calls it `what`, where there is none."""
    if is_given(text):
        return registered(text)
    place, _, name = text.rpartition(":")
    module = load(place, text, what)
    if not hasattr(module, name):
        raise UsageError(f"{place} has no {name!r}: {nearest(name, callables_of(module))}")
    return getattr(module, name)


def callables_of(module: ModuleType) -> list[str]:
    """The names of what a module defines and can be called; of what it imports, too, if it defines nothing."""
    public = {key: value for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
    own = [key for key, value in public.items() if getattr(value, "__module__", None) == module.__name__]
    return own or list(public)


def refuse_functions(place: str, *methods: str) -> None:
    """Refuse methods, as a file has them, that name a function: it would be called, and files are data.

    Raises UsageError with what to do instead.
    """
    for text in methods:
        name, options = parse(text)
        functions = [each for each in (name, options.get("head")) if isinstance(each, str) and ":" in each]
        if functions:
            raise UsageError(
                f"{place} has the method {text!r}, and would have {functions[0]} called: nothing that a file says is "
                "executed. If you trust it, give the method in the command itself; a finished study's report is "
                "written again by its stretto compare command"
            )


def load(place: str, text: str, what: str) -> ModuleType:
    """Import a module by its name, also from the current folder, or a file by its path.

    A file may import those beside it. Messages quote `text`, the whole name, and call it `what`.
    """
    if not place:
        raise UsageError(f"{what} {text!r}: write package.module:function or path/to/file.py:function")
    file = Path(place)
    by_path = file.suffix == ".py"
    if by_path and not file.is_file():
        raise UsageError(f"{what} {text!r}: there is no file {place}")
    neighbours = str(file.parent.resolve() if by_path else Path.cwd())
    if sys.path[0] != neighbours:
        sys.path.insert(0, neighbours)
    try:
        return from_file(file.resolve(), *stamp(file)) if by_path else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise UsageError(f"cannot import {place}: {type(error).__name__}: {error}{error_place(error)}") from error


def stamp(file: Path) -> tuple[int, int]:
    """When a file was changed, in ns, and its length in bytes."""
    status = file.stat()
    return status.st_mtime_ns, status.st_size


@cache
def from_file(file: Path, _changed: int, _length: int) -> ModuleType:
    """Import a file as a module with a name of its own; again only once the file has changed.

    Never from bytecode on disk: that of an edit in the same second, of the same length, would count as this one's.
    """
    spec = importlib.util.spec_from_file_location(f"stretto_model_{file.stem}", file)
    assert spec is not None
    assert isinstance(spec.loader, SourceFileLoader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # what the file defines looks itself up there, as dataclasses do
    exec(spec.loader.source_to_code(spec.loader.get_data(str(file)), file), vars(module))
    return module
