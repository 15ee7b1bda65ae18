"""What was measured on a machine, kept beside its cluster's file: cluster.toml has cluster.tried.json, say.

Such a file is a table of records under one word, each by a key that differs once what it was measured of does.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stretto.cost.cluster_file import names
from stretto.errors import UsageError
from stretto.files.destinations import write_whole
from stretto.options.kinds import check_values, naming, read_json

Record = Mapping[str, Any]


def file_beside(cluster: str, ending: str) -> Path | None:
    """The file with this ending for a cluster; None for one that comes with Stretto, or has no file."""
    known = cluster not in names() and Path(cluster).is_file()
    return Path(cluster).with_suffix(ending) if known else None


def key_of(facts: Mapping[str, Any]) -> str:
    """Sixteen characters that differ if the facts do."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def write(file: Path, word: str, records: Mapping[str, Record]) -> None:
    """Write all records, in place of those in the file. Raises OSError."""
    write_whole(file, json.dumps({word: records}, indent=1) + "\n")


def read(file: Path, word: str, check: Callable[[Record], object], *, what: str, effect: str) -> dict[str, Record]:
    """The records in a file, by their keys; none if there is no file.

    `check` raises UsageError, ValueError, KeyError or TypeError for a record that cannot be used. Raises UsageError for
    a file that cannot be read, or is damaged: it holds no `what`, and without it `effect`.
    """
    if not file.exists():
        return {}
    try:
        content = read_json(file)
        check_values(f"{file}", content, {word: dict[str, dict[str, Any]]})
        records: dict[str, Record] = content[word]
        for key, record in records.items():
            with naming(f"{file}: {word}.{key}"):
                check(record)
    except (UsageError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} holds no {what}: delete it, and {effect} ({error})") from error
    return dict(records)
