"""The data from which one report is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.errors import UsageError
from stretto.options.checks import is_among, shown
from stretto.report.expenses import Tariff
from stretto.report.heading import Heading
from stretto.report.prediction import PredictedRun
from stretto.report.record import Record
from stretto.report.study_progress import StudyProgress
from stretto.report.turns import Timelines

ACCOUNTINGS = {
    "counted": "FLOPs counted by PyTorch on the real modules",
    "paper": "three times the forward pass",
}


@dataclass(frozen=True, kw_only=True)
class Page:
    """The runs of a report, and what a reader needs to know about them."""

    title: str
    heading: Heading | None = None  # of a study that was read from a file
    records: tuple[Record, ...]
    planned: int  # runs of the whole study; more than len(records) while some are missing
    accounting: str = "counted"
    accounting_note: str = ""
    dataset: str = ""
    model: str = ""
    heads_note: str = ""
    norms_note: str = ""  # of batch norms where methods cut minibatches
    settings: Mapping[str, Any] = field(default_factory=dict)  # the resolved configuration
    versions: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, str] = field(default_factory=dict)  # method -> SVG of its schedule
    own_options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # method -> names of the options it takes
    delays: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # method -> its steady delay by stage
    tariffs: Mapping[str, Tariff] = field(default_factory=dict)  # method -> that of its best run, where it is known
    processes: int = 0  # of each run; 0: emulated on one device, so that its seconds say nothing about the method
    timelines: tuple[Timelines, ...] = ()  # of the runs that were traced
    predicted: tuple[PredictedRun, ...] = ()  # the traced runs compared with predictions
    left_out: Mapping[str, str] = field(
        default_factory=dict
    )  # {method: why it was not run}, where all methods were asked for
    command: str = ""  # the command line that ran the study
    progress: StudyProgress | None = None  # of a study that is being made: its page loads itself again

    def __post_init__(self) -> None:
        if not is_among(self.accounting, ACCOUNTINGS):
            raise UsageError(f"accounting is {shown(self.accounting)}; write one of {', '.join(ACCOUNTINGS)}")
        if self.planned < len(self.records):
            raise UsageError(f"{len(self.records)} runs, but planned={self.planned}; count every run of the study")
