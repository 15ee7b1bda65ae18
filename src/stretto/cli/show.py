"""stretto show: draw a schedule."""

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

from stretto.cli.output import FLAG, print_json
from stretto.words import WHOLE

MOST = 128  # stages, micro-batches: more takes long to work out, and nobody could read it


def show(
    method: str,
    /,
    *,
    stages: Annotated[int, WHOLE] = 4,
    workers: Annotated[int | None, WHOLE] = None,
    microbatches: Annotated[int, WHOLE] = 4,
    svg: Path | None = None,
    csv: Path | None = None,
    json: Annotated[bool, FLAG] = False,
) -> None:
    """Draw the schedule of a method, with what can be read off it: delays, bubble, activations held.

    One column is the time of a forward; the two halves of a backward take one each.

    Parameters
    ----------
    method
        Method with its options, e.g. greedy or "overlapping(delay=1)".
    stages
        Number of stages.
    workers
        Number of workers; one a stage unless said otherwise.
    microbatches
        Micro-batches that enter before the pipeline drains.
    svg
        File to draw the schedule into.
    csv
        File to write a synchronous schedule into, as torch.distributed.pipelining reads it.
    json
        Print one JSON object on stdout, nothing else.
    """
    from stretto.errors import UsageError
    from stretto.methods import method as find
    from stretto.schedule import check, draw
    from stretto.schedule.export import to_csv
    from stretto.simulate import period, simulate, unit_costs

    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if not 1 <= value <= MOST:
            raise UsageError(f"{name}={value}: choose a whole number from 1 to {MOST}")
    chosen = find(method)
    if workers is not None and not 1 <= workers <= stages:
        raise UsageError(f"workers={workers} for {stages} stages: choose between 1 and {stages}")
    schedule, rules = chosen.plan(stages, workers)
    check(schedule, rules)
    turns = -(-microbatches // schedule.per_turn)
    timeline = simulate(schedule, rules, turns)
    steady = period(schedule, rules, unit_costs)
    work = sum(unit_costs(action) for body in schedule.body for action in body)
    held = simulate(schedule, rules, schedule.drain + 2)
    facts: dict[str, Any] = {
        "method": str(chosen),
        "stages": stages,
        "workers": schedule.num_workers,
        "microbatches": turns * schedule.per_turn,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "steady_period": steady,
        "steady_bubble": 1 - work / (steady * schedule.num_workers),
        "delay": list(chosen.delays(schedule).steady),
        "peak_activations": list(held.peak_graphs),
        "peak_inputs": list(held.peak_inputs),
        "weight_versions": list(chosen.versions(schedule)),
        "heads_after": list(rules.reach.heads[:-1]),
    }
    if csv is not None:
        write(csv, to_csv(schedule))
    if svg is not None:
        write(svg, draw.svg(timeline.spans, title=f"{chosen} on {schedule.num_workers} workers"))
    if json:
        actions = [[str(a) for a in schedule.unroll(w, turns)] for w in range(schedule.num_workers)]
        print_json({**facts, "actions": actions, "svg": None if svg is None else str(svg)})
        return
    width = shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else 1000
    print(f"{chosen}: {chosen.summary}\n\n{draw.text(timeline.spans, width=width)}\n")
    print(f"these {facts['microbatches']} micro-batches   {timeline.makespan:g} columns, {timeline.bubble:.0%} idle")
    print(f"steady state           {steady:g} columns a turn, {facts['steady_bubble']:.0%} idle")
    print(f"delay by stage         {by_stage(facts['delay'])} updates")
    print(f"forwards held by stage {by_stage(facts['peak_activations'])}")
    if rules.recompute:
        print(f"inputs kept by stage   {by_stage(facts['peak_inputs'])} for the recompute")
    print(f"weight versions        {by_stage(facts['weight_versions'])}")
    print(f"auxiliary heads after  {by_stage(facts['heads_after']) or 'none'}")
    for file in (svg, csv):
        if file is not None:
            print(f"written to {file}")


def write(file: Path, content: str) -> None:
    """Put a file where it was asked for."""
    from stretto.errors import UsageError

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write to {file}: {error.strerror}: choose another file") from error


def by_stage(values: list[int]) -> str:
    """Numbers in a row."""
    return " ".join(str(value) for value in values)
