"""Modules that are imported when they are first used: every process of pytest imports every file of tests."""

import contextlib
import gc
import importlib


class Late:
    """Stands for the module of a name, whose attributes it has."""

    def __init__(self, name):
        self._name, self._module = name, None

    def __getattr__(self, attribute):
        if attribute.startswith("_"):  # pytest looks for such ones in all that a file of tests names
            raise AttributeError(attribute)
        if self._module is None:
            with no_garbage():
                self._module = importlib.import_module(self._name)
        return getattr(self._module, attribute)


@contextlib.contextmanager
def no_garbage():
    """While modules are imported nothing is looked for that can be thrown away: that takes a quarter of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
