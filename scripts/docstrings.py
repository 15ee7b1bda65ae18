"""Docstrings as Markdown, for the site: they are plain text with two forms of reStructuredText."""

import re
from typing import Any

from griffe import Docstring, Extension, Object

TABLE = re.compile(r"^(=+(?: +=+)+)\n(.*?)^\1$", re.DOTALL | re.MULTILINE)


class PlainDocstrings(Extension):
    """Turns `::` before a literal block into `:`, and a table of `====` lines into a literal block."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """A docstring as Markdown."""
    text = TABLE.sub(lambda match: f"```text\n{match[0]}\n```", text)
    text = re.sub(r"^::$", "", text, flags=re.MULTILINE)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)
