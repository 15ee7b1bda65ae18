"""What `method="async"` and `"local"` stand for: the method that reaches a loss first by simulated time.

Steps to the loss are those that this package's own studies found (`findings`), the time of a step is that of the
method's schedule on so many stages. Where no method is told sooner than plain training, the words stand for that.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

from stretto.errors import ScheduleError, UsageError
from stretto.methods.definition import Advice, Family, Method
from stretto.methods.findings import Finding, rows_for, tried_together
from stretto.methods.table import METHODS, is_advised, method
from stretto.options import checks
from stretto.options.named import parse
from stretto.schedule.draw import RESOLUTION, idle_share
from stretto.schedule.pace import period

PLAIN, WHOLE = "1f1b", "backprop"  # plain training as a pipeline, and where minibatches stay whole
DEEPEST = 16  # stages with as many micro-batches: with more of both, the shares of time hardly change
ALIKE = 1.1  # compute, or memory, within this factor counts as the same
HEADS = ("head", "share_top")  # options that change no schedule; their compute is counted by itself
ENOUGH = 8  # stages: a studied method that can be had there, or cuts minibatches there, does so on more, too
LEAST = 4  # micro-batches within chunks
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1, "C": 1, "L": 1}  # the time of an action on each of the equal stages
HALF = 0.5  # of the time two stages of a chunk idle
FAMILY_OF: Mapping[str, Family] = {"async": "asynchronous", "local": "local"}
KIND_OF = {"async": "stale gradients", "local": "local losses"}
OTHERS = {"async": ("pipedream", "pb"), "local": ("greedy", "chunked")}  # for those whom the advice does not suit
Seconds = Callable[[Method], float]
"""The time of a minibatch under a method, in the unit of the function's choice."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A method beside plain training, by simulated time to the same loss.

    `turn` is the time of its minibatch over that of plain training's, with the compute of heads where a study counted
    it. `low` and `high` are the ends of the interval of the time, which has no upper end where a seed never arrived.
    """

    method: Method
    finding: Finding
    turn: float

    @property
    def time(self) -> float:
        """Its time to the loss over plain training's; infinite where a seed never came to the loss."""
        return self.finding.ratio_or_infinite * self.turn

    @property
    def low(self) -> float:
        """The lower end of the time's interval."""
        return self.finding.low * self.turn

    @property
    def high(self) -> float:
        """The upper end, infinite where a seed never came to the loss."""
        return math.inf if self.finding.high is None else self.finding.high * self.turn

    @property
    def spread(self) -> str:
        """The time with its interval, or what it is above."""
        known = math.isfinite(self.time) and math.isfinite(self.high)
        return f"{self.time:.2f} [{self.low:.2f}, {self.high:.2f}]" if known else f"more than {self.low:.2f}"

    @property
    def why(self) -> str:
        """What the time is made of."""
        tried = "" if self.finding.method == str(self.method) else f"of {self.finding.method}, which was tried, "
        return (
            f"{tried}{self.finding}, each {self.turn:.2f} times as long; {self.finding.memory:.1f} numbers a parameter"
        )


def ways(
    word: str,
    optimizer: str,
    stages: int,
    *,
    whole: bool = False,
    options: Mapping[str, object] | None = None,
    plain: Method | None = None,
    seconds: Seconds | None = None,
    among: Sequence[Finding] | None = None,
) -> list[Way]:
    """The studied methods of a word that can be had on so many stages, the soonest first.

    Those that a seed never arrived under come last, the one with the lowest loss at the end first.

    Methods are compared on one network: of those tried at about this depth the one on which most were. `whole` leaves
    out methods that cut minibatches. What was tried with a head of its own is left out, as that may fit no other
    network, unless `options` ask for it. These are added to each; methods that do not have them are left out. `plain`
    is plain training with them, None if it has not all. Raises UsageError if options leave no method at all.
    """
    asked, known = options or {}, rows_for(word, optimizer, among)
    same = [row for row in known if asked and asked.items() <= parse(row.method)[1].items()]
    known = same or [row for row in known if not {*HEADS} & {*parse(row.method)[1]}]
    suited = [row for row in known if fits(row.method, stages, whole=whole)]
    if not suited:
        return []
    together = tried_together(known, stages)
    rows = [row for row in together if row in suited] or tried_together(suited, stages)
    taken = seconds or equal_stages(stages)
    unit, found, refused = taken(plain or method(plain_name(whole=whole))), [], None
    for row in rows:
        try:
            chosen = as_had(row.method, stages, asked, whole=whole)
            found.append(Way(method=chosen, finding=row, turn=(row.compute or 1) * taken(chosen) / unit))
        except UsageError as error:
            refused = refused or UsageError(f"method {word!r} stands for {row.method} here: {error}")
    if refused is not None and not found and plain is None:
        raise refused
    return sorted(found, key=lambda way: (way.time, way.finding.gap))


def soonest(found: Sequence[Way], *, told: bool = True) -> Way | None:
    """The way that reaches the loss first; of those that are not told from it the cheapest one.

    That is one of those with about the least compute, of these one of those with about the least memory, of these the
    soonest. Only ways that are `told` from plain training count, those whose whole interval lies below it, or all.
    None if there is none.
    """
    known = [way for way in found if way.high < 1] if told else list(found)
    if not known:
        return None
    first = min(known, key=lambda way: (way.time, way.low))
    tied = [way for way in known if way.low <= first.high]
    tied = about_least(tied, lambda way: way.finding.compute or 1.0)
    tied = about_least(tied, lambda way: way.finding.memory)
    return min(tied, key=lambda way: (way.time, way.low))


def about_least(found: Sequence[Way], cost: Callable[[Way], float]) -> list[Way]:
    """Those that cost about as little as the cheapest one."""
    least = min(map(cost, found))
    return [way for way in found if cost(way) <= ALIKE * least]


def as_had(name: str, stages: int, options: Mapping[str, object], *, whole: bool) -> Method:
    """A studied method as a Trainer has it on so many stages: chunks of several stages are pipelines."""
    base, own = parse(name)
    chunks = own.get("chunks", 2)
    if base == "chunked" and not whole and stages > chunks and not {"inside", "microbatches"} & {*options}:
        own["microbatches"] = max(LEAST, stages)  # as 1f1b cuts; the same gradients, and its stages wait less
    return method(base, **{**own, **options})


def plain_name(*, whole: bool) -> str:
    """Plain training's method."""
    return WHOLE if whole else PLAIN


def equal_stages(stages: int) -> Seconds:
    """The time of a minibatch on equal stages with free messages, over that of its forward on one of them.

    A backward takes twice as long as a forward. More than 16 stages with more than 16 micro-batches count as 16 of
    both.
    """

    def seconds(chosen: Method) -> float:
        name, options = parse(str(chosen))
        kept = {key: value for key, value in options.items() if key not in HEADS}
        return pace(str(method(name, **kept)), stages)

    return seconds


@cache
def pace(name: str, stages: int) -> float:
    """`equal_stages` of a method by its name."""
    schedule, rules = method(name).plan(stages)
    if min(stages, schedule.per_turn) > DEEPEST:
        base, options = parse(name)
        schedule, rules = method(base, **{**options, "microbatches": DEEPEST}).plan(DEEPEST)
    return period(schedule, rules, lambda action: UNITS.get(action.kind, 0)) / schedule.per_turn


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


def advised(
    chosen: str | Method, optimizer: str, stages: int, *, whole: bool = False, seconds: Seconds | None = None
) -> Method:
    """The method that "async" or "local" stands for under an optimizer of the table, on so many stages.

    That is the studied method which reaches a loss first by simulated time, if its interval lies wholly below plain
    training's; of several whose intervals meet, the cheapest one (`soonest`); else plain training: 1f1b, or backprop
    where minibatches stay `whole`, as they do in a Trainer where stages have batch norms, by which each piece would be
    normalised by itself. "plain-sgd" is SGD without momentum, by which no method can predict weights. `seconds` tells
    the time of a minibatch under a method, that of equal stages with free messages unless given. Options are added to
    the advice's own, among methods that have them: "async(warmup=100)". Any other method is as `stretto.method` returns
    it. Raises UsageError for options that no such method has.
    """
    if not is_advised(chosen):
        return method(chosen)
    checks.of_kind("optimizer", optimizer, str, "the name of an optimizer, such as 'adamw'")
    checks.whole("stages", stages, 1, checks.MOST_STAGES)
    checks.flag("whole", whole)
    word, options = parse(chosen)
    optimizer = optimizer.lower()
    plain = plainly(options, whole=whole)
    found = ways(word, optimizer, stages, whole=whole, options=options, plain=plain, seconds=seconds)
    best = None if stages == 1 and plain is not None else soonest(found, told=plain is not None)
    if best is not None:
        beside = plain_name(whole=whole)
        taken, why = best.method, f"at a loss in {best.spread} times the time of {beside}, simulated: {best.why}"
    elif plain is None:
        raise UsageError(f"method {chosen!r}: no study has a method with these options that works with {optimizer}")
    else:
        taken, why = plain, why_plain(word, optimizer, stages, found)
    return replace(taken, advice=Advice(chosen, optimizer, stages, whole, why))


def plainly(options: Mapping[str, object], *, whole: bool) -> Method | None:
    """Plain training with these options, but for those of local losses' heads; None where it has not all of them."""
    try:
        return method(plain_name(whole=whole), **{key: value for key, value in options.items() if key not in HEADS})
    except UsageError:
        return None


def why_plain(word: str, optimizer: str, stages: int, found: Sequence[Way]) -> str:
    """Why a word stands for plain training."""
    if stages == 1:
        return "there is one stage"
    if not found:
        return f"no study has a method with {KIND_OF[word]} that works with {optimizer} on {stages} stages"
    nearest = found[0]
    return (
        f"no method with {KIND_OF[word]} is told to be sooner at a loss, by simulated time. The nearest, "
        f"{nearest.method}, takes {nearest.spread} times the time: {nearest.why}"
    )


def stands_for(advice: Advice, name: str) -> str:
    """What a word stands for, and where, for messages."""
    return f"method {advice.asked!r} stands for {name} ({advice.optimizer}, {advice.stages} stages)"


def may_stand_for(asked: str, name: str) -> bool:
    """Whether "async" or "local", with these options, may have stood for a method of the table under other advice."""
    word, options = parse(asked)
    if parse(name)[0] not in METHODS:
        return False
    chosen = method(name)
    in_family = chosen.family == FAMILY_OF[word] or chosen.name in (PLAIN, WHOLE)
    return in_family and options.items() <= chosen.options.items()


def meaning(chosen: Method) -> str:
    """A sentence that says which method "async" or "local" stands for, and why."""
    assert chosen.advice is not None, "a method that was named stands for itself"
    norms = ", as batch norms want whole minibatches" if chosen.advice.whole else ""
    return f"{chosen.advice.asked} stands for {chosen} here{norms}: {chosen.advice.why}"


def told_of(chosen: Method) -> dict[str, str]:
    """The word by which a method was asked for, and why it stands for it, as plain data; else nothing."""
    return {} if chosen.advice is None else {"asked": chosen.advice.asked, "why": chosen.advice.why}


def one_loss(chosen: Method, num_stages: int) -> str | None:
    """A remark on a local method that is plain backprop on so few stages."""
    if num_stages == 1 or not chosen.is_backprop(num_stages):
        return None
    return (
        f"{chosen} on {num_stages} stages is backprop: the loss at the top trains all of them; greedy has one for each"
    )


def idle_chunks(chosen: Method, share: float) -> str | None:
    """A warning that workers idle for this share of the time, if the method was asked for as "async" or "local".

    Stages take turns, in a chunk or in all, where minibatches stay whole: with more than two of them that is more than
    half the time.
    """
    if chosen.advice is None or share <= HALF + RESOLUTION or "microbatches" in chosen.options:
        return None
    if chosen.plan(chosen.advice.stages)[0].per_turn > 1:
        return None
    within = " within a chunk" if chosen.name == "chunked" else ""
    return (
        f"method {chosen.advice.asked!r} stands for {chosen}, whose stages take turns{within}: workers idle "
        f"{idle_share(share)} of the time on {chosen.advice.stages} stages. Under 'greedy' nobody waits; norms that do "
        "not depend on the batch let '1f1b' be a pipeline; fewer, larger stages idle less"
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
    asked, optimizer, stages, *_ = chosen.advice
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
