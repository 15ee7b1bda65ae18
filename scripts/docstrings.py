"""Docstrings as Markdown, for the site: they are plain text with two forms of reStructuredText. And lazy names."""

import re
from typing import Any

from griffe import Alias, Docstring, Extension, Module, Object

TABLE = re.compile(r"^(=+(?: +=+)+)\n(.*?)^\1$", re.DOTALL | re.MULTILINE)


class PlainDocstrings(Extension):
    """Turns `::` before a literal block into `:`, and a table of `====` lines into a literal block."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = markdown(obj.docstring.value)


class LazyNames(Extension):
    """Shows names that a package's `__all__` lists and another package has, as `stretto.cost` lists some of measure."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Point each such name to the package that has it."""
        for package in pkg.modules.values():
            for name in map(str, package.exports or ()):
                if name not in package.members:
                    home = next(each for each in pkg.modules.values() if name in each.members)
                    package.set_member(name, Alias(name, f"{home.path}.{name}"))


def markdown(text: str) -> str:
    """A docstring as Markdown."""
    text = TABLE.sub(lambda match: f"```text\n{match[0]}\n```", text)
    text = re.sub(r"^::$", "", text, flags=re.MULTILINE)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)
