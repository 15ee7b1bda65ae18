"""Training with local updates (Laskin, Metz et al. 2020, arXiv 2012.03837): greedy, overlapping, chunked.

The three differ in one thing: where heads stand and how far down each head's gradient travels. The paper's figure 2
shows overlapping with every shared stage drawn twice; the same gradients come from one forward and a split backward.

Synthetic gradients, or decoupled neural interfaces (DNI), Jaderberg et al. 2017, arXiv 1608.05343.

A small module M behind each stage but the last predicts the gradient of the loss with respect to the stage's output
from that output alone, or from the targets, too (the paper's cDNI). The stage goes backward with the prediction at once
and updates. M learns by the squared error from the gradient that the next stage sends later. The next stage computes it
with its own prediction, or, as the last stage, with the loss.
"""

from collections.abc import Callable, Mapping
from typing import Literal

from stretto.errors import UsageError
from stretto.methods.cure import GradientPrediction
from stretto.methods.definition import Method
from stretto.methods.planning import Planning
from stretto.options.checks import is_among, is_whole, shown
from stretto.options.named import parse
from stretto.schedule import Reach, Schedule
from stretto.schedule.library.backprop_and_local import assign, one_sweep, predicted_gradients, split_backward


def greedy(*, head: str = "auto", share_top: int = 0) -> Method:
    """Every stage has a head and is trained by it alone.

    share_top: with a number k > 0 each head is the network's own last k layers and its output layer, which every loss
    trains (SegProp, `heads/segprop.py`); also an option of the other local methods.
    """
    head = chosen_head("greedy", head, share_top)
    return Method(
        name="greedy",
        summary="every stage is trained by its own head alone",
        reach=lambda num_stages: Reach((0,) * num_stages),
        schedule=lambda num_stages, num_workers: one_sweep(num_stages, num_workers, chunks=num_stages),
        synchronous=False,
        head=head,
        planning=Planning(messages="hidden"),
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
    *, combine: Literal["sum", "mean"] = "sum", delay: int = 0, head: str = "auto", share_top: int = 0
) -> Method:
    """Heads after every stage but the first; each trains its own stage and the one below.

    combine: whether the two losses that train a shared stage are summed or averaged there (ours; the paper's choice
    could not be retrieved). delay: 0 waits one hop for the gradient from above in every step; 1 uses the time for the
    next forward, and every gradient is one update old, taken at the weights of its forward.
    """
    if not is_among(combine, ("sum", "mean")):
        raise UsageError(f"overlapping(combine={shown(combine)}): choose 'sum' or 'mean'")
    head = chosen_head("overlapping", head, share_top)
    if not is_among(delay, (0, 1)):
        raise UsageError(f"overlapping(delay={shown(delay)}): choose 0 (wait one hop) or 1 (no bubble)")

    def reach(num_stages: int) -> Reach:
        return Reach((None, *[1] * (num_stages - 1)) if num_stages > 1 else (0,))

    return Method(
        name="overlapping",
        summary="every head trains its own stage and the one below",
        reach=reach,
        schedule=lambda num_stages, num_workers: split_backward(num_stages, num_workers, delay),
        synchronous=False,
        weights="stash" if delay else "current",
        combine=combine,
        head=head,
        planning=overlapping_planning(delay),
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


def chunked(*, chunks: int = 2, head: str = "auto", share_top: int = 0) -> Method:
    """Consecutive stages form chunks, cut as torch.tensor_split cuts; a head at each chunk's end trains the chunk.

    chunks=2 is the paper's "two chunk greedy". Raises UsageError for more chunks than stages, once those are known;
    a single stage is one chunk whatever was asked for, as any method with one stage is plain training.
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise UsageError(f"chunked(chunks={chunks!r}): a whole number of at least 1")
    head = chosen_head("chunked", head, share_top)

    def reach(num_stages: int) -> Reach:
        if chunks > num_stages > 1:
            raise UsageError(f"chunked(chunks={chunks}) on {num_stages} stages: use at most {num_stages} chunks")
        hops: list[int | None] = []
        for chunk in assign(num_stages, min(chunks, num_stages)):
            hops += [None] * (len(chunk) - 1) + [len(chunk) - 1]
        return Reach(tuple(hops))

    return Method(
        name="chunked",
        summary="a head at the end of each chunk of stages trains the chunk",
        reach=reach,
        schedule=lambda num_stages, num_workers: one_sweep(num_stages, num_workers, min(chunks, num_stages)),
        synchronous=False,
        head=head,
        planning=Planning(losses="chunks", messages="hidden", waits="chunk"),
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
