"""Draws the charts of the gallery (docs/gallery.md) from the results that are committed: python scripts/charts.py."""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import altair as alt

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
SIZE = {"width": 420, "height": 250}  # pixels


def result(path: str) -> Any:
    """A file of results."""
    return json.loads((ROOT / path).read_text())


def chart(rows: Iterable[dict[str, Any]], title: str) -> alt.Chart:
    """An empty chart of these rows."""
    return alt.Chart(alt.InlineData(values=list(rows)), title=title).properties(**SIZE)


def lines(rows: Iterable[dict[str, Any]], title: str, x: alt.X, y: alt.Y, color: str) -> alt.Chart:
    """A line with points for each value of `color`, in the order of the rows."""
    rows = list(rows)
    names = list(dict.fromkeys(row[color] for row in rows))
    drawn: alt.Chart = chart(rows, title).mark_line(point=True)
    return drawn.encode(x=x, y=y, color=alt.Color(f"{color}:N", sort=names, title=None))


def bars(rows: Iterable[dict[str, Any]], title: str, x: alt.X, y: str, color: str | None = None) -> alt.Chart:
    """A bar for each row, in the order of the rows."""
    rows = list(rows)
    names = list(dict.fromkeys(row[y] for row in rows))
    drawn: alt.Chart = chart(rows, title).mark_bar()
    drawn = drawn.encode(x=x, y=alt.Y(f"{y}:N", sort=names, title=None, axis=alt.Axis(labelLimit=260)))
    return drawn if color is None else drawn.encode(yOffset=f"{color}:N", color=alt.Color(f"{color}:N", title=None))


def delay() -> alt.Chart:
    """Test accuracy after 12 epochs against the learning rate, for some cures under SGD."""
    chosen = ("no delay", "PB", "PB, stash", "SC", "LWP, velocity", "PipeMare T1 + T2", "PipeDream", "SpecTrain")
    rows = [
        {
            "method": run["name"],
            "rate": rate,
            "accuracy": 100 * mean(seed["test"][-1] for seed in run["accuracy"] if seed["rate"] == rate),
        }
        for run in result("experiments/delay/result.json")["runs"]
        if run["settings"]["optimizer"] == "sgd" and run["name"] in chosen
        for rate in run["settings"]["rates"]
    ]
    rate = alt.X("rate:Q", scale=alt.Scale(type="log"), title="learning rate, for batches of 8")
    return lines(
        rows, "Twenty stages, SGD: which cure holds?", rate, alt.Y("accuracy:Q", title="test accuracy, %"), "method"
    )


def large_batch() -> alt.Chart:
    """Test accuracy at the best rate against the batch size, after equal examples."""
    names = {"sgd, unscaled": "SGD, unscaled", "sgd, linear": "SGD, linear", "lars, sqrt": "LARS", "lamb, sqrt": "LAMB"}
    studies = result("experiments/large_batch/result.json")["studies"]
    rows = [
        {"optimizer": name, "batch": batch["batch"], "accuracy": 100 * mean(batch["test_accuracy"])}
        for study, name in names.items()
        for batch in studies[study]["batches"]
    ]
    batch = alt.X("batch:Q", scale=alt.Scale(type="log", base=2), title="batch size, examples")
    accuracy = alt.Y("accuracy:Q", scale=alt.Scale(zero=False), title="test accuracy, %")
    return lines(rows, "20,000 examples: what do larger batches cost?", batch, accuracy, "optimizer")


def recommender() -> alt.Chart:
    """Milliseconds a step of three processes, with and without one that pauses."""
    rows = [
        {
            "sync": run["kind"],
            "ms": run["milliseconds_per_step"],
            "processes": "one pauses" if run["slow"] else "all alike",
        }
        for run in result("experiments/recommender/result.json")["results"]
    ]
    return bars(
        rows, "A recommender on three processes", alt.X("ms:Q", title="milliseconds a step"), "sync", "processes"
    )


def two_workers() -> alt.Chart:
    """How many times as fast two processes are as one with two threads."""
    found = result("benchmarks/two_workers/result.json")["figures"]
    threads = found["one process, two threads"]["milliseconds"]
    rows = [
        {"variant": name, "speed": threads / figures["milliseconds"]}
        for name, figures in found.items()
        if not any(left_out in name for left_out in ("4 micro", "=4", "gathered twice", "reshard", "two one-worker"))
    ]
    title = "What two processes make of one batch"
    return bars(rows, title, alt.X("speed:Q", title="times one process with two threads"), "variant")


def prediction() -> alt.LayerChart:
    """Predicted against measured step times of plans of ten networks that nobody had looked at."""
    rows = [
        {"predicted": figures["predicted ms"], "measured": figures["measured ms"], "network": name.split(",")[0]}
        for part in ("unseen", "unseen-2")
        for name, figures in result(f"benchmarks/prediction/road-{part}.json")["cases"].items()
        if not name.endswith(("chosen", "tried"))
    ]
    log = alt.Scale(type="log", domain=[10, 220], nice=False)
    points: alt.Chart = chart(rows, "Plans of unseen networks: predicted and measured").mark_point(filled=True, size=50)
    points = points.encode(
        x=alt.X("measured:Q", scale=log, title="measured, ms a step"),
        y=alt.Y("predicted:Q", scale=log, title="predicted, ms a step"),
        color=alt.Color("network:N", title=None),
    )
    equal: alt.Chart = (
        alt.Chart(alt.InlineData(values=[{"x": 10}, {"x": 220}])).mark_line(color="#b0bec5").encode(x="x:Q", y="x:Q")
    )
    return alt.LayerChart(layer=[equal, points])


def emulation() -> alt.Chart:
    """What emulation costs against hand-written loops, by the width of the layers."""
    rows = [
        {"ratio": name, "width": int(width), "times": value}
        for width, figures in result("benchmarks/emulation/result.json")["widths"].items()
        for name, value in figures["ratios"].items()
        if "uncut" not in name
    ]
    width = alt.X("width:Q", scale=alt.Scale(type="log", base=2), title="units a layer")
    return lines(rows, "Emulation against hand-written loops", width, alt.Y("times:Q", title="time, ratio"), "ratio")


def versions() -> alt.Chart:
    """Memory of weight versions: measured, and the closed form."""
    found = result("benchmarks/delay/memory.json")["methods"]
    form = "versions of a stage's weights, closed form"
    rows = [
        row
        for name, figures in found.items()
        for row in (
            {"method": name, "versions": figures[form], "what": "closed form"},
            {
                "method": name,
                "versions": figures[form] * figures["ratio to the closed form"]["versions"],
                "what": "measured",
            },
        )
    ]
    return bars(
        rows,
        "Versions of weights, eight stages",
        alt.X("versions:Q", title="copies of one stage's weights"),
        "method",
        "what",
    )


def all_reduce() -> alt.Chart:
    """Time of two algorithms over torch's own all-reduce, by the size of the tensor."""
    rows = [
        {"algorithm": name, "kilobytes": int(size) / 1024, "times": value}
        for size, figures in result("benchmarks/all_reduce/result.json")["2 workers"]["figures"].items()
        for name, value in figures["times torch"].items()
    ]
    size = alt.X("kilobytes:Q", scale=alt.Scale(type="log", base=4), title="size, KB")
    return lines(rows, "All-reduce of two processes", size, alt.Y("times:Q", title="time over torch's"), "algorithm")


def simulator() -> alt.Chart:
    """Simulated actions a second."""
    rows = [
        {
            "schedule": f"{run['schedule']}, {run['workers']} workers",
            "rate": run["rate"] / 1e6,
            "network": f"{run['network']}, {run['sends']}",
        }
        for run in result("benchmarks/simulator/result.json")["speed"]
    ]
    return bars(
        rows, "How fast the simulator is", alt.X("rate:Q", title="million actions a second"), "network", "schedule"
    )


CHARTS = (delay, large_batch, recommender, two_workers, prediction, emulation, versions, all_reduce, simulator)


def main() -> None:
    """Write every chart."""
    FOLDER.mkdir(exist_ok=True)
    for draw in CHARTS:
        draw().configure(background="#ffffff").save(FOLDER / f"{draw.__name__}.svg")


if __name__ == "__main__":
    main()
