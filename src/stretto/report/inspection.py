"""What `stretto inspect` shows of a run: stage by stage how old gradients are, where they point, what outputs tell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.report import units
from stretto.report.charts.inspection import cosine_chart, loss_chart, probe_chart
from stretto.report.filters import picture
from stretto.report.html import fill, write
from stretto.report.palette import styles
from stretto.report.record import Measurement, Record
from stretto.report.view import Specs

HEADS = ("stage", "what", "head", "delay", "head's loss", "cosine", "probe")
REMEDY = "run it again with --measure {} (and another --out; its numbers stay the same)"


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """A run, what its stages and heads are in a few words, and how old gradients are, by stage, in updates."""

    record: Record
    stages: tuple[str, ...]
    heads: tuple[str, ...]
    delays: tuple[int, ...]

    @property
    def outcome(self) -> str:
        """What the run was, and how well the network came to know its training data, and others."""
        record, said = self.record, ""
        if record.points and record.points[-1].train_accuracy is not None:
            last = record.points[-1]
            known, unseen = units.percent(last.train_accuracy), units.percent(last.validation_accuracy)
            said = f"; accuracy {known} on training data, {unseen} on validation"
        return f"{record.option_text}, seed {record.seed}{said}"

    def last(self, field: str) -> Any:
        """What was measured last, None where nothing was."""
        found = seen(self.record, field)
        return getattr(found[-1], field) if found else None

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """One a stage, under HEADS; a cosine as it was first and last."""
        losses, probes = self.last("local_losses"), self.last("probes")
        cosines = [each.cosines for each in seen(self.record, "cosines")]
        return [
            (
                f"{stage}", what, self.heads[stage] or units.NONE, f"{self.delays[stage]}",
                units.number(losses[stage]) if losses else units.NONE,
                course([each[stage] for each in cosines if each is not None]),
                units.percent(probes[stage]) if probes else units.NONE,
            )
            for stage, what in enumerate(self.stages)
        ]  # fmt: skip

    @property
    def missing(self) -> list[str]:
        """What was not measured, and how it is."""
        wanted = {"cosine": ("cosines", "no cosines and no losses of heads"), "probes": ("probes", "no linear probes"),
                  "filters": ("filters", "no filters")}  # fmt: skip
        without = {name: what for name, (field, what) in wanted.items() if self.last(field) is None}
        asked = [name for name in without if name != "filters" or len(without) == len(wanted)]
        said = [f"{', '.join(without[name] for name in asked)}: {REMEDY.format(','.join(asked))}"] if asked else []
        if "filters" in without and "filters" not in asked:
            said.append(
                f"no filters: {REMEDY.format('filters')}; they are of a convolution, or of a Linear that takes images"
            )
        return said

    def to_json(self) -> dict[str, Any]:
        """Plain data, all measurements but pictures among it."""
        keys = ("step", "cosines", "local_losses", "probes")
        return {
            "run": self.record.id,
            "method": self.record.method,
            "stages": list(self.stages),
            "heads": list(self.heads),
            "delays": list(self.delays),
            "train_accuracy": self.record.points[-1].train_accuracy if self.record.points else None,
            "measured": [{key: getattr(each, key) for key in keys} for each in self.record.measurements],
            "missing": self.missing,
        }


def seen(record: Record, field: str) -> list[Measurement]:
    """The measurements that have something of a kind."""
    return [each for each in record.measurements if getattr(each, field) is not None]


def course(values: Sequence[float | None]) -> str:
    """The first and the last."""
    ends = [units.NONE if each is None else f"{each:.2f}" for each in values]
    return units.NONE if not ends else ends[0] if len(ends) == 1 else f"{ends[0]} → {ends[-1]}"


def build_inspection(path: Path, *, title: str, inspected: Sequence[Inspected], facts: Mapping[str, str]) -> Path:
    """Write the page, and return where it is."""
    specs = Specs()
    look = styles([each.record.method for each in inspected])
    shown: dict[str, Any] = {
        "title": title,
        "facts": list(facts.items()),
        "runs": [_run(each, number, specs) for number, each in enumerate(inspected)],
        "legend": [{"method": method, "style": style} for method, style in look.items()],
        "heads": HEADS,
        "specs": {"charts": specs.charts, "datasets": specs.datasets},
    }
    return write(fill("inspect.html.j2", shown), path)


def _run(each: Inspected, number: int, specs: Specs) -> dict[str, Any]:
    record, last = each.record, seen(each.record, "filters")
    drawn = picture(last[-1].filters or (), last[-1].filter_shape or (1, 1, 1), record.id) if last else None
    return {
        "method": record.method,
        "what": each.outcome,
        "rows": each.rows,
        "missing": each.missing,
        "cosines": specs.add(f"cosine-{number}", cosine_chart(seen(record, "cosines"))),
        "losses": specs.add(f"loss-{number}", loss_chart(seen(record, "local_losses"))),
        "probes": specs.add(f"probe-{number}", probe_chart(seen(record, "probes"))),
        "filters": drawn,
        "filters_step": last[-1].step if last else 0,
    }
