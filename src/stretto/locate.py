"""A user's model, found by what it is called: `package.module:function` or `path/to/file.py:function`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError, nearest


def locate(text: str) -> tuple[nn.Module, Any]:
    """Call the function; return the module and the example input that it gives, None if it gives none.

    Raises UsageError where there is no such function, where it raises, and where it returns something else.
    """
    place, _, name = text.rpartition(":")
    module = load(place, text)
    if not hasattr(module, name):
        public = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise UsageError(f"{place} has no {name!r}: {nearest(name, public)}")
    try:
        made = getattr(module, name)()
    except Exception as error:
        raise UsageError(f"{text} raised {type(error).__name__}: {error}") from error
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    inputs = example if isinstance(example, tuple) else (example,)
    if not isinstance(model, nn.Module) or not (example is None or all(isinstance(each, Tensor) for each in inputs)):
        raise UsageError(
            f"{text} returned {type(made).__name__}: return an nn.Module, or (module, example) with one input batch, a "
            "tensor or a tuple of tensors"
        )
    return model, example


def load(place: str, text: str) -> ModuleType:
    """Import a module by its name, from the current folder too, or a file by its path, with its neighbours."""
    if not place:
        raise UsageError(f"model {text!r}: write package.module:function or path/to/file.py:function")
    file = Path(place)
    by_path = file.suffix == ".py"
    if by_path and not file.is_file():
        raise UsageError(f"model {text!r}: there is no file {place}")
    sys.path.insert(0, str(file.parent.resolve() if by_path else Path.cwd()))
    try:
        return from_file(file) if by_path else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise UsageError(f"cannot import {place}: {type(error).__name__}: {error}") from error


def from_file(file: Path) -> ModuleType:
    """Run a file as a module of a name that no other module has."""
    spec = importlib.util.spec_from_file_location(f"stretto_model_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # what the file defines looks itself up there, as dataclasses do
    spec.loader.exec_module(module)
    return module
