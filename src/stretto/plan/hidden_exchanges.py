"""What a tensor axis sends in a backward while it computes, in networks that are only planned: as Megatron runs them.

Korthikanti et al. 2022 (arXiv 2205.05198, sections 4.2.2 and 6.2): the sum of a column's input gradients goes on beside
the product that gives its weights' gradient; with divided sequences that sum is a scatter, and the column's input is
gathered again beside the product that gives its input's gradient. Other exchanges are waited for.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from stretto.cost.cluster import Link
from stretto.cost.collective import TENSOR_GATHER, TENSOR_SCATTER, TENSOR_SUM
from stretto.cost.layer_table import LayerCost, Work, Works


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
