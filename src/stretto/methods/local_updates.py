"""Training with local updates (Laskin, Metz et al. 2020, arXiv 2012.03837): greedy, overlapping, chunked.

The three differ in one thing: where heads stand and how far down each head's gradient travels. The paper's figure 2
shows overlapping with every shared stage drawn twice; the same gradients come from one forward and a split backward.

A chunk may be a pipeline of its own (`inside`): no gradient passes from one to the next, so that all of them work at
the same time, each on as many micro-batches as its schedule has. Two chunks of two stages, F = 1, B = 2:

    3 ...0aa1bb
    2 ..01.aa.bb
    1 .0aa1bb
    0 01.aa.bb

Synthetic gradients, or decoupled neural interfaces (DNI), Jaderberg et al. 2017, arXiv 1608.05343.

A small module M behind each stage but the last predicts the gradient of the loss with respect to the stage's output
from that output alone, or from the targets, too (the paper's cDNI). The stage goes backward with the prediction at once
and updates. M learns by the squared error from the gradient that the next stage sends later. The next stage computes it
with its own prediction, or, as the last stage, with the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

from stretto.errors import UsageError
from stretto.methods.cure import Correction, Cure, GradientPrediction, Place, Prediction
from stretto.methods.definition import Method, whole_network
from stretto.methods.planning import Planning
from stretto.methods.synchronous_pipelines import check_count, one_f_one_b
from stretto.options.checks import is_among, is_whole, shown
from stretto.options.named import parse
from stretto.schedule import Reach, Schedule
from stretto.schedule.library.backprop_and_local import assign, one_sweep, predicted_gradients, split_backward
from stretto.schedule.schedule import side_by_side

GREEDY = "every stage is trained by its own head alone"
CHUNKED = "a head at the end of each chunk of stages trains the chunk"
Inner = Callable[[int | None], Method]  # the method inside of each chunk, with so many micro-batches, if that is given


def greedy(*, microbatches: int | None = None, head: str = "auto", share_top: int = 0) -> Method:
    """Every stage has a head and is trained by it alone.

    microbatches: parts of a minibatch, whose gradients a stage adds up before its update. share_top: with a number k >
    0 each head is the network's own last k layers and its output layer, which every loss trains (SegProp,
    `heads/segprop.py`); also an option of the other local methods.
    """
    head = chosen_head("greedy", head, share_top)
    if microbatches is not None:
        check_count("greedy", "microbatches", microbatches)
        made = in_pipelines(singles, lambda count: one_f_one_b(microbatches=count), microbatches)
        return replace(made, name="greedy", summary=GREEDY, head=head)
    return Method(
        name="greedy",
        summary=GREEDY,
        reach=lambda num_stages: Reach((0,) * num_stages),
        schedule=lambda num_stages, num_workers: one_sweep(num_stages, num_workers, chunks=num_stages),
        synchronous=False,
        head=head,
        planning=Planning(messages="hidden"),
    )


def singles(num_stages: int) -> list[range]:
    """Every stage by itself."""
    return [range(stage, stage + 1) for stage in range(num_stages)]


def in_pipelines(parts: Callable[[int], Sequence[range]], inner: Inner, microbatches: int | None) -> Method:
    """Every part of the stages is trained by its own head, as `inner` trains a network of so many stages.

    Raises UsageError for a method whose gradients do not reach all of the part, or whose weights a head cannot follow.
    """
    one = inner(microbatches)
    if one.family == "local" or one.reach is not whole_network:
        raise UsageError(f"inside={one}: it has heads of its own; choose a pipeline, such as 1f1b, zb-h1 or pb")
    if one.weights == "double-buffered":
        raise UsageError(
            f"inside={one}: stages see weights of one update ago, and heads their newest: choose pipedream, pb or a "
            "synchronous pipeline"
        )

    def workers_of(num_stages: int, num_workers: int) -> list[tuple[int, int]]:
        """The first worker of each part, and how many it has."""
        cut = parts(num_stages)
        usual = [one.workers(len(part)) for part in cut]
        if num_workers == sum(usual):
            counts = usual
        elif num_workers >= len(cut):
            counts = [len(own) for own in assign(num_workers, len(cut))]
        else:
            groups = assign(len(cut), num_workers)
            return [(worker, 1) for worker, group in enumerate(groups) for _ in group]
        return list(zip(accumulate(counts, initial=0), counts, strict=False))

    def schedule(num_stages: int, num_workers: int) -> Schedule:
        assign(num_stages, num_workers)  # refuses more workers than stages
        cut, places = parts(num_stages), workers_of(num_stages, num_workers)

        def laid_out(method: Method) -> list[Schedule]:
            return [method.schedule(len(part), count) for part, (_, count) in zip(cut, places, strict=True)]

        made = laid_out(one)
        turns = {part.per_turn for part in made}
        if len(turns) > 1:  # the usual number of micro-batches depends on the stages
            made = laid_out(inner(max(turns)))
        return side_by_side(made, [first for first, _ in places])

    return Method(
        name="chunked",
        summary=CHUNKED,
        reach=lambda num_stages: reach_of(parts(num_stages)),
        schedule=schedule,
        synchronous=False,
        weights=one.weights,
        cure=cure_in(parts, one.cure),
        recompute=one.recompute,
        workers=lambda num_stages: sum(one.workers(len(part)) for part in parts(num_stages)),
        pipelines=parts,
        phases=one.phases,
    )


def reach_of(parts: Sequence[range]) -> Reach:
    """A head at the end of each part, which trains all of it."""
    hops: list[int | None] = []
    for part in parts:
        hops += [None] * (len(part) - 1) + [len(part) - 1]
    return Reach(tuple(hops))


def cure_in(parts: Callable[[int], Sequence[range]], cure: Cure) -> Cure:
    """A cure that sees the place of a stage within its part."""

    def within(function: Callable[[Place], float]) -> Callable[[Place], float]:
        def at(place: Place) -> float:
            part = next(part for part in parts(place.num_stages) if place.stage in part)
            return function(place._replace(stage=place.stage - part.start, num_stages=len(part)))

        return at

    def moved(each: Prediction | Correction | None) -> Any:
        if isinstance(each, Prediction):
            return replace(each, horizon=within(each.horizon))
        return each if each is None else replace(each, span=within(each.span))

    return replace(
        cure,
        forward=moved(cure.forward),
        backward=moved(cure.backward),
        recompute=moved(cure.recompute),
        feedback=None if cure.feedback is None else within(cure.feedback),
    )


def chosen_head(name: str, head: str, share_top: int) -> str:
    """The head of a local method, with the option `share_top` or without. Raises UsageError for both at once."""
    if not is_whole(share_top) or share_top < 0:
        raise UsageError(f"{name}(share_top={shown(share_top)}): give a number of layers, or 0 to share none")
    if not share_top:
        return head
    if head != "auto":
        raise UsageError(
            f"{name}(head={head}, share_top={share_top}): the shared layers are the head; leave one of them out"
        )
    return f"segprop(layers={share_top})"


def overlapping(
    *,
    combine: Literal["sum", "mean"] = "sum",
    delay: int = 0,
    microbatches: int | None = None,
    head: str = "auto",
    share_top: int = 0,
) -> Method:
    """Heads after every stage but the first; each trains its own stage and the one below.

    combine: whether the two losses that train a shared stage are summed or averaged there (ours; the paper's choice
    could not be retrieved). delay: 0 waits one hop for the gradient from above in every step; 1 uses the time for the
    next forward, and every gradient is one update old, taken at the weights of its forward. microbatches: parts of a
    minibatch, whose gradients a stage adds up before its update: it waits once a minibatch, without a delay.
    """
    if not is_among(combine, ("sum", "mean")):
        raise UsageError(f"overlapping(combine={shown(combine)}): choose 'sum' or 'mean'")
    head = chosen_head("overlapping", head, share_top)
    check_count("overlapping", "microbatches", microbatches)
    if not is_among(delay, (0, 1)):
        raise UsageError(f"overlapping(delay={shown(delay)}): choose 0 (wait one hop) or 1 (no bubble)")

    if delay and (microbatches or 1) > 1:
        raise UsageError(
            f"overlapping(delay=1, microbatches={microbatches}): with micro-batches a stage waits once a minibatch "
            "already, and no gradient is old; leave delay out"
        )

    def reach(num_stages: int) -> Reach:
        return Reach((None, *[1] * (num_stages - 1)) if num_stages > 1 else (0,))

    return Method(
        name="overlapping",
        summary="every head trains its own stage and the one below",
        reach=reach,
        schedule=lambda num_stages, num_workers: split_backward(num_stages, num_workers, delay, microbatches or 1),
        synchronous=False,
        weights="stash" if delay else "current",
        combine=combine,
        head=head,
        planning=overlapping_planning(delay) if microbatches is None else None,
    )


def overlapping_planning(delay: int) -> Planning:
    """With a delay a stage keeps one micro-batch more and waits for nobody; plans prefer that."""
    return Planning(
        variants=("delay=1", "delay=0"),
        held=lambda at: 1 + delay * (at.stages > 1),
        delay=lambda at: delay * (at.stages > 1),
        messages="hidden",
        split=True,
        waits=None if delay else "hop",
    )


def chunked(
    *,
    chunks: int = 2,
    microbatches: int | None = None,
    inside: Inner | None = None,
    head: str = "auto",
    share_top: int = 0,
) -> Method:
    """Consecutive stages form chunks, cut as torch.tensor_split cuts; a head at each chunk's end trains the chunk.

    chunks=2 is the paper's "two chunk greedy". inside: the method within each chunk, "1f1b" or "pb(spike=True)", with
    `microbatches` of a minibatch; one micro-batch and backprop unless one of the two is given, 1F1B with micro-batches.
    Raises UsageError for more chunks than stages, once those are known; a single stage is one chunk whatever was asked
    for, as any method with one stage is plain training.
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise UsageError(f"chunked(chunks={chunks!r}): a whole number of at least 1")
    check_count("chunked", "microbatches", microbatches)
    head = chosen_head("chunked", head, share_top)

    def parts(num_stages: int) -> list[range]:
        if chunks > num_stages > 1:
            raise UsageError(f"chunked(chunks={chunks}) on {num_stages} stages: use at most {num_stages} chunks")
        return assign(num_stages, min(chunks, num_stages))

    if inside is None and microbatches is None:
        return Method(
            name="chunked",
            summary=CHUNKED,
            reach=lambda num_stages: reach_of(parts(num_stages)),
            schedule=lambda num_stages, num_workers: one_sweep(num_stages, num_workers, min(chunks, num_stages)),
            synchronous=False,
            head=head,
            planning=Planning(variants=("", "inside=1f1b"), losses="chunks", messages="hidden", waits="chunk"),
        )
    inner: Inner = (lambda count: one_f_one_b(microbatches=count)) if inside is None else inside
    if chunks == 1:
        return inner(microbatches)
    made = in_pipelines(parts, inner, microbatches)
    is_plain = inside is None or str(inner(None)) == "1f1b"
    return replace(made, head=head, planning=PIPELINED if is_plain else None)


PIPELINED = Planning(
    cut="microbatches",
    losses="chunks",
    held=lambda at: min(at.microbatches, at.above_in_chunk + 1),
    messages="hidden",
    waits="chunk",
)


def synthetic_gradients(*, head: str = "auto", labels: bool = False, delay: int = 1, rate: float = 1.0) -> Method:
    """Every stage but the last trains on a predicted gradient.

    head: the module that predicts it (`stretto.heads.gradients`). labels: it also reads the targets, class numbers.
    delay: micro-batches between a prediction and the newest true gradient that was learned from; more than 1 for links
    so slow that a gradient takes more than a turn. rate: the modules' learning rate, times the stage's.
    """
    if not is_among(labels, (True, False)):
        raise UsageError(f"synthetic-gradients(labels={shown(labels)}): choose True or False")
    prediction = GradientPrediction(delay, rate)

    def reach(num_stages: int) -> Reach:
        hops = (*[None] * (num_stages - 1), 0)
        return Reach(hops, frozenset(range(num_stages - 1)), labels and num_stages > 1)

    return Method(
        name="synthetic-gradients",
        summary="every stage trains on a predicted gradient of its output, and the prediction on the true one",
        reach=reach,
        schedule=lambda num_stages, num_workers: predicted_gradients(num_stages, num_workers, delay),
        synchronous=False,
        head=head,
        prediction=prediction,
        planning=Planning(messages="hidden", waits="prediction"),
    )


OWNERS: Mapping[str, Callable[[int, int], int]] = {  # (stage, number of stages) -> the stage that its head reads
    "solo": lambda stage, num_stages: num_stages - 1,
    "segprop": lambda stage, num_stages: num_stages - 1,
    "man": lambda stage, num_stages: stage + 1,
}


def minibatches_behind(method: Method, schedule: Schedule) -> tuple[int, ...]:
    """For the head of each stage that has one: the newest update in the weights that it reads for minibatch m is that
    of the minibatch so many before m. Empty for heads that read none.

    With an option `every` they are the youngest. Layers that `segprop` shares of stages below the last one are younger.
    """
    owner = OWNERS.get(parse(method.head, "head")[0])
    if owner is None or method.synchronous:
        return ()
    delays, count = method.delays(schedule), schedule.num_stages
    return tuple(delays.reading(owner(s, count), s).behind[0] for s in method.reach(count).heads[:-1])
