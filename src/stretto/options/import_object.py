"""Objects named in settings: `package.module:name`, `path/to/file.py:name`, or "given:name" for what a script gives.

What a script gives is registered under a name of its own and sent to other processes. Functions of the user's are
called with their options, and told apart from their former versions.
"""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Collection, Mapping
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.errors import UsageError, nearest
from stretto.options.checks import shown
from stretto.options.named import parse
from stretto.options.object_digest import digest_of_files, object_digest
from stretto.options.user_errors import error_place

MOST_NAMES = 4  # of a file's functions in a message
PLACE = "given"  # "given:build" is the name of a registered object
_objects: dict[str, Any] = {}
_versions: dict[str, int] = {}
_loaded: set[Path] = set()


class ObjectFactory:
    """A function that returns an object made before, for settings that name a function.

    `digest` is the object's, "given" for data, whose examples have a digest of their own.
    """

    def __init__(self, value: Any, digest: str, *, copied: bool) -> None:
        self._value, self.digest, self._copied = value, digest, copied

    def __call__(self) -> Any:
        from copy import deepcopy

        return deepcopy(self._value) if self._copied else self._value


def register(name: str, value: Any) -> str:
    """Register an object in place of the former one; return the name by which settings find it, "given:model"."""
    if _objects.get(name) is not value:
        _objects[name] = value
        _versions[name] = _versions.get(name, 0) + 1
    return f"{PLACE}:{name}"


def version_of(text: str) -> str:
    """How often an object was registered under this name: what is kept of a former one is out of date."""
    return f"{_versions.get(text.rpartition(':')[2], 0)}"


def registered(text: str) -> Any:
    """The object with this name. Raises UsageError in a process in which there is none."""
    key = text.rpartition(":")[2]
    if key not in _objects:
        raise UsageError(
            f"{text!r} was given as an object to a call in Python, which is not known here: make the same call again"
        )
    return _objects[key]


def is_given(text: str) -> bool:
    """Whether a name is that of a registered object."""
    return text.partition(":")[0] == PLACE


def write_objects(file: Path, names: Collection[str]) -> None:
    """Write registered objects for `read_objects`. Raises UsageError for one that cannot be pickled."""
    import cloudpickle

    chosen = {name.rpartition(":")[2]: registered(name) for name in names if is_given(name)}
    try:
        file.write_bytes(cloudpickle.dumps(chosen))
    except Exception as error:
        raise UsageError(
            f"{', '.join(chosen)} cannot be sent to other processes ({type(error).__name__}: {error}): give functions "
            "that make these objects"
        ) from error


def read_objects(file: Path | None) -> None:
    """Register what `write_objects` has written, once a process. The file is of this process's own starter."""
    if file is not None and file not in _loaded:
        import cloudpickle

        for name, value in cloudpickle.loads(file.read_bytes()).items():
            register(name, value)
        _loaded.add(file)


def unknown(what: str, name: object, known: Collection[str]) -> UsageError:
    """The error for a setting that names neither one of `known` nor a function. A file is parsed, and not executed."""
    if isinstance(name, str) and name.endswith(".py"):
        return UsageError(f"{what} {name!r} is a file: name a function in it, {name}:{function_in(Path(name))}")
    last = str(name).rpartition(".")[2]  # stretto.losses.token_cross_entropy has a name of its own
    return UsageError(
        f"unknown {what} {shown(name)}: {nearest(last if last in known else str(name), known)}; or write "
        "package.module:function or path/to/file.py:function"
    )


def function_in(file: Path) -> str:
    """The names of some functions and classes at a file's top level, "build, or Net"; FUNCTION where it has none."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, ValueError, SyntaxError):
        return "FUNCTION"
    defined = (node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    names = [name for name in defined if not name.startswith("_")]
    return ", or ".join(names[:MOST_NAMES]) or "FUNCTION"


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
        return value.digest if isinstance(value, ObjectFactory) else object_digest(value)
    place = text.rpartition(":")[0]
    file = Path(place) if place.endswith(".py") else source_of(place)
    return "no source" if file is None or not file.is_file() else digest_of_files(file)


def source_of(module: str) -> Path | None:
    """The file of an importable module; None for one that is no Python file."""
    spec = importlib.util.find_spec(module)
    return None if spec is None or spec.origin is None else Path(spec.origin)
