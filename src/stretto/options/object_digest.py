"""Digests of objects that a script gives: of the files of functions, and of all that they see beside their text.

A function in a loop over widths has one text, and another width in each turn: closures, defaults, a method's object and
the globals that it reads are part of what it is. An object without a stable digest has another one at each call, so no
result of it counts as made already.
"""

import ast
import functools
import inspect
import sys
import sysconfig
import uuid
from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def object_digest(value: Any) -> str:
    """Sixteen characters that differ once an object has changed, its file, or what it sees beside its text."""
    try:
        return Walk().of(value)
    except Exception:  # noqa: BLE001 (an object may do anything when it is looked at)
        return uuid.uuid4().hex[:16]


class Walk:
    """Goes through an object and all that it refers to."""

    def __init__(self) -> None:
        self._digest, self._places, self._kept = sha256(), dict[int, int](), list[Any]()

    def of(self, value: Any) -> str:
        self._add(value)
        return self._digest.hexdigest()[:16]

    def _say(self, *words: object) -> None:
        self._digest.update(" ".join(map(repr, words)).encode() + b"\n")

    def _add(self, value: Any) -> None:
        if isinstance(value, PLAIN):
            self._say(type(value).__name__, value)
            return
        if id(value) in self._places:
            self._say("again", self._places[id(value)])
            return
        self._places[id(value)] = len(self._places)
        self._kept.append(value)  # no other object may get its id
        self._add_new(value)

    def _add_new(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, ModuleType):
            self._say("module", value.__name__)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, BuiltinFunctionType):
            self._say("builtin", value.__module__, value.__qualname__)
            if not isinstance(value.__self__, ModuleType | type | None):
                self._add(value.__self__)
        elif isinstance(value, MethodType):
            self._add_all("method", value.__func__, value.__self__)
        elif isinstance(value, CellType):
            self._add_all("cell", value.cell_contents)
        elif isinstance(value, functools.partial):
            self._add_all("partial", value.func, value.args, value.keywords)
        elif kind in (list, tuple):
            self._add_all(kind.__name__, *value)
        elif kind is dict:
            self._add_all("dict", *(part for pair in value.items() for part in pair))
        elif kind in (set, frozenset):
            self._say(kind.__name__, *sorted(Walk().of(each) for each in value))
        elif (held := tensor_bytes(value)) is not None:
            self._say("tensor", *held)
        else:
            self._add_object(value)

    def _add_all(self, kind: str, *values: Any) -> None:
        self._say(kind, len(values))
        for value in values:
            self._add(value)

    def _add_class(self, value: type) -> None:
        file = file_of(value)
        own = file is not None and not is_installed(file)
        self._say("class", "" if own else value.__module__, value.__qualname__)
        if file is not None and own:
            self._add_file(file)
        elif file is None and value.__module__ in ("__main__", "__mp_main__"):  # a notebook's
            members = {name: member for name, member in vars(value).items() if isinstance(member, FunctionType)}
            self._add_all("members", *(part for pair in sorted(members.items()) for part in pair))

    def _add_function(self, function: FunctionType) -> None:
        file = file_of(function)
        self._say("function", function.__qualname__)
        if file is not None and is_installed(file):
            self._say(function.__module__)
        elif file is not None:
            self._add_file(file)
        else:
            self._say(text_of(function))
        if file is None or not is_installed(file):
            around = function.__globals__
            seen = {name: around[name] for name in names_in(function.__code__) if name in around}
            self._add_all("globals", *(part for pair in sorted(seen.items()) for part in pair))
        self._add_all("state", function.__defaults__, function.__kwdefaults__, *(function.__closure__ or ()))
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            self._add(wrapped)

    def _add_file(self, file: Path) -> None:
        self._say("file", digest_of_files(file))

    def _add_object(self, value: Any) -> None:
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):
            self._say("object", reduced)
            return
        maker, arguments, *rest = reduced
        self._add_all("object", maker, arguments)
        for part in rest:
            self._add(list(part) if isinstance(part, Iterator) else part)


def tensor_bytes(value: Any) -> tuple[Any, ...] | None:
    """Kind and content of a torch tensor; None for other objects. torch pickles the addresses of storages, too."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    content = value.detach().cpu().contiguous()
    hashed = sha256(content.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
    return type(value).__name__, str(value.dtype), tuple(value.shape), value.requires_grad, hashed


def file_of(thing: Any) -> Path | None:
    """The file of a function or class; None where there is none."""
    try:
        source = inspect.getsourcefile(inspect.unwrap(thing))
    except (TypeError, OSError):
        return None
    return Path(source) if source is not None and Path(source).is_file() else None


def is_installed(file: Path) -> bool:
    """Whether a file is of Python or of a package that is installed: its version is not a study's matter."""
    return f"{file.resolve()}".startswith(INSTALLED) or Path(__file__).parents[1] in file.resolve().parents


def text_of(function: FunctionType) -> str:
    """A function's code without its place in a cell or text; of one without a source, its bytecode."""
    try:
        return ast.dump(ast.parse(inspect.getsource(function).strip()))
    except (OSError, SyntaxError):
        code = function.__code__
        return f"{code.co_code!r} {code.co_names} {[each for each in code.co_consts if isinstance(each, PLAIN)]}"


def methods_of_forward(kind: type, follows: Callable[[FunctionType], bool] = lambda _: True) -> list[FunctionType]:
    """A class's forward and all methods reachable from it by name; `follows` leaves out others."""
    pending, known = ["forward"], dict[str, FunctionType | None]()
    while pending:
        name = pending.pop()
        if name not in known:
            method = getattr(kind, name, None)
            known[name] = method if isinstance(method, FunctionType) and follows(method) else None
            if (followed := known[name]) is not None:
                pending += names_in(followed.__code__)
    return [method for method in known.values() if method is not None]


def names_in(code: CodeType) -> set[str]:
    """The names that code reads, functions inside it included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def digest_of_files(file: Path) -> str:
    """Sixteen characters that differ once a Python file, or one beside it that it imports, has been edited."""
    digest = sha256()
    for path in sorted(with_neighbours(file.resolve())):
        digest.update(f"{path.name} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


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
def imported_names(source: bytes) -> list[str]:
    """The modules that Python code imports, by name; `from a import b` may import a.b."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []  # the import itself tells
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names += [base] if base else []
            names += [f"{base}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "*"]
    return names
