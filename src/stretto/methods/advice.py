"""What `method="async"` and `"local"` stand for: the best of this package's own studies, by optimizer and depth.

`findings.json` has what they found (experiments/findings), made by their command and by nothing else.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from stretto.errors import ScheduleError, UsageError
from stretto.methods.definition import Advice, Family, Method
from stretto.methods.table import METHODS, is_advised, method
from stretto.options import checks
from stretto.options.named import parse
from stretto.schedule.draw import RESOLUTION, idle_share

PLAIN_SGD = "plain-sgd"  # SGD without momentum, or with Nesterov's: it has no velocity that a cure could read
KIN = {"adam": "adamw", "lamb": "adamw", "lars": "sgd", PLAIN_SGD: "sgd"}
"""An optimizer of no study, and the studied one nearest to it."""
UNKNOWN = "adamw"  # stands for any other
ENOUGH = 8  # stages: a studied method that can be had there, or cuts minibatches there, does so on more, too
LEAST = 4  # micro-batches within chunks
HALF = 0.5  # of the time two stages of a chunk idle
ABOUT = 1.25  # depths within this factor count as the same
FAMILY_OF: Mapping[str, Family] = {"async": "asynchronous", "local": "local"}
OTHERS = {"async": ("pipedream", "pb"), "local": ("greedy", "chunked")}  # for those whom the advice does not suit


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one study found of one method: the steps that it takes to a loss, over those of plain training.

    `advice` is the word that it belongs to, "async" or "local", `optimizer` a name of the table. `any_depth` says that
    its delay is the same on any number of stages, so that it was tried at every depth at once. `ratio` is the geometric
    mean over `seeds`, None where a seed never came to the loss; `low` and `high` are the ends of its 95 % interval and
    `error` is its standard error, `high` and `error` None then. `gap` is how much higher the test loss was at the end,
    in % of plain training's with the same seed, `gap_low` and `gap_high` are the ends of its interval. `losses` is how
    many train the model, `delay` the mean delay over stages, in updates. `memory` is in numbers for each parameter:
    copies of the weights, and the optimizer's.
    """

    advice: str
    study: str
    network: str
    optimizer: str
    stages: int
    any_depth: bool
    method: str
    losses: int
    delay: float
    ratio: float | None
    low: float
    high: float | None
    error: float | None
    gap: float
    gap_low: float
    gap_high: float
    memory: float
    seeds: int

    @property
    def ratio_or_infinite(self) -> float:
        """The ratio of steps; infinite where a seed never came to the loss."""
        return math.inf if self.ratio is None else self.ratio

    def as_soon_as(self, other: "Finding") -> bool:
        """Whether the intervals of the ratios have points in common, so that neither is known to take fewer steps."""
        ends = [math.inf if each.high is None else each.high for each in (self, other)]
        return self.low <= ends[1] and other.low <= ends[0]

    def as_low_as(self, other: "Finding") -> bool:
        """Whether the intervals of the last losses have points in common, so that neither is known to be lower."""
        return self.gap_low <= other.gap_high and other.gap_low <= self.gap_high

    @property
    def spread(self) -> str:
        """The ratio with its interval, or what it is above."""
        known = self.ratio is not None and self.high is not None
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]" if known else f"more than {self.low:.2f}"

    @property
    def depth(self) -> str:
        """The number of stages on which it was tried, in words."""
        return "any number of stages" if self.any_depth else f"{self.stages} stages"

    def __str__(self) -> str:
        return f"{self.spread} times the steps of plain training ({self.network}, {self.depth}, {self.optimizer})"


@cache
def findings() -> tuple[Finding, ...]:
    text = resources.files("stretto.methods").joinpath("findings.json").read_text(encoding="utf-8")
    return tuple(Finding(**entry) for entry in json.loads(text))


def kin(optimizer: str, studied: Collection[str]) -> str | None:
    """The studied optimizer that stands for one: itself, its nearest kin, AdamW, any; None if there is none."""
    return next((name for name in (optimizer, KIN.get(optimizer), UNKNOWN, *sorted(studied)) if name in studied), None)


def works_with(name: str, optimizer: str) -> bool:
    """Whether a method's cures work with an optimizer of this name; predictions, only where there is momentum."""
    cure = method(name).cure
    if optimizer == PLAIN_SGD:
        return not cure.optimizers and not cure.predictions
    return not cure.optimizers or optimizer in cure.optimizers


def tried_together(known: Sequence[Finding], stages: int) -> list[Finding]:
    """Of the networks at about the nearest depth the findings of that on which most methods were tried.

    Of two with as many, the nearer one. What counts at any depth counts at each depth of its network.
    """

    def depth(finding: Finding) -> int:
        return stages if finding.any_depth else finding.stages

    def distance(number: int) -> tuple[float, int]:
        return abs(math.log(number / stages)), -number

    nearest = min(map(depth, known), key=distance)
    about = {each for each in map(depth, known) if abs(math.log(each / nearest)) <= math.log(ABOUT)}
    places = sorted({(distance(depth(each)), depth(each), each.network) for each in known if depth(each) in about})
    groups = [
        [each for each in known if each.network == network and (each.any_depth or each.stages == number)]
        for _, number, network in places
    ]
    return max(groups, key=len)


def rows_for(advice: str, optimizer: str, among: Sequence[Finding] | None = None) -> list[Finding]:
    """What was found of one word's methods under an optimizer, or under the one nearest to it that was studied.

    `optimizer` is a name of the table, or "plain-sgd" without momentum. Methods that do not work with it are left out.
    """
    known = [each for each in (findings() if among is None else among) if each.advice == advice]
    own = kin(optimizer, {each.optimizer for each in known})
    return [each for each in known if each.optimizer == own and works_with(each.method, optimizer)]


def finding_for(
    advice: str, optimizer: str, stages: int, among: Sequence[Finding] | None = None, *, whole: bool = False
) -> Finding:
    """The finding that the advice rests on: the fewest steps at the nearest depth (as a factor) under an optimizer.

    Methods are compared on one network: of those tried at about this depth the one on which most were. Of methods
    between which the intervals of the steps do not decide, the one with the lowest loss at the end. Of two depths
    equally far the larger one counts. `optimizer` as in `rows_for`; `whole` leaves out methods that cut minibatches.
    Methods that cannot be had on so few stages are left out. Raises UsageError where no study has such a method.
    """
    suited = [row for row in rows_for(advice, optimizer, among) if fits(row.method, stages, whole=whole)]
    if not suited:
        raise UsageError(
            f"method {advice!r}: no study has found a method that works with {optimizer} yet: name a method instead"
        )
    there = tried_together(suited, stages)
    fewest = min(there, key=lambda each: each.ratio_or_infinite)
    return min((each for each in there if each.as_soon_as(fewest)), key=lambda each: (each.gap, each.ratio_or_infinite))


def fits(name: str, stages: int, *, whole: bool) -> bool:
    """Whether a studied method can be had on so many stages, and if minibatches stay `whole`, does not cut them."""
    most = pieces_on(name, min(stages, ENOUGH))
    return most is not None and not (whole and most > 1)


@cache
def pieces_on(name: str, stages: int) -> int | None:
    """Into how many micro-batches a method cuts a minibatch on so many stages; None where it refuses so many."""
    try:
        return method(name).plan(stages)[0].per_turn
    except (ScheduleError, UsageError):
        return None


def advised(chosen: str | Method, optimizer: str, stages: int, *, whole: bool = False) -> Method:
    """The method that "async" or "local" stands for under an optimizer of the table, on so many stages.

    "plain-sgd" is SGD without momentum, by which no method can predict weights. `whole` leaves out methods that cut a
    minibatch into micro-batches, as a Trainer does where stages have batch norms: each piece would be normalised by
    itself. Options are added to the advice's own: "async(warmup=100)". Any other method is as `stretto.method` returns
    it. Raises UsageError where no study has such a method, and for options that it does not have.
    """
    if not is_advised(chosen):
        return method(chosen)
    checks.of_kind("optimizer", optimizer, str, "the name of an optimizer, such as 'adamw'")
    checks.whole("stages", stages, 1, checks.MOST_STAGES)
    checks.flag("whole", whole)
    word, options = parse(chosen)
    advice = Advice(chosen, optimizer.lower(), stages, whole)
    name, own = parse(finding_for(word, advice.optimizer, stages, whole=whole).method)
    if (
        name == "chunked"
        and not whole
        and stages > own.get("chunks", 2)
        and not {"inside", "microbatches"} & {*options}
    ):
        own["microbatches"] = max(LEAST, stages)  # as 1f1b cuts; the same gradients, and its stages wait less
    try:
        return replace(method(name, **{**own, **options}), advice=advice)
    except UsageError as error:
        raise UsageError(f"{stands_for(advice, name)}: {error}") from None


def stands_for(advice: Advice, name: str) -> str:
    """What a word stands for, and where, for messages."""
    return f"method {advice.asked!r} stands for {name} ({advice.optimizer}, {advice.stages} stages)"


def may_stand_for(asked: str, name: str) -> bool:
    """Whether "async" or "local", with these options, may have stood for a method of the table under other advice."""
    word, options = parse(asked)
    if parse(name)[0] not in METHODS:
        return False
    chosen = method(name)
    return chosen.family == FAMILY_OF[word] and options.items() <= chosen.options.items()


def meaning(chosen: Method) -> str:
    """A sentence that says which method "async" or "local" stands for, and why."""
    assert chosen.advice is not None, "a method that was named stands for itself"
    asked, optimizer, stages, whole = chosen.advice
    norms = ", as batch norms want whole minibatches" if whole else ""
    found = finding_for(parse(asked)[0], optimizer, stages, whole=whole)
    tried = "" if found.method == str(chosen) else f"of {found.method}, which was tried, "
    told = "plain training, as there is one stage" if stages == 1 else f"{tried}{found}"
    return f"{asked} stands for {chosen} here{norms}: {told}"


def one_loss(chosen: Method, num_stages: int) -> str | None:
    """A remark on a local method that is plain backprop on so few stages."""
    if num_stages == 1 or not chosen.is_backprop(num_stages):
        return None
    return (
        f"{chosen} on {num_stages} stages is backprop: the loss at the top trains all of them; greedy has one for each"
    )


def idle_chunks(chosen: Method, share: float) -> str | None:
    """A warning that workers idle for this share of the time, if the method was asked for as "local".

    The stages of a chunk take turns, as under `backprop`, where minibatches stay whole: with more than two of them that
    is more than half the time.
    """
    is_local = chosen.advice is not None and parse(chosen.advice.asked)[0] == "local"
    if not is_local or "microbatches" in chosen.options or share <= HALF + RESOLUTION:
        return None
    assert chosen.advice is not None, "local"
    return (
        f"method {chosen.advice.asked!r} stands for {chosen}, whose stages take turns within a chunk: workers idle "
        f"{idle_share(share)} of the time on {chosen.advice.stages} stages. Under 'greedy' nobody waits, under '1f1b' "
        "plain training is a pipeline; fewer, larger stages idle less"
    )


def refusal(chosen: Method, reason: str, *, cuts: bool = False) -> str:
    """The reason why a method cannot train; where it was asked for as "async" or "local", with that and a remedy.

    `cuts`: the method cuts minibatches, so the remedy must not be another one that does.
    """
    if chosen.advice is None:
        return reason
    other = next(name for name in OTHERS[parse(chosen.advice.asked)[0]] if name != str(chosen))
    remedy = f"or name another method, such as {other}{' or 1f1b' * (not cuts)}"
    return f"{stands_for(chosen.advice, str(chosen))}: {reason.removesuffix('.')}; {remedy}"


def other_advice(chosen: Method, where: str, saved: str) -> str:
    """The refusal of a checkpoint that was saved with another method than "async" or "local" stand for now."""
    assert chosen.advice is not None, "a method that was named stands for itself"
    asked, optimizer, stages, _ = chosen.advice
    return (
        f"{where} was saved with method {saved}, and {asked!r} stands for {chosen} here ({optimizer}, {stages} "
        f"stages): the advice has changed, or the optimizer or the stages. Give method={saved!r} to go on, with the "
        "optimizer and the stages as they were"
    )


@contextmanager
def explained(chosen: Method) -> Iterator[None]:
    """The context in which a refusal says what "async" or "local" stands for, if the method was asked for so."""
    try:
        yield
    except (UsageError, ScheduleError) as error:
        if error.said_by is None:  # else the process that says it has explained it
            error.args = (refusal(chosen, str(error)),)
        raise
