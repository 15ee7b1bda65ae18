"""The sections of study 7's page: what heads alone do, and who is first by serial compute and by simulated time.

Times come from `stretto.study.predicted_runs`, which `stretto simulate` uses, for the study's networks as a user gives
them (`networks` below) on the cluster that `stretto calibrate` measured (`pages/chunks/cluster.toml`).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness import markdown
from harness.cells import Cell, Record
from harness.end_tables import shown
from harness.halving import final_records, value
from harness.intervals import Interval, against, bounded, interval
from harness.results import ERROR, TEST, Records, arrivals, cut_at, finals, ratio_at, scaled, sound

from stretto.cost import Cluster, find_cluster

HERE = Path(__file__).parent
CLUSTER = HERE.parent / "pages" / "chunks" / "cluster.toml"
LENGTHS, SHARE, TIMES = (500, 2000), 0.9, 1.5
CLAIM = f"two chunks at most {1 / TIMES:.3g} of the time of the soonest synchronous method"
WORKERS, LINK, CUT = (2, 4, 8), "100Mbit", 8  # micro-batches
LOCAL = ("2 chunks", "4 chunks", "greedy", "overlapping")
TEXTS = ("decoder", "recurrent")
SYNCHRONOUS = {"1f1b": "backprop", "gpipe": "backprop", "zb-h1": "backprop", "1f1b with heads": "heads"}
TIMED = {
    "1f1b": f"1f1b(microbatches={CUT})",
    "gpipe": f"gpipe(microbatches={CUT})",
    "zb-h1": f"zb-h1(microbatches={CUT})",
    "2 chunks": f"chunked(chunks=2, microbatches={CUT})",
    "4 chunks": f"chunked(chunks=4, microbatches={CUT})",
    "greedy": "greedy",
    "overlapping": "overlapping",
}
Found = Mapping[str, Records]


def heads_of(cells: Sequence[Cell], finished: Mapping[str, Record], network: str) -> Cell | None:
    """The cell that stands for backprop with heads: the smallest mean validation loss at the end."""
    known = []
    for cell in cells:
        records = final_records(cell, finished)
        if cell.name.startswith(f"{network}, heads") and sound(records):
            known.append((sum(map(value, records.values())) / len(records), cell.name, cell))
    return min(known)[2] if known else None


def more(cells: Sequence[Cell], finished: Mapping[str, Record]) -> str:
    """All sections."""
    networks = list(dict.fromkeys(cell.settings["network"] for cell in cells))
    chosen = {network: heads_of(cells, finished, network) for network in networks}
    return "\n".join([control(cells, finished, chosen), times(cells, finished, chosen)])


def control(cells: Sequence[Cell], finished: Mapping[str, Record], chosen: Mapping[str, Cell | None]) -> str:
    """Steps to backprop's loss, and how much of the advantage of two chunks backprop with heads has."""
    text = (
        "## What heads alone do\n\n"
        "Steps to the test loss that every seed of backprop has reached by 90 % of 500 and of 2,000 steps, over "
        "backprop's. *Of the advantage*: the steps that a method saves, over those that two chunks save, means of "
        "seeds; *less than half* or *more than half* where the interval of the difference, seed by seed, leaves 0 "
        "out.\n\n"
    )
    found, rows = finals(cells, finished), []
    for network, heads in chosen.items():
        reference = found.get(f"{network}, backprop")
        for length in LENGTHS:
            cut = None if reference is None else cut_at(reference, TEST, SHARE * length / _steps(reference))
            for cell in cells:
                if cell.settings["network"] != network or cell.reference is None:
                    continue
                mine, chunks = found.get(cell.name), found.get(f"{network}, 2 chunks")
                name = cell.name.removeprefix(f"{network}, ") + (" (stands for heads)" if cell is heads else "")
                told = [network, f"{length}", name, shown(ratio_at(mine, reference, TEST, cut))]
                rows.append([*told, *_share(mine, chunks, reference, cut)])
    return text + markdown.table(
        ("network", "steps", "method", "steps over backprop's", "of the advantage", "verdict"), rows
    )


def _steps(records: Records) -> int:
    return int(next(iter(records.values()))["steps"])


def _share(mine: Records | None, chunks: Records | None, plain: Records | None, cut: float | None) -> list[str]:
    """The share of two chunks' advantage, and how it lies to a half."""
    if mine is None or chunks is None or plain is None or cut is None:
        return ["", ""]
    steps = [arrivals(each, TEST, cut) for each in (mine, chunks, plain)]
    saved, best = [], []
    for seed in sorted(mine):
        own, theirs, reference = (each[seed] for each in steps)
        if own is None or theirs is None or reference is None:
            return ["", "a seed never arrives"]
        saved.append(reference - own)
        best.append(reference - theirs)
    half = interval([one - other / 2 for one, other in zip(saved, best, strict=True)])
    share = f"{100 * sum(saved) / sum(best):.0f} %" if sum(best) > 0 else "none to share"
    return [share, against(half, 0, ("less than half", "more than half"))]


def times(cells: Sequence[Cell], finished: Mapping[str, Record], chosen: Mapping[str, Cell | None]) -> str:
    """Simulated time to the test error of backprop with heads."""
    text = (
        "## By simulated time\n\n"
        f"A step's time with {CUT} micro-batches (`greedy` and `overlapping`: whole minibatches), one worker a machine "
        f"and links of {LINK} between them, or all in one machine, as `stretto simulate` has it for the cluster that "
        "was measured; times steps to the test error that every seed of backprop with heads has reached by 90 % of "
        "2,000 steps. *Over the soonest*: this time over that of the soonest synchronous method, steps seed by "
        "seed.\n\n"
    )
    if not CLUSTER.is_file():
        return f"{text}Not measured yet.\n"
    found, rows, claims = finals(cells, finished), [], []
    for network, heads in chosen.items():
        for link in (None, LINK):
            for workers in WORKERS:
                told, claim = _timed(network, heads, found, workers, link)
                rows += told
                if claim is not None and (workers, link) == (WORKERS[-1], LINK):
                    claims.append([f"{network}: {CLAIM}", *claim])
    head = ("network", "workers", "links", "method", "ms a step", "steps", "seconds", "over the soonest", "verdict")
    return f"{text}{markdown.table(('figure', 'value', 'verdict'), claims)}\n{markdown.table(head, rows)}"


def _timed(
    network: str, heads: Cell | None, found: Found, workers: int, link: str | None
) -> tuple[list[list[str]], list[str] | None]:
    """The rows of one place, and the claim's value and verdict there."""
    methods = dict(TIMED)
    reference = None if heads is None else found.get(heads.name)
    cut = None if reference is None else cut_at(reference, ERROR, SHARE)
    if heads is not None:
        methods["1f1b with heads"] = heads.method.replace("backprop(", f"1f1b(microbatches={CUT}, ")
    kind = {"batch": 16, "optimizer": "adamw"} if network == "decoder" else {"batch": 32, "optimizer": "sgd"}
    seconds = {name: seconds_a_step(network, method, workers, link, **kind) for name, method in methods.items()}
    records = {}
    for name in methods:
        cell = SYNCHRONOUS.get(name, name)
        records[name] = reference if cell == "heads" else found.get(f"{network}, {cell}")
    steps = {name: _mean_steps(records[name], cut) for name in methods}
    best = min((name for name in SYNCHRONOUS if name in methods), key=lambda name: steps[name] * seconds[name])
    rows, claim = [], None
    for name in methods:
        over = _over(records[name], records[best], cut, seconds[name] / seconds[best])
        place = [network, f"{workers}", link or "in one machine", name, f"{1000 * seconds[name]:.1f}"]
        known = math.isfinite(steps[name])
        taken = [f"{steps[name]:.0f}", f"{steps[name] * seconds[name]:.1f}"] if known else ["", ""]
        judged = ["", "soonest synchronous"] if name == best else [shown(over), against(over, 1, ("sooner", "later"))]
        rows.append([*place, *taken, *judged])
        if name == "2 chunks":
            claim = [shown(over), bounded(over, 1 / TIMES)]
    return rows, claim


def _mean_steps(records: Records | None, cut: float | None) -> float:
    """The mean steps to the cut-off; infinite where it is not known or a seed never arrives."""
    arrived = [] if records is None or cut is None else [*arrivals(records, ERROR, cut).values()]
    known = [step for step in arrived if step is not None]
    return sum(known) / len(known) if known and len(known) == len(arrived) else math.inf


def _over(mine: Records | None, theirs: Records | None, cut: float | None, seconds: float) -> Interval | None:
    """This one's time over the other one's, seed by seed; without an upper end where a seed never arrives."""
    return scaled(ratio_at(mine, theirs, ERROR, cut), seconds)


@functools.cache
def seconds_a_step(
    network: str, method: str, workers: int, link: str | None, *, batch: int = 16, optimizer: str = "adamw"
) -> float:
    """The simulated time of a step of a network of `networks.py` in eight stages, heads included."""
    from stretto.settings.runs import TrainSettings
    from stretto.study.predicted_runs import seconds_per_step
    from stretto.study.prepare import prepare_trial, resolve, with_any_rate

    settings = TrainSettings(
        model=f"{HERE / 'networks.py'}:{network.replace('-', '_').lower()}",
        data=f"{HERE / 'networks.py'}:{network.replace('-', '_').lower()}_data",
        loss="token_cross_entropy" if network in TEXTS else "auto",
        optimizer=optimizer,
        batch_size=batch,
        method=method,
        stages=8,
        workers=workers,
    )
    return seconds_per_step(prepare_trial(with_any_rate(resolve(settings))), on(workers, link))


def on(workers: int, link: str | None) -> Cluster:
    """The measured cluster with so many workers: in one machine, or one each on so many, joined by the link."""
    measured = find_cluster(str(CLUSTER))
    if link is not None:
        return measured.on_machines(workers, workers, link)
    (group,) = measured.groups
    return replace(measured, groups=(replace(group, nodes=1, workers=workers, speeds=None),))
