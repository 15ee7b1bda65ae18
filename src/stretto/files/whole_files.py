"""Files that appear whole or not at all, whatever happens while they are written."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield the path of a temporary file in the same folder, which replaces `file` at the end of the block.

    If the block raises, the temporary file is removed and `file` stays as it was. Folders are made. Raises OSError.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    temporary.touch(exist_ok=False)  # with the permissions that any new file of this user has
    try:
        yield temporary
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(file: Path, content: str) -> None:
    """Write text in UTF-8; a process that reads the file meanwhile finds the former content, or no file."""
    with replacing(file) as temporary:
        temporary.write_text(content, encoding="utf-8")
