"""Runs the kernel: compiled by numba for large simulations, if numba is installed (the extra `fast`)."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.simulate import kernel
from stretto.simulate.kernel import State, TurnProgram

MIN_ACTIONS = 100_000  # from which on a compiled run saves more than the half second that loading it takes
INNER = ("code_of", "push", "pop")  # functions that `run` calls


def run(program: TurnProgram, state: State, actions: int) -> tuple[State, int]:
    """Run the kernel: the state with all times, and how many of `actions` actions ran; fewer than all is a deadlock."""
    fast = compiled() if actions >= MIN_ACTIONS else None
    if fast is not None:
        try:
            return state, int(fast.run(program, state))
        except AttributeError:  # numba reads what an older kernel left, names and all, before it asks how old that is
            forget_compiled(fast)
            return state, int(fast.run(program, state))
    lists = State(*map(as_list, state))  # loops over lists take a third of the time of loops over arrays
    return lists, kernel.run(TurnProgram(*map(as_list, program)), lists)


def as_list(value: Any) -> Any:
    """An array as a list; a number unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def forget_compiled(module: ModuleType) -> None:
    """Remove what numba keeps of the kernel on this machine; the next call compiles."""
    import numba

    for index in Path(module.run.stats.cache_path).glob("kernel.run-*.nbi"):
        index.unlink(missing_ok=True)
    module.run = numba.njit(cache=True)(module.run.py_func)  # type: ignore[attr-defined]


@cache
def compiled() -> ModuleType | None:
    """A second copy of the kernel's module, with functions compiled by numba; None without numba.

    The first call on a machine compiles; numba keeps the compiled code beside the source or in the user's cache.
    """
    if importlib.util.find_spec("numba") is None:
        return None
    import numba

    name = f"{kernel.__name__}_compiled"
    spec = importlib.util.spec_from_file_location(name, kernel.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for function in INNER:
        setattr(module, function, numba.njit(getattr(module, function)))
    module.run = numba.njit(cache=True)(module.run)  # type: ignore[attr-defined]
    return module
