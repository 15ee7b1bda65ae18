"""From a finished study to its figure and tables: see README.md in this folder.

python experiments/studies/main.py FOLDER --metric train_loss
python experiments/studies/main.py FOLDER --filters
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from stretto import study
from stretto.report import METRICS, Metric, Panel, Record, panels
from stretto.report.charts import color, shape
from stretto.report.frontier import frontier_chart
from stretto.report.inspection import COLUMNS, GAP, SIDE
from stretto.report.inspection import picture as filter_picture
from stretto.report.metric import metric
from stretto.report.palette import Style, styles
from stretto.report.panel import dominated
from stretto.report.record import methods
from stretto.report.speedup import baseline, speedups

HERE = Path(__file__).parent
WIDTH = 760
SHOWN = 3  # cut-offs of a figure: the easiest, one between, the hardest


def main() -> None:
    """Write NAME.json and NAME.svg beside this file, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="what stretto compare wrote: a study, or a folder for each part")
    parser.add_argument("--metric", choices=[each.name for each in METRICS], default="train_loss")
    parser.add_argument("--filters", action="store_true", help="draw the first layer's filters instead")
    parser.add_argument("--out", type=Path, default=HERE)
    chosen = parser.parse_args()
    if chosen.filters:
        drawn = filters(study.read_study(chosen.folder).records())
        (chosen.out / f"{chosen.folder.name}.svg").write_text(drawn, encoding="utf-8")
        return
    wanted, name = metric(chosen.metric), chosen.folder.name
    parts = {part: study.read_study(folder).records() for part, folder in folders(chosen.folder).items()}
    found = {part: figures(records, wanted) for part, records in parts.items()}
    (chosen.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    picture(parts, wanted).save(chosen.out / f"{name}.svg")
    for part, content in found.items():
        print(f"\n{part}\n\n{table(content)}")


def filters(records: Sequence[Record]) -> str:
    """An SVG: two rows of filters for each method, as they were measured last."""
    high, left = 2 * (SIDE + GAP) + GAP, 150
    parts = []
    for index, record in enumerate(records):
        last = record.measurements[-1]
        assert last.filters is not None, f"{record.id} measured no filters"
        assert last.filter_shape is not None
        drawn = filter_picture(last.filters[: 2 * COLUMNS], last.filter_shape, record.method)
        parts.append(drawn.replace("<svg ", f'<svg x="{left}" y="{index * high}" ', 1))
        parts.append(f'<text x="0" y="{index * high + SIDE}" font-family="sans-serif">{record.method}</text>')
    width, height = left + COLUMNS * (SIDE + GAP), len(records) * high
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"{''.join(parts)}</svg>\n"
    )


def folders(folder: Path) -> dict[str, Path]:
    """The study's parts, in the order in which they began; one without a name where it has none."""
    if (folder / "study.json").is_file():
        return {"": folder}
    found = sorted(folder.glob("*/study.json"), key=lambda path: path.stat().st_mtime)
    return {path.parent.name: path.parent for path in found}


def figures(records: Sequence[Record], wanted: Metric) -> dict[str, Any]:
    """How every method ended, and at each cut-off its run with the least serial compute."""
    names = methods(tuple(records))
    return {
        "metric": wanted.name,
        "methods": {name: ended([each for each in records if each.method == name]) for name in names},
        "cutoffs": [
            {"cutoff": panel.cutoff, "backprop": standing(panel), "methods": arrivals(panel, names)}
            for panel in panels(records, wanted)
        ],
    }


def ended(records: Sequence[Record]) -> dict[str, Any]:
    """The best of a method's runs at their end, each quantity for itself."""
    best = {
        each.name: (max if each.higher else min)(values)
        for each in METRICS
        if (values := [value for record in records if (value := each.final(record)) is not None])
    }
    return {"runs": len(records), "diverged": sum(record.diverged for record in records), **best}


def arrivals(panel: Panel, names: Sequence[str]) -> dict[str, Any]:
    """Serial and total compute in FLOP of a method's soonest run, and both against backprop's; None: not reached."""
    found = {}
    for each in speedups(panel, names):
        point = None if each.arrival is None else each.arrival.at
        found[each.method] = point and {
            "serial_flops": point.serial_flops, "total_flops": point.total_flops,
            "times_as_soon": each.serial, "times_the_total": each.total,
        }  # fmt: skip
    return found


def standing(panel: Panel) -> str:
    """Whether any of backprop's runs is among those that no run of any method beats in both, serial and total."""
    reached = [each for each in panel.arrivals if each.at.serial_flops > 0]
    flags = dominated([(each.at.serial_flops, each.at.total_flops) for each in reached])
    own = [flag for each, flag in zip(reached, flags, strict=True) if each.record.method == "backprop"]
    least = min(reached, key=lambda each: each.at.total_flops, default=None)
    if not own:
        return "not reached"
    if all(own):
        return "dominated"
    return "cheapest" if least is not None and least.record.method == "backprop" else "on the frontier"


def picture(parts: dict[str, Sequence[Record]], wanted: Metric) -> alt.VConcatChart:
    """A row for each part, a panel for each of a few cut-offs that two methods or more reach; beneath, who is who."""
    rows: list[alt.Chart | alt.HConcatChart] = []
    for part, records in parts.items():
        names = methods(tuple(records))
        look, found = styles(names), panels(records, wanted)
        found = [panel for panel in found if len(names) - len(panel.missing) > 1] or found
        places = sorted({0, (len(found) - 1) // 2, len(found) - 1}) if len(found) > SHOWN else range(len(found))
        charts = [
            chart.properties(width=230, height=170, title=f"{part}  {wanted.label} {found[place].cutoff:g}".strip())
            for place in places
            if (chart := frontier_chart(found[place], look)) is not None
        ]
        rows.append(alt.hconcat(*charts))
    return alt.vconcat(*rows, legend(look)).configure_title(fontSize=11, anchor="start")


def legend(look: Mapping[str, Style]) -> alt.LayerChart:
    """Each method's symbol and name, side by side."""
    rows = [{"method": name, "place": place} for place, name in enumerate(look)]
    place = alt.X("place:Q", axis=None, scale=alt.Scale(domain=[0, len(look)]))
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=place)
    symbols = base.mark_point(filled=True, size=90).encode(color=color(look), shape=shape(look))
    words = base.mark_text(align="left", dx=10).encode(text="method:N")
    return alt.LayerChart(layer=[symbols, words]).properties(width=WIDTH, height=20)


def table(content: dict[str, Any]) -> str:
    """Times as soon as backprop / times its total compute, at each cut-off; and how methods ended."""
    names = list(content["methods"])
    lines = [f"| {content['metric']} | backprop's runs | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for row in content["cutoffs"]:
        cells = [cell(row["methods"][name], reference=name == baseline(names)) for name in names]
        lines.append(f"| {row['cutoff']:g} | {row['backprop']} | " + " | ".join(cells) + " |")
    best = [content["methods"][name].get(content["metric"]) for name in names]
    lines.append("| best at the end | | " + " | ".join("-" if each is None else f"{each:.3g}" for each in best) + " |")
    return "\n".join(lines)


def cell(arrival: dict[str, Any] | None, *, reference: bool) -> str:
    """One method at one cut-off."""
    if arrival is None:
        return "not reached"
    if reference or arrival["times_as_soon"] is None:
        return f"{arrival['serial_flops'] / 1e9:.3g} / {arrival['total_flops'] / 1e9:.3g} GFLOP"
    return f"{arrival['times_as_soon']:.2g}x / {arrival['times_the_total']:.2g}x"


if __name__ == "__main__":
    main()
