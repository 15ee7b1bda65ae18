"""stretto show: draw a schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from stretto.cli.output import print_json, terminal_columns, write
from stretto.errors import UsageError
from stretto.settings.command_line import FLAG, WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.methods import Method
    from stretto.schedule import Rules, Schedule
    from stretto.simulate import Durations, Timeline

    Advised = Callable[[str, int], Method]

MOST_STAGES, MOST_MICROBATCHES, MOST_FORWARDS = 128, 1024, 8192  # more takes long to simulate
MICROBATCHES = 4  # unless the user or the method says how many


@dataclass(frozen=True)
class MethodLayout:
    """A method's schedule and rules, and how many turns of it enter before the pipeline drains."""

    method: "Method"
    schedule: "Schedule"
    rules: "Rules"
    turns: int

    @property
    def title(self) -> str:
        """The method and its summary; where it was asked for as "async" or "local", what it stands for."""
        from stretto.methods.advice import meaning

        told = "" if self.method.advice is None else f"{meaning(self.method)}\n\n"
        return f"{told}{self.method}: {self.method.summary}"

    @property
    def names(self) -> dict[str, str]:
        """The method, and the word by which it was asked for and why it stands for it, if it was, as plain data."""
        from stretto.methods.advice import told_of

        return {"method": str(self.method), **told_of(self.method)}

    @property
    def microbatches(self) -> int:
        """The number of micro-batches that enter before the pipeline drains."""
        return self.turns * self.schedule.per_turn

    def steady(self, times: "Durations", latency: float = 0) -> tuple[float, float]:
        """The time of a turn once the pipeline is full, and the share of it in which workers idle."""
        from stretto.simulate import period

        turn = period(self.schedule, self.rules, times, latency=latency)
        work = sum(times(action) for body in self.schedule.body for action in body)
        total = turn * self.schedule.num_workers
        return turn, max(0.0, (total - work) / total) if total else 0.0


def lay_out(
    method: str, stages: int, workers: int | None, microbatches: int | None, *, advised_by: "Advised | None" = None
) -> MethodLayout:
    """Lay out what a user asks for. Raises UsageError for counts that cannot be, or that take too long.

    "async" and "local" stand for what `advised_by` says of a word and the stages, that under AdamW unless given.
    `microbatches` is how many enter in all: those of one minibatch for a synchronous method that does not say itself
    how many its minibatch has; for any other method as many turns as they fill.
    """
    from stretto.methods import with_microbatches
    from stretto.methods.advice import advised

    for name, value, most in (("stages", stages, MOST_STAGES), ("microbatches", microbatches, MOST_MICROBATCHES)):
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{name}={value}: choose a whole number from 1 to {most}")
    if microbatches is not None and stages * microbatches > MOST_FORWARDS:
        raise UsageError(
            f"microbatches={microbatches} on {stages} stages: choose at most {MOST_FORWARDS // stages} for so many "
            "stages"
        )
    chosen = advised(method, "adamw", stages) if advised_by is None else advised_by(method, stages)
    if workers is not None and not 1 <= workers <= stages:
        raise UsageError(f"workers={workers} for {stages} stages: choose between 1 and {stages}")
    if microbatches is not None:
        chosen = with_microbatches(chosen, microbatches)
    schedule, rules = chosen.plan(stages, workers)
    return MethodLayout(chosen, schedule, rules, turns=-(-(microbatches or MICROBATCHES) // schedule.per_turn))


@dataclass(frozen=True, kw_only=True)
class ShowOutput:
    """Where a schedule is drawn and written."""

    svg: Path | None = None
    """File to draw the schedule into."""
    csv: Path | None = None
    """File to write a synchronous schedule into, as torch.distributed.pipelining reads it."""
    json: Annotated[bool, FLAG] = False
    """Print one JSON object on stdout, nothing else."""


def show(
    method: str | None = None,
    /,
    *,
    plan: Path | None = None,
    file: Annotated[Path | None, Parameter(name="--from")] = None,
    stages: Annotated[int, WHOLE] = 4,
    workers: Annotated[int | None, WHOLE] = None,
    microbatches: Annotated[int | None, WHOLE] = None,
    output: Annotated[ShowOutput, Parameter(name="*")] = ShowOutput(),
) -> None:
    """Draw the schedule of a method, with what can be read off it: delays, bubble, activations held.

    One column is the time of a forward; the two halves of a backward take one each.

    Parameters
    ----------
    method
        Method with its options, e.g. greedy or "overlapping(delay=1)"; async or local, as for AdamW.
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
    """
    from stretto.simulate import simulate

    if sum(source is not None for source in (method, plan, file)) != 1:
        raise UsageError(
            "show draws a method, a plan or a file: give one of them, greedy or --plan plan.toml or --from F"
        )
    if method is not None:
        if method.endswith((".toml", ".csv")):
            raise UsageError(f"{method} is a file: show --plan FILE draws a plan's, show --from FILE a schedule's")
        layout = lay_out(method, stages, workers, microbatches)
    else:
        layout = planned(plan, microbatches) if plan is not None else listed(file, microbatches)
    timeline = simulate(layout.schedule, layout.rules, layout.turns)
    facts = facts_of(layout, timeline) | ({} if plan is None else network_of(plan))
    write_files(layout, timeline, output)
    if output.json:
        svg = None if output.svg is None else str(output.svg)
        print_json({**facts, "actions": actions_of(layout), "svg": svg})
        return
    print(in_words(layout, timeline, facts))
    for written in (output.svg, output.csv):
        if written is not None:
            print(f"written to {written}")


def planned(file: Path, microbatches: int | None) -> MethodLayout:
    """The pipeline of a plan's file, as many workers as that has."""
    from stretto.options.import_object import refuse_functions
    from stretto.plan.plan_file import chosen_in

    chosen = chosen_in(file)
    refuse_functions(str(file), chosen["method"])
    return lay_out(chosen["method"], chosen["stages"], chosen["pipeline"], microbatches)


def network_of(file: Path) -> dict[str, Any]:
    """What a plan's file is for, as plain data: the model and its options, those that the file has."""
    from stretto.plan.plan_file import OPTIONS, TRAIN, read_plan

    known = read_plan(file)
    options = known.get(OPTIONS) or known.get(TRAIN, {}).get(OPTIONS) or {}
    return {"model": known.get("model"), "model_options": options}


def listed(file: Path | None, microbatches: int | None) -> MethodLayout:
    """The schedule of a file of torch.distributed.pipelining."""
    from stretto.schedule import read_csv

    assert file is not None
    schedule = read_csv(file)
    return lay_out(f"csv(path={str(file)!r})", schedule.num_stages, None, microbatches or schedule.per_turn)


def facts_of(layout: MethodLayout, timeline: "Timeline") -> dict[str, Any]:
    """What can be read off a schedule, as plain data; times are in forwards, delays in updates."""
    from stretto.methods.local_updates import minibatches_behind
    from stretto.simulate import simulate, unit_costs

    method, schedule, rules = layout.method, layout.schedule, layout.rules
    period, bubble = layout.steady(unit_costs)
    full = simulate(schedule, rules, schedule.drain + 2)
    delays, cures = method.delays(schedule), method.step_cures(schedule)
    return {
        **layout.names,
        "stages": schedule.num_stages,
        "workers": schedule.num_workers,
        "microbatches": layout.microbatches,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "steady_period": period,
        "steady_bubble": bubble,
        "delay": list(delays.steady),
        "mean_delay": list(delays.mean),
        "peak_activations": list(full.peak_graphs),
        "peak_inputs": list(full.peak_inputs),
        "weight_versions": list(method.versions(schedule)),
        "feedback": [cure.feedback for cure in cures],
        "refresh_intervals": [cure.interval for cure in cures if cure.interval is not None],
        "along_step": [cure.along_step for cure in cures],
        "heads_after": list(rules.reach.heads[:-1]),
        **({"predicted_after": sorted(rules.reach.predicted)} if rules.reach.predicted else {}),
        "head": method.head if rules.reach.heads[:-1] else None,
        "head_weights_behind": list(minibatches_behind(method, schedule)),
    }


def actions_of(layout: MethodLayout) -> list[list[str]]:
    """Each worker's actions, in its order."""
    schedule = layout.schedule
    return [[str(action) for action in schedule.unroll(w, layout.turns)] for w in range(schedule.num_workers)]


def write_files(layout: MethodLayout, timeline: "Timeline", output: ShowOutput) -> None:
    """Write the files that were asked for. Raises UsageError for a schedule that torch's format cannot say."""
    from stretto.schedule import draw
    from stretto.schedule.csv_file import to_csv

    if output.csv is not None:
        write(output.csv, to_csv(layout.schedule))
    if output.svg is not None:
        write(output.svg, draw.svg(timeline.spans, title=f"{layout.method} on {layout.schedule.num_workers} workers"))


def in_words(layout: MethodLayout, timeline: "Timeline", facts: Mapping[str, Any]) -> str:
    """The schedule in characters, and what can be read off it."""
    from stretto.methods.advice import one_loss
    from stretto.schedule import draw
    from stretto.schedule.draw import idle_share

    width = terminal_columns() or 1000
    entered = f"these {facts['microbatches']} micro-batches"
    lines = [
        f"{layout.title}\n\n{draw.text(timeline.spans, width=width)}\n",
        f"{entered}   {timeline.makespan:g} columns, {idle_share(timeline.bubble)} idle",
        f"steady state           {facts['steady_period']:g} columns a turn, {idle_share(facts['steady_bubble'])} idle",
        f"delay by stage         {by_stage(facts['delay'])} updates",
    ]
    if facts["mean_delay"] != facts["delay"]:  # some micro-batches of an update see one update more than others
        lines.append(f"mean delay by stage    {by_stage(facts['mean_delay'])} updates")
    lines.append(f"forwards held by stage {by_stage(facts['peak_activations'])}")
    if layout.rules.recompute:
        lines.append(f"inputs kept by stage   {by_stage(facts['peak_inputs'])} for the recompute")
    lines.append(f"weight versions        {by_stage(facts['weight_versions'])}")
    if any(facts["feedback"]):
        lines.append(
            f"feedback by stage      {by_stage(facts['feedback'])} times the change of a step; one tensor more"
        )
    if facts["refresh_intervals"]:
        each = "2 n^2 numbers more for each rotated side n"
        lines.append(f"bases are refreshed    every {by_stage(facts['refresh_intervals'])} updates; {each}")
    if any(facts["along_step"]):
        kept = "muon keeps two bytes more for each weight of a matrix"
        lines.append(f"weights are predicted  along the optimizer's step; {kept}")
    kind = "" if facts["head"] in (None, "auto") else f": {facts['head']}"
    lines.append(f"auxiliary heads after  {by_stage(facts['heads_after']) or 'none'}{kind}")
    if facts.get("predicted_after"):
        lines.append(f"gradients predicted    after {by_stage(facts['predicted_after'])}; L learns from the true ones")
    if facts["head_weights_behind"]:
        lines.append(f"the weights they read  {by_stage(facts['head_weights_behind'])} minibatches behind")
    plain = one_loss(layout.method, layout.schedule.num_stages)
    lines += [] if plain is None else [f"mind                   {plain}"]
    if facts.get("model"):
        options = "".join(f", {key} {value}" for key, value in facts["model_options"].items())
        lines.append(f"planned for            {facts['model']}{options}")
    return "\n".join(lines)


def by_stage(values: Sequence[float]) -> str:
    """One number for each stage, fractions with three digits."""
    return " ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values)
