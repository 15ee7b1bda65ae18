"""stretto show: draw a schedule."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from stretto.cli.output import FLAG, print_json, write
from stretto.settings.command_line import WHOLE


def show(
    method: str | None = None,
    /,
    *,
    plan: Path | None = None,
    file: Annotated[Path | None, Parameter(name="--from")] = None,
    stages: Annotated[int, WHOLE] = 4,
    workers: Annotated[int | None, WHOLE] = None,
    microbatches: Annotated[int | None, WHOLE] = None,
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
    plan
        File that stretto plan wrote, instead of a method, stages and workers.
    file
        File with a schedule, as --csv writes it, instead of a method, stages and workers.
    stages
        Number of stages.
    workers
        Number of workers; one a stage unless said otherwise.
    microbatches
        Micro-batches that enter before the pipeline drains; 4, or a whole minibatch, unless said otherwise. A
        synchronous pipeline takes them as one minibatch.
    svg
        File to draw the schedule into.
    csv
        File to write a synchronous schedule into, as torch.distributed.pipelining reads it.
    json
        Print one JSON object on stdout, nothing else.
    """
    from stretto.cli.layout import lay_out
    from stretto.errors import UsageError
    from stretto.plan.plan_file import read_plan
    from stretto.schedule import draw, read_csv
    from stretto.schedule.export import to_csv
    from stretto.simulate import simulate, unit_costs

    if sum(each is not None for each in (method, plan, file)) != 1:
        raise UsageError(
            "show draws a method, a plan or a file: give one of them, greedy or --plan plan.toml or --from F"
        )
    if file is not None:
        listed = read_csv(file)
        method, stages, workers = f"csv(path={str(file)!r})", listed.num_stages, None
        microbatches = microbatches or listed.per_turn
    if plan is not None:
        planned = read_plan(plan)["plan"]
        method, stages, workers = planned["method"], planned["stages"], planned["pipeline"]
    assert method is not None
    layout = lay_out(method, stages, workers, microbatches)
    chosen, schedule, rules, turns = layout.method, layout.schedule, layout.rules, layout.turns
    timeline = simulate(schedule, rules, turns)
    steady, steady_bubble = layout.steady(unit_costs)
    held = simulate(schedule, rules, schedule.drain + 2)
    delays = chosen.delays(schedule)
    facts: dict[str, Any] = {
        "method": str(chosen),
        "stages": stages,
        "workers": schedule.num_workers,
        "microbatches": layout.microbatches,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "steady_period": steady,
        "steady_bubble": steady_bubble,
        "delay": list(delays.steady),
        "mean_delay": list(delays.mean),
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
    print(f"steady state           {steady:g} columns a turn, {steady_bubble:.0%} idle")
    print(f"delay by stage         {by_stage(facts['delay'])} updates")
    if facts["mean_delay"] != facts["delay"]:  # some micro-batches of an update see one update more than others
        print(f"mean delay by stage    {by_stage(facts['mean_delay'])} updates")
    print(f"forwards held by stage {by_stage(facts['peak_activations'])}")
    if rules.recompute:
        print(f"inputs kept by stage   {by_stage(facts['peak_inputs'])} for the recompute")
    print(f"weight versions        {by_stage(facts['weight_versions'])}")
    print(f"auxiliary heads after  {by_stage(facts['heads_after']) or 'none'}")
    for file in (svg, csv):
        if file is not None:
            print(f"written to {file}")


def by_stage(values: Sequence[float]) -> str:
    """Numbers in a row."""
    return " ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values)
