"""The page's sections on what study 4 times and counts, made of its runs and launches."""

import statistics
from collections.abc import Mapping, Sequence

from harness.cells import Record, Study
from harness.clock import (
    StepTime,
    Timed,
    doubts_of,
    load_told,
    milliseconds,
    soonest,
    step_time,
    time_ratio,
    time_verdict,
    times_to_cutoff,
)
from harness.intervals import Interval, interval, ratio
from harness.launches import LAUNCHES as NUMBER
from harness.launches import Launch
from harness.markdown import table

from lecture_parts.launches import (
    BATCHES,
    LINKS,
    NETWORKS,
    SPATIAL,
    SPATIAL_BATCH,
    SYNCS,
    WAYS,
    bytes_by_formula,
    counted,
    replicas,
    spatial,
    utilisation,
)

OPEN, OTHERS = "not measured yet", "cores of others"
TIMES = ("times one thread", "times two threads")
EXAMPLES = 10_000  # of an epoch
Launches = Mapping[str, Record]


def clock(runs: Launches, launches: Launches) -> str:
    """All sections."""
    return "\n".join(
        [
            f"## Times\n\n{load_told(launches)}\n",
            _spatial(launches),
            _utilisation(launches),
            _bytes(launches),
            _links(runs, launches),
        ]
    )


def _spatial(launches: Launches) -> str:
    rows = []
    for processes, threads in SPATIAL:
        row = [str(processes) if threads == 1 else f"{processes} of {threads} threads"]
        for part in ("forward", "step"):
            own, *others = (
                step_time(spatial(*place), launches, part) for place in ((processes, threads), *SPATIAL[:2])
            )
            row.append(OPEN if own is None else own.shown)
            row += ["" if processes == 1 else speed_up(own, other) for other in others]
        rows.append([*row, "" if own is None else f"{own.others:.2f}"])
    return (
        f"### Spatial parallelism\n\nAlexNet on {SPATIAL_BATCH} random images of 3 x 128 x 128, slabs of rows on 2 "
        "processes and of rows and columns on 4: ms, medians of 10 repetitions, their geometric mean and interval "
        "over three launches; and how many times as fast as one process of one thread and of two. Processes beyond "
        "the number of cores take turns, and nothing is concluded from their times.\n\n"
        + table(("processes", "forward, ms", *TIMES, "step, ms", *TIMES, OTHERS), rows)
    )


def speed_up(own: StepTime | None, alone: StepTime | None) -> str:
    """How many times as fast one configuration is as another, with the verdict."""
    if own is None or alone is None:
        return ""
    found = ratio(alone.seconds, own.seconds, dict.fromkeys(own.seconds, 0.0))
    if found is None:
        return ""
    return f"{found}, {time_verdict(found, ('slower', 'faster'), (own, alone))}"


def _utilisation(launches: Launches) -> str:
    parts = [
        "### Utilisation and epoch time against the batch\n\n"
        "One process of one thread. A step is predicted from its layers, t0 + b t1 through batches of 16 and 64, "
        "before it is measured. Utilisation: examples a second over those of the batch of 256, measured; and "
        "b t1 / t(b) of the prediction, which has no largest batch. An epoch is 10,000 examples.\n"
    ]
    for network in NETWORKS:
        launch = utilisation(network)
        times = {name: _by_batch(launch, launches, name) for name in ("measured", "predicted")}
        if None in times["measured"] + times["predicted"]:
            parts.append(f"{network}: {OPEN}.\n")
            continue
        rows = [_batch_row(batch, times) for batch in BATCHES]
        parts.append(f"{network}\n\n" + table(HEAD, rows) + f"\n{_errors(times)}\n")
    return "\n".join(parts)


HEAD = (
    "batch", "step, ms", "predicted, ms", "error, %", "utilisation, %", "predicted, %", "epoch, s", "predicted, s",
)  # fmt: skip
Times = Mapping[str, Sequence[StepTime | None]]


def _by_batch(launch: Launch, launches: Launches, name: str) -> list[StepTime | None]:
    return [step_time(launch, launches, f"{name}, {batch}") for batch in BATCHES]


def _batch_row(batch: int, times: Times) -> list[str]:
    index = BATCHES.index(batch)
    measured, predicted = ([each.interval.mean for each in times[name] if each] for name in ("measured", "predicted"))
    slope = (predicted[-1] - predicted[0]) / (BATCHES[-1] - BATCHES[0])
    step = times["measured"][index]
    assert step is not None
    steps = -(-EXAMPLES // batch)
    return [
        str(batch),
        step.shown,
        milliseconds(predicted[index]),
        f"{_error(times, index)}",
        f"{100 * batch / BATCHES[-1] * measured[-1] / measured[index]:.0f}",
        f"{100 * batch * slope / predicted[index]:.0f}",
        f"{steps * measured[index]:.3g}",
        f"{steps * predicted[index]:.3g}",
    ]


def _error(times: Times, index: int) -> Interval:
    """The prediction's error in %, launch by launch."""
    measured, predicted = times["measured"][index], times["predicted"][index]
    assert measured is not None
    assert predicted is not None
    return interval([100 * (predicted.seconds[n] / measured.seconds[n] - 1) for n in range(NUMBER)])


def _errors(times: Times) -> str:
    errors = [abs(_error(times, index).mean) for index in range(len(BATCHES))]
    others = max(each.others for each in times["measured"] if each is not None)
    return (
        f"Mean error of the prediction {statistics.fmean(errors):.1f} %, the largest {max(errors):.1f} %; other "
        f"programs used at most {others:.2f} cores."
    )


def _bytes(launches: Launches) -> str:
    rows = []
    for way in WAYS:
        told = [launches.get(f"{counted(way).place} | launch {number}") for number in range(NUMBER)]
        found = sorted({record["figures"]["bytes"] for record in told if record is not None})
        formula = None if way.endswith("automatic") else bytes_by_formula(way)
        verdict = ""
        if found and formula is not None:
            verdict = "equal" if found == [formula] else "**not equal**"
        rows.append(
            [way, OPEN if not found else "; ".join(f"{each:,.0f}" for each in found),
             "" if formula is None else f"{formula:,.0f}", verdict]
        )  # fmt: skip
    return (
        "### Bytes of data and operator parallelism\n\n"
        "AlexNet at 3 x 128 x 128 with 1000 classes, 32 examples, two processes: bytes that a process sends a step, "
        "counted at torch's collectives as a ring sends them, beside the formula of `stretto.parallel.price` with "
        "biases among the parameters. Data: with a number for each tensor, "
        "whether it has a gradient. Operator: every layer cut by its outputs, as the formula has it; a convolution of "
        "two groups on two processes only gathers the gradient of its input, half of the formula's sum. "
        "Automatic: as the package cuts without a plan, pairs of layers with one sum behind. Messages below 256 bytes "
        "(losses, counts) are left out.\n\n" + table(("way", "bytes, counted", "by the formula", "verdict"), rows)
    )


def link_rows(runs: Launches, launches: Launches) -> list[list[str]]:
    """For each link and way: a step, the time to the error, how it lies to all-reduce's, whether it is the soonest."""
    import lecture

    study: Study = lecture.STUDY
    reference, rows = study.cells[0], []
    for link in LINKS:
        steps = {name: step_time(replicas(name, link), launches) for name in SYNCS}
        ways = {name: Timed(study.cell(name), step) for name, step in steps.items() if step is not None}
        times = times_to_cutoff(study, runs, ways, reference)
        known = len(times) == len(SYNCS) and not doubts_of(way.step for way in ways.values())
        best = soonest(times) if known else None
        for name, step in steps.items():
            rows.append(
                ["loopback" if link is None else f"{link} Mbit/s", name, OPEN if step is None else step.shown,
                 str(times.get(name, "")), _against(study, runs, ways.get(name), ways.get(reference.name)),
                 "soonest by its mean" if best == name else "", "" if step is None else f"{step.others:.2f}"]
            )  # fmt: skip
    return rows


def _links(runs: Launches, launches: Launches) -> str:
    return (
        "### Time to the same test error over links\n\nSeconds to the error that every seed of all-reduce has by "
        "step 360: steps from the runs, times seconds a step over the link, between hosts of one process each (network "
        "namespaces; p: predicted from loopback and the bytes of a step, where such links are not allowed). Links have "
        "no delay of their own. Intervals from both: half widths of logarithms as squares. *Sooner* and *later*, "
        "against all-reduce on the same link, only where all of the ratio's interval lies beside 1.\n\n"
        + table(
            ("link", "way", "a step, ms", "seconds to the error", "against all-reduce", "", OTHERS),
            link_rows(runs, launches),
        )
    )


def _against(study: Study, runs: Launches, mine: Timed | None, theirs: Timed | None) -> str:
    if mine is None or theirs is None or mine is theirs:
        return ""
    found = time_ratio(study, runs, mine, theirs, theirs.cell)
    return "" if found is None else f"{found}, {time_verdict(found, ('sooner', 'later'), (mine.step, theirs.step))}"
