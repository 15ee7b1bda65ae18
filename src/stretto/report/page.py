"""Everything one report is made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.errors import UsageError
from stretto.report.heading import Heading
from stretto.report.predicted import Predicted
from stretto.report.record import Record
from stretto.report.turns import Timelines

ACCOUNTINGS = {
    "counted": "FLOPs counted by PyTorch on the real modules",
    "paper": "three times the forward pass",
}


@dataclass(frozen=True, kw_only=True)
class Page:
    """What `build` needs: the runs, and the words that a reader needs to judge them."""

    title: str
    heading: Heading | None = None  # what the study is about, where its file says so
    records: tuple[Record, ...]
    planned: int  # runs of the whole study; more than len(records) while some are missing
    accounting: str = "counted"
    accounting_note: str = ""
    dataset: str = ""
    model: str = ""
    heads_note: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # the resolved configuration
    versions: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, str] = field(default_factory=dict)  # method -> SVG of its schedule
    delays: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # method -> its steady delay by stage
    processes: int = 0  # on which each run was made; 0: emulated on one device, so that seconds compare nothing
    timelines: tuple[Timelines, ...] = ()  # of the runs that were traced
    predicted: tuple[Predicted, ...] = ()  # the same runs against what was predicted of them
    left_out: Mapping[str, str] = field(default_factory=dict)  # method -> why it was not run though all were asked for
    command: str = ""  # the command line that ran the study

    def __post_init__(self) -> None:
        if self.accounting not in ACCOUNTINGS:
            raise UsageError(f"accounting is {self.accounting!r}; write one of {', '.join(ACCOUNTINGS)}")
        if self.planned < len(self.records):
            raise UsageError(f"{len(self.records)} runs, but planned={self.planned}; count every run of the study")
