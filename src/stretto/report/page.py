"""The data from which one report is made."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.errors import UsageError
from stretto.options.checks import is_among, shown
from stretto.report.measures import Tariff
from stretto.report.prediction import PredictedRun
from stretto.report.record import Heading, Record
from stretto.report.recorded_run import Timelines


@dataclass(frozen=True, kw_only=True)
class StudyProgress:
    """The state of a study that is being made.

    `share` of its steps are made, from 0 to 1. `seconds_left` is an estimate, None where there is none yet. The page
    loads itself again after `reload` seconds; it was written at `written`, in seconds since 1970.
    """

    share: float
    seconds_left: float | None
    reload: float
    written: float = field(default_factory=time.time)


def runs_told(finished: int, planned: int) -> str:
    """How many runs of a study are finished.

    >>> runs_told(7, 16)
    '7 of 16 runs are finished'
    """
    return f"{finished} of {planned} run{'s' * (planned != 1)} {'is' if 1 in (finished, planned) else 'are'} finished"


def time_told(seconds: float | None) -> str:
    """A time that is left, in words; empty if it is not known.

    >>> time_told(200)
    'about 3 minutes left'
    """
    if seconds is None:
        return ""
    for length, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 1.5 * length:
            return f"about {seconds / length:.0f} {unit}s left"
        if seconds >= 0.9 * length:
            return f"about 1 {unit} left"
    return "less than a minute left"


def as_toml(settings: Mapping[str, Any]) -> str:
    """Settings as TOML; one that is None, which TOML cannot say, becomes a comment.

    >>> print(as_toml({"clip": None, "steps": 10}))
    # clip is not set
    steps = 10
    """
    import tomli_w

    unset = [f"# {name} is not set" for name, value in settings.items() if value is None]
    return "\n".join([*unset, tomli_w.dumps(without_none(settings))]).strip()


def without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that are None, on every level."""
    return {
        name: without_none(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if value is not None
    }


ACCOUNTINGS = {"counted": "FLOPs counted by PyTorch on the real modules", "paper": "three times the forward pass"}


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

    @property
    def single(self) -> Record | None:
        """The only run of a study that has one: there is nothing to compare it with."""
        return self.records[0] if self.planned == 1 and self.records else None

    def __post_init__(self) -> None:
        if not is_among(self.accounting, ACCOUNTINGS):
            raise UsageError(f"accounting is {shown(self.accounting)}; write one of {', '.join(ACCOUNTINGS)}")
        if self.planned < len(self.records):
            raise UsageError(f"{len(self.records)} runs, but planned={self.planned}; count every run of the study")
