"""The user's folders, where the platform keeps such things; and files in them that are there whole or not at all."""

import os
import sys
import tempfile
from pathlib import Path


def user_cache() -> Path | None:
    """The folder of this user for what programs can make again; None for a user without a home.

    $XDG_CACHE_HOME where it is set, else ~/.cache; ~/Library/Caches on macOS, %LOCALAPPDATA% on Windows.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    if Path(given).is_absolute():  # the specification ignores a relative one
        return Path(given) / "stretto"
    local = os.environ.get("LOCALAPPDATA", "")
    if sys.platform == "win32" and local:
        return Path(local) / "stretto"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "stretto"


def write_whole(file: Path, content: str) -> None:
    """Write text; whoever reads the file meanwhile finds the former one, or none. Folders are made. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(content)
        Path(scratch).chmod(0o644)
        Path(scratch).replace(file)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
