"""What docs/api shows explains itself: every public function, class, method and property there has a docstring."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parent.parent / "docs" / "api").glob("*.md"))
ENTRIES = sorted({entry for page in PAGES for entry in re.findall(r"^::: (\S+)$", page.read_text(), re.M)})


def entry_objects(entry):
    """The objects that an entry shows, by name: of a module, those that `__all__` lists."""
    parent, _, name = entry.rpartition(".")
    found = getattr(importlib.import_module(parent), name)
    if not inspect.ismodule(found):
        return {entry: found}
    return {f"{entry}.{each}": getattr(found, each) for each in found.__all__}


def shown_objects(entry):
    """The functions and classes of an entry, and the public methods and properties of the latter."""
    for name, found in entry_objects(entry).items():
        if inspect.isclass(found) and found.__module__.startswith("stretto"):
            yield name, found
            fields = getattr(found, "__dataclass_fields__", {})  # a default may be a function
            for member, value in vars(found).items():
                if (
                    member not in fields
                    and not member.startswith("_")
                    and (inspect.isfunction(value) or isinstance(value, property))
                ):
                    yield f"{name}.{member}", getattr(value, "fget", value)
        elif inspect.isfunction(found):
            yield name, found


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_the_page_shows_has_a_docstring(entry):
    assert entry_objects(entry)
    assert [name for name, found in shown_objects(entry) if not found.__doc__] == []
