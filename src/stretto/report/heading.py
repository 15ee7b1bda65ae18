"""What a study is about, where its file says so."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Heading:
    """The title of a study; the paper's figure or table, and what it claims; the size and the part that are run.

    `name` is that of the study's file.
    """

    title: str
    name: str
    source: str = ""
    claim: str = ""
    size: str = ""
    part: str = ""

    @property
    def text(self) -> str:
        """The title, with the part of the study if it has several."""
        return f"{self.title}: {self.part}" if self.part else self.title

    @property
    def folder(self) -> str:
        """A name for its folder."""
        return "-".join(each for each in (self.name, self.size, self.part) if each)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        return cls(**data)
