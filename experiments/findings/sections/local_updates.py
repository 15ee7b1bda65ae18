"""The sections of study 3's page: compute to cut-offs, figures, random labels, the abstract's claims."""

from collections.abc import Iterable, Mapping, Sequence

from harness.cells import SEEDS, Cell, Record
from harness.end_tables import shown
from harness.halving import Finals
from harness.intervals import Interval, against
from harness.markdown import table
from harness.results import ERROR, TEST, TRAINING, Records, cut_at, finals, last, last_difference, ratio_at, scaled

METHODS = {
    "backprop": "backprop", "greedy": "greedy", "overlapping": "overlapping", "2 chunks": "chunked(chunks=2)",
}  # fmt: skip
LOCAL = tuple(METHODS)[1:]
PIPELINES = ("gpipe(microbatches=8)", "1f1b(microbatches=8)")
SHARE, SHARES = 0.9, (0.5, 0.75, 0.9, 0.97)
WIDTHS = ("MLP 256", "MLP 1024", "MLP 4096")
PAPER = ("MLP 4096",)  # by the paper's accounting
HIGH = "MLP 1024, batches of 1024"
LAG = 18  # steps after which local methods tell a training loss: two for each of the ResNet's nine stages
Found = Mapping[str, Records]
Pair = tuple[Interval | None, Interval | None]
LESS, LOWER, REACHED = ("less", "more"), ("lower", "higher"), ("**reached**", "**missed**")


def more(cells: Iterable[Cell], finished: Mapping[str, Record]) -> str:
    """All sections."""
    found = finals(cells, finished)
    parts = (widths, low_cutoffs, resnets, layers_a_chunk, random_labels, claims)
    return "\n".join(part(found) for part in parts)


def compute_ratio(mine: Records, theirs: Records, what: str) -> float:
    """The compute of a step over the reference's: "serial", "total", or with "paper " before them."""
    costs = [records[SEEDS[0]]["compute"][what] for records in (mine, theirs)]
    return float(costs[0] / costs[1])


def both(found: Found, where: str, name: str, place: int, cut: float | None) -> Pair:
    """Serial and total compute to a cut-off over backprop's."""
    mine, theirs = found.get(f"{where}, {name}"), found.get(f"{where}, backprop")
    steps = ratio_at(mine, theirs, place, cut)
    if mine is None or theirs is None:
        return None, None
    before = "paper " if where in PAPER else ""
    serial, total = (scaled(steps, compute_ratio(mine, theirs, f"{before}{what}")) for what in ("serial", "total"))
    return serial, total


def widths(found: Found) -> str:
    """Figures 3 and 8."""
    text = (
        "## Figures 3 and 8: four methods, three widths\n\n"
        "The paper: *under no circumstance is backprop the most efficient method for training*. Compute to the "
        "test loss that every seed of backprop has reached by 90 % of its steps, times backprop's; width 1024 stands "
        "for figure 3. FLOPs as torch's counter has them; for width 4096 as the paper charges them, a backward as two "
        "forwards. Backprop is *dominated* if some local method needs less of both, the *cheapest* if all of them need "
        "more total compute, by their whole intervals.\n\n"
    )
    rows = []
    for where in WIDTHS:
        cut = cut_at(found.get(f"{where}, backprop"), TEST, SHARE)
        pairs = [both(found, where, name, TEST, cut) for name in LOCAL]
        verdict = efficiency(pairs)
        for name, pair in zip(LOCAL, pairs, strict=True):
            rows.append([where, name, *map(shown, pair), verdict])
            verdict = ""
    return text + table(("network", "method", "serial", "total", "backprop is"), rows)


def efficiency(pairs: Sequence[Pair]) -> str:
    """Whether backprop is dominated by some method, or the cheapest one, by (serial, total) ratios of all methods."""
    known = [(serial, total) for serial, total in pairs if serial is not None and total is not None]
    if any(serial.high < 1 and total.high < 1 for serial, total in known):
        return "dominated"
    if len(known) < len(pairs):
        return "open"
    return "the cheapest" if all(total.low > 1 for _, total in known) else "undecided"


def low_cutoffs(found: Found) -> str:
    """Figure 9."""
    text = (
        "## Figure 9: the decoder, cut-off by cut-off\n\n"
        "The paper: speed-ups around 4 at high losses, around 2 at lower ones and there by overlapping alone. Compute "
        "to the test loss that every seed of backprop has reached by so much of its steps, times backprop's.\n\n"
    )
    rows = []
    for share in SHARES:
        cut = cut_at(found.get("decoder, backprop"), TEST, share)
        for name in LOCAL:
            serial, total = both(found, "decoder", name, TEST, cut)
            told = [_number(cut), name, shown(serial), shown(total), against(serial, 1, LESS)]
            rows.append([f"{100 * share:.0f} %", *told])
    return text + table(("of backprop's steps", "test loss", "method", "serial", "total", "serial compute"), rows)


def resnets(found: Found) -> str:
    """Figures 5 and 10, apart."""
    parts = []
    found = {**found, **{name: at_own_steps(name, records) for name, records in found.items() if "ResNet" in name}}
    for figure, what, place in (("5", "training loss", TRAINING), ("10", "test error", ERROR)):
        cut = cut_at(found.get("ResNet-20, backprop"), place, SHARE)
        text = (
            f"## Figure {figure}: ResNet-20, by {what}\n\n"
            f"Compute to the {what} that every seed of backprop has by 90 % of its steps "
            f"({_number(cut) or 'not known yet'}), times backprop's, and what it was at the end.\n\n"
        )
        reference, rows = found.get("ResNet-20, backprop"), []
        for name in METHODS:
            serial, total = both(found, "ResNet-20", name, place, cut)
            mine = found.get(f"ResNet-20, {name}")
            known = [""] * 3 if name == "backprop" else [shown(serial), shown(total), against(serial, 1, LESS)]
            verdict = "" if name == "backprop" else against(last_difference(mine, reference, place), 0, LOWER)
            rows.append([name, *known, shown(last(mine, place)), verdict])
        head = ("method", "serial", "total", "serial compute", f"last {what}", "against backprop")
        parts.append(text + table(head, rows))
    parts.append(
        f"Local methods tell a training loss {LAG} steps late: it counts at the step of its own minibatch, so that "
        f"their last ones are of minibatches up to {200 - LAG}, and are compared with backprop's there.\n"
    )
    return "\n".join(parts)


def at_own_steps(name: str, records: Records) -> Records:
    """A cell's runs with each training loss at the step of its own minibatch; evaluations stay where they are."""
    late = 0 if name.endswith("backprop") else LAG
    if not late:
        return records
    moved = {}
    for seed, record in records.items():
        evaluated = [[step, None, *rest] for step, _, *rest in record["curve"]]
        told = [[step - late, loss, None, None] for step, loss, *_ in record["curve"] if loss is not None]
        moved[seed] = {**record, "curve": sorted([*evaluated, *told], key=lambda point: point[0])}
    return Finals(moved, records.wanted)


def layers_a_chunk(found: Found) -> str:
    """The MLP of width 256 by the number of its chunks."""
    reference, rows = found.get("MLP 256, backprop"), []
    cut = cut_at(reference, TEST, SHARE)
    for chunks, name in ((1, "backprop"), (2, "2 chunks"), (4, "4 chunks"), (8, "greedy")):
        serial, total = both(found, "MLP 256", name, TEST, cut) if chunks > 1 else (None, None)
        mine = found.get(f"MLP 256, {name}")
        verdict = against(last_difference(mine, reference, TEST), 0, LOWER) if chunks > 1 else ""
        told = [shown(serial), shown(total), shown(last(mine, TEST)), verdict]
        rows.append([f"{chunks}", f"{8 // chunks}", *told])
    text = "## Layers a chunk\n\nThe MLP of width 256: 1 chunk is backprop, 8 are greedy.\n\n"
    return text + table(("chunks", "layers a chunk", "serial", "total", "last test loss", "against backprop"), rows)


def random_labels(found: Found) -> str:
    """The training error at the end."""
    text = (
        "## Random labels\n\n"
        "The paper: backprop fits 0.78 of the labels, local updates 0.285. The error of all training images at the "
        "end, whose labels were drawn anew.\n\n"
    )
    reference, rows = found.get("random labels, backprop"), []
    for name in ("backprop", "greedy", "2 chunks"):
        mine = found.get(f"random labels, {name}")
        verdict = "" if name == "backprop" else against(last_difference(mine, reference, ERROR), 0, LOWER)
        rows.append([name, shown(scaled(last(mine, ERROR), 100)), verdict])
    return text + table(("method", "training error, %", "against backprop"), rows)


def claims(found: Found) -> str:
    """The abstract's three."""
    text = "## The abstract's claims\n\nMemory and bytes are counted, so that they have no intervals.\n"
    return "\n".join([text, counted_claims(found), high_compute(found)])


def counted_claims(found: Found) -> str:
    """The memory of a worker, and the bytes between workers, each against what it is to be compared with."""
    text = (
        f"*Memory*: the largest worker's, activations included, at most that of pipelined backprop with equally large "
        f"minibatches ({' or '.join(f'`{name}`' for name in PIPELINES)}, the smaller one). *Bytes* between workers in "
        "a step: at most those of model parallelism, backprop on the same stages.\n\n"
    )
    head = ("memory, MB", "pipelined, MB", "verdict", "bytes, kB", "model parallelism, kB", "verdict")
    return text + table(("network", "method", *head), counted_rows(found))


def counted_rows(found: Found) -> list[list[str]]:
    """For each network and method: memory, a pipeline's, the verdict; bytes, model parallelism's, the verdict."""
    rows = []
    for where in (*WIDTHS, "decoder", "ResNet-20", HIGH):
        reference = found.get(f"{where}, backprop")
        for name in LOCAL:
            mine = found.get(f"{where}, {name}")
            if mine is None or reference is None:
                if where != HIGH or name != "overlapping":  # which is no cell
                    rows.append([where, name, "", "", "open", "", "", "open"])
                continue
            own, theirs = mine[SEEDS[0]]["worker"], reference[SEEDS[0]]
            pipelined = min(each["memory"] for each in theirs["pipelined"].values())
            told = [
                f"{own['memory'] / 1e6:.2f}", f"{pipelined / 1e6:.2f}", _kept(own["memory"], pipelined),
                f"{own['sent'] / 1e3:.0f}", f"{theirs['worker']['sent'] / 1e3:.0f}",
                _kept(own["sent"], theirs["worker"]["sent"]),
            ]  # fmt: skip
            rows.append([where, name, *told])
    return rows


def high_compute(found: Found) -> str:
    """Whether serial compute over backprop's falls with the batch."""
    text = (
        "*Particularly effective in the high-compute regime*: serial compute to one test loss, times backprop's with "
        "as large batches, falls from batches of 64 to 1024 (MLP 1024). The loss is the higher one of what every "
        "seed of backprop has by 90 % of its steps with either batch, so that both get there: "
        f"{_number(common_cut(found)) or 'not known yet'}.\n\n"
    )
    return text + table(("method", "batches of 64", "batches of 1024", "verdict"), high_compute_rows(found))


def common_cut(found: Found) -> float | None:
    """The test loss that backprop reaches with small and with large batches."""
    references = [found.get(f"{where}, backprop") for where in ("MLP 1024", HIGH)]
    cuts = [cut_at(reference, TEST, SHARE) for reference in references]
    return None if None in cuts else max(each for each in cuts if each is not None)


def high_compute_rows(found: Found) -> list[list[str]]:
    """For each method its serial compute over backprop's in small and in large batches, and whether it falls."""
    rows = []
    for name in ("greedy", "2 chunks"):
        small, large = (both(found, where, name, TEST, common_cut(found))[0] for where in ("MLP 1024", HIGH))
        rows.append([name, shown(small), shown(large), against(large, small, REACHED)])
    return rows


def _kept(value: float, bound: float) -> str:
    return "**reached**" if value <= bound else "**missed**"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
