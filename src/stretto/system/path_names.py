"""Names that become parts of paths: a name from a file or the command line must not lead out of its folder.

And the folders of the user, where the platform keeps them.
"""

import os
import sys
from pathlib import Path
from typing import Any

from stretto.errors import UsageError

LONGEST = 200  # characters: file systems take 255 bytes, and we put some around it
SEPARATORS = "/\\:"  # the last stands behind a drive's letter


def in_path(name: Any, what: str, *, hidden: bool = False) -> str:
    """The name itself, if it can be that of a file in a folder; messages call it `what`.

    Raises UsageError if it is no text, is empty, "." or "..", has more than 200 characters, separators (of Windows,
    too) or control characters, or begins with a dot and is not to be `hidden`.
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


def words_in_path(text: str) -> str:
    """The words of a text as a part of a path: "mine.py:slow(k=2)" is mine-py-slow-k-2."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in text).split())


def user_cache() -> Path | None:
    """Stretto's folder in this user's cache, for what can be computed again; None for a user without a home.

    $XDG_CACHE_HOME where it is set, else ~/.cache; ~/Library/Caches on macOS, %LOCALAPPDATA% on Windows.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if Path(cache).is_absolute():  # the specification ignores a relative one
        return Path(cache) / "stretto"
    local = os.environ.get("LOCALAPPDATA", "")
    if sys.platform == "win32" and local:
        return Path(local) / "stretto"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "stretto"
