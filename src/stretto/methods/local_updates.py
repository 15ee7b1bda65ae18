"""Training with local updates (Laskin, Metz et al. 2020, arXiv 2012.03837): greedy, overlapping, chunked.

The three differ in one thing: where heads stand and how far down each head's gradient travels. The paper's figure 2
shows overlapping with every shared stage drawn twice; the same gradients come from one forward and a split backward.
"""

from typing import Literal

from stretto.errors import UsageError
from stretto.methods.definition import Method
from stretto.methods.planning import Planning
from stretto.options.checks import is_among, is_whole, shown
from stretto.schedule import Reach
from stretto.schedule.library.backprop_and_local import assign, one_sweep, split_backward


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
