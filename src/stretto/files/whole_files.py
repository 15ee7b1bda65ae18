"""Files that appear whole or not at all, whatever happens while they are written."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield the path of a temporary file in the same folder, which replaces `file` at the end of the block.

    If the block raises, the temporary file is removed and `file` stays as it was. Folders are made. Raises OSError.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(file: Path, content: str) -> None:
    """Write text in UTF-8; a process that reads the file meanwhile finds the former content, or no file."""
    with replacing(file) as temporary:
        temporary.write_text(content, encoding="utf-8")
