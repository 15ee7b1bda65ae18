"""What was measured on a machine, kept beside its cluster's file: cluster.toml has cluster.tried.json, say.

Such a file is a table of records under one word, each by a key that differs once what it was measured of does.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.cost.cluster_file import names
from stretto.errors import UsageError
from stretto.options.kinds import check_values, naming, read_json
from stretto.system.destinations import check_file, refuse, write_whole

Record = dict[str, Any]


def key_of(facts: Mapping[str, Any]) -> str:
    """Sixteen characters that differ if the facts do."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class MeasurementCache:
    """Measurements of one kind: the `ending` of their file, and the `word` above its records.

    A damaged file holds no `content`; once it is deleted, `effect`. `check` raises UsageError, ValueError, KeyError or
    TypeError for a record that cannot be used.
    """

    ending: str
    word: str
    content: str
    effect: str
    check: Callable[[Record], object]

    def beside(self, cluster: str | None) -> Path | None:
        """The file for a cluster's file; None for a cluster that comes with Stretto, or has no file."""
        if cluster is None or cluster in names() or not Path(cluster).is_file():
            return None
        return Path(cluster).with_suffix(self.ending)

    def read(self, file: Path) -> dict[str, Record]:
        """The records by their keys; none if there is no file. Raises UsageError if it is damaged."""
        if not file.exists():
            return {}
        try:
            content = read_json(file)
            check_values(f"{file}", content, {self.word: dict[str, dict[str, Any]]})
            records: dict[str, Record] = content[self.word]
            for key, record in records.items():
                with naming(f"{file}: {self.word}.{key}"):
                    self.check(record)
        except (UsageError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file} holds no {self.content}: delete it, and {self.effect} ({error})") from error
        return dict(records)

    def write(self, file: Path, key: str, record: Record) -> None:
        """Keep a record, in place of its former one. Raises UsageError where the file is damaged or not writable."""
        text = json.dumps({self.word: self.read(file) | {key: record}}, indent=1) + "\n"
        refuse(file, "file", lambda: write_whole(file, text))

    def find(
        self, file: Path | None, key: str, measure: Callable[[], Record], is_usable: Callable[[Record], bool]
    ) -> Record:
        """The record in a file, if it is there and usable; else what `measure` returns, which the file keeps."""
        known = {} if file is None else self.read(file)
        if key in known and is_usable(known[key]):
            return known[key]
        if file is None:
            return measure()
        check_file(file)
        record = measure()
        self.write(file, key, record)
        return record
