"""The Markdown of pages."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with these columns."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]]) + "\n"


def wrapped(text: str) -> str:
    """Markdown with its long lines broken, but for tables, headings and code."""
    lines, code = [], False
    for line in text.split("\n"):
        code ^= line.startswith("```")
        plain = not code and not line.startswith(("|", "#", "!", "```"))
        indent = "  " if line.startswith("- ") else ""
        broken = textwrap.wrap(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += broken if plain and broken else [line]
    return "\n".join(lines)


def write_between(page: Path, mark: str, text: str, *, blank: str = "\n") -> None:
    """Put a text between a page's <!-- mark --> and <!-- end -->, `blank` before it.

    Raises ValueError unless there is one such place.
    """
    marked = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", re.DOTALL)
    new, number = marked.subn(lambda match: f"{match[1]}{blank}{text}\n{match[2]}", page.read_text(encoding="utf-8"))
    if number != 1:
        raise ValueError(f"{page}: {number} places between <!-- {mark} --> and <!-- end -->, not one")
    page.write_text(new, encoding="utf-8")
