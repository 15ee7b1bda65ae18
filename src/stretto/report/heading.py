"""The heading of a study that was read from a file: title, source, claim, size and part."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Self

from stretto.errors import UsageError
from stretto.options.kinds import check_values


@dataclass(frozen=True, kw_only=True)
class Heading:
    """The heading of a study.

    `name` is the name of its file; `source` the figure or table of the paper, `claim` what that claims; `size` and
    `part` say which size of the study, and which of its parts, were run.
    """

    title: str
    name: str
    source: str = ""
    claim: str = ""
    size: str = ""
    part: str = ""

    @property
    def text(self) -> str:
        """The title, followed by the part if the study has several."""
        return f"{self.title}: {self.part}" if self.part else self.title

    @property
    def folder(self) -> str:
        """The name of the study's folder: file, size and part joined by hyphens."""
        return "-".join(word for word in (self.name, self.size, self.part) if word)

    def to_json(self) -> dict[str, Any]:
        """The heading as study.json holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], place: str = "heading") -> Self:
        """Read what `to_json` wrote. Raises UsageError for values of other kinds."""
        check_values(place, data, cls)
        wanted = {entry.name: entry for entry in fields(cls)}
        if missing := [name for name, entry in wanted.items() if entry.default is MISSING and name not in data]:
            raise UsageError(f"{place} lacks {', '.join(missing)}")
        return cls(**{name: value for name, value in data.items() if name in wanted})
