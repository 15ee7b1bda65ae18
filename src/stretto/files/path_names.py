"""Names that become parts of paths: what stands in a file or on the command line must not lead out of a folder."""

from typing import Any

from stretto.errors import UsageError

LONGEST = 200  # characters: file systems take 255 bytes, and we put some around it
SEPARATORS = "/\\:"  # the last stands behind a drive's letter


def in_path(name: Any, what: str, *, hidden: bool = False) -> str:
    """The name, if it can be that of one file in a folder; `what` names it in messages.

    `hidden`: it may begin with a dot. Raises UsageError for everything else: no text, nothing, separators (those of
    Windows, too), control characters, "." and "..", a leading dot, more than 200 characters.
    """
    if not isinstance(name, str):
        raise UsageError(f"{what} is {name!r}: it names a file, so write a text")
    bad = sorted({letter for letter in name if letter in SEPARATORS or not (letter.isprintable() or letter == " ")})
    if bad:
        raise UsageError(f"{what} is {name!r}: it names a file, so leave out {', '.join(map(repr, bad))}")
    if name.strip() in ("", ".", "..") or (name.startswith(".") and not hidden):
        raise UsageError(f"{what} is {name!r}: it names a file, so begin it with a letter or a digit")
    if len(name) > LONGEST:
        raise UsageError(f"{what} has {len(name)} characters ({name[:20]!r}...): it names a file, so use {LONGEST}")
    return name
