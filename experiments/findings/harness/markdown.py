"""The Markdown of pages."""

import textwrap
from collections.abc import Iterable, Sequence


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
