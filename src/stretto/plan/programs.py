"""What programs that train large models do while they compute: for networks that are only planned.

With `hides_exchanges`, what processes that share weights send each other passes beside products (`hidden_exchanges`);
else it is waited for. With `fused_accumulation` the product of a weight's gradient adds it to those of earlier
micro-batches; otherwise a separate operator does. Replicas sum gradients at the end of a step, or `in_every_backward`.
`persistent_norms` keep a row in registers and read it once: apex's FastLayerNorm takes 54 and 87 us where torch's and
apex's former take 250 to 290 (github.com/NVIDIA/apex/pull/1037). They are priced as a copy, others by `memory_of`.
`buckets`: replicas that share nothing out keep a copy of all gradients to sum them, as DistributedDataParallel does
unless gradients are views of it (`gradient_as_bucket_view`).

    megatron-2021     Megatron-LM before 16c90445e7 (September 2021), with which sums of input gradients are not waited
                      for, and 83b1e42f30 (February 2022), gradient accumulation fusion
    megatron-2022     with both (Korthikanti et al. 2022, sections 4.2.2 and 6.2), and FastLayerNorm
    torch             torch's backward adds gradients by operators (torch/csrc/autograd/functions/accumulate_grad.h)
    apex-2019         the same, and apex's DistributedDataParallel, which sums gradients in every backward

Exchanges are hidden as Megatron hides them (Korthikanti et al. 2022, arXiv 2205.05198, sections 4.2.2 and 6.2): the sum
of a column's input gradients goes on beside the product that gives its weights' gradient; with divided sequences that
sum is a scatter, and the column's input is gathered again beside the product that gives its input's gradient. Other
exchanges are waited for.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from stretto.cost.attained import Attained
from stretto.cost.cluster import Link
from stretto.cost.collective import TENSOR_GATHER, TENSOR_SCATTER, TENSOR_SUM
from stretto.cost.layer_table import LayerCost, Work, Works
from stretto.errors import UsageError, nearest


class ProgramTraits(NamedTuple):
    """What a program does while it computes, as described above."""

    hides_exchanges: bool = True
    fused_accumulation: bool = True
    in_every_backward: bool = False
    persistent_norms: bool = False
    buckets: bool = False

    def attains(self, attained: Attained) -> Attained:
        """What a device attains of the program's kernels."""
        return attained.with_persistent_norms() if self.persistent_norms else attained


PROGRAMS = {
    "megatron-2021": ProgramTraits(hides_exchanges=False, fused_accumulation=False),
    "megatron-2022": ProgramTraits(persistent_norms=True),
    "torch": ProgramTraits(fused_accumulation=False, buckets=True),
    "apex-2019": ProgramTraits(fused_accumulation=False, in_every_backward=True),
}
USUAL = "megatron-2022"


def program_named(name: str) -> ProgramTraits:
    """The program of a name. Raises UsageError if there is none."""
    if name not in PROGRAMS:
        raise UsageError(f"program={name!r}: {nearest(name, PROGRAMS)}")
    return PROGRAMS[name]


class HiddenExchanges(NamedTuple):
    """A layer's exchanges beside the products that give its weights' gradients, and beside those of its inputs'."""

    weights: Works
    inputs: Works


def hidden_exchanges(layer: LayerCost, *, full: bool) -> HiddenExchanges:
    """The hidden part of a layer's `backward_exchanges`; those that repeat its forward (`full`) are waited for."""
    forward, backward = by_operator(layer.forward_exchanges), by_operator(layer.backward_exchanges)
    if full:
        backward = {name: less(work, forward.get(name)) for name, work in backward.items()}
    if TENSOR_SCATTER not in forward:
        return HiddenExchanges(present(backward.get(TENSOR_SUM)), ())
    return HiddenExchanges(present(backward.get(TENSOR_SCATTER)), present(forward.get(TENSOR_GATHER)))


def by_operator(works: Works | None) -> dict[str, Work]:
    """Exchanges by their sort."""
    return {work.operator: work for work in works or ()}


def less(work: Work, other: Work | None) -> Work:
    """Exchanges without others of the same sort that are among them."""
    if other is None:
        return work
    return replace(work, calls=work.calls - other.calls, flops=work.flops - other.flops, bytes=work.bytes - other.bytes)


def present(work: Work | None) -> Works:
    """Exchanges, if there are any."""
    return () if work is None or work.calls <= 0 else (work,)


def share_kept_busy(links: Sequence[Link]) -> float:
    """The share of a message's time that it keeps an end from computing, at most; 0 to 1."""
    return min(1.0, max((link.send_per_byte / link.seconds_per_byte for link in links), default=0.0))
