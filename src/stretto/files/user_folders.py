"""The folders of the user, where the platform keeps them."""

import os
import sys
from pathlib import Path


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
