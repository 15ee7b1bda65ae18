"""The cost of each all-reduce in closed form: messages, bytes and additions that follow one another.

P processes, N bytes. The formulas share no code with the plans; tests compare the two.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import floor, log2
from typing import NamedTuple

from stretto.options.checks import number, one_of, whole


class Terms(NamedTuple):
    """On the critical path: the number of messages, the bytes sent, the bytes added."""

    messages: float
    sent: float
    reduced: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """alpha, beta and gamma in seconds: of a message, of each byte sent, and of each byte added."""

    latency: float
    seconds_per_byte: float
    reduction_seconds_per_byte: float

    def __post_init__(self) -> None:
        for field in fields(self):
            number(field.name, getattr(self, field.name), 0)

    def seconds(self, terms: Terms) -> float:
        """The seconds that messages, bytes and additions take together."""
        return (
            terms.messages * self.latency
            + terms.sent * self.seconds_per_byte
            + terms.reduced * self.reduction_seconds_per_byte
        )


def single_master(P: int, N: float) -> Terms:
    """2(P-1)(alpha + N beta) + (P-1) N gamma: all messages pass the master's one port."""
    return Terms(2 * (P - 1), 2 * (P - 1) * N, (P - 1) * N)


def ring(P: int, N: float) -> Terms:
    """2(P-1) alpha + 2(P-1)/P N beta + (P-1)/P N gamma (Patarasu and Yuan 2009)."""
    return Terms(2 * (P - 1), 2 * (P - 1) / P * N, (P - 1) / P * N)


def parameter_server(P: int, N: float) -> Terms:
    """As `ring`: P servers of one part each."""
    return ring(P, N)


def recursive_doubling(P: int, N: float) -> Terms:
    """lg P (alpha + N beta + N gamma), lg P rounded down.

    If P is no power of two: one round more to fold, and a message to unfold.
    """
    rounds, odd = floor(log2(P)), not is_power_of_two(P)
    return Terms(rounds + 2 * odd, (rounds + 2 * odd) * N, (rounds + odd) * N)


def rabenseifner(P: int, N: float) -> Terms:
    """2 lg P alpha + 2(P-1)/P N beta + (P-1)/P N gamma (Thakur et al. 2005).

    If P is no power of two: that of the power of two below P, plus 2 alpha + 2 N beta + N gamma.
    """
    rounds, odd = floor(log2(P)), not is_power_of_two(P)
    core = 2**rounds
    return Terms(2 * rounds + 2 * odd, (2 * (core - 1) / core + 2 * odd) * N, ((core - 1) / core + odd) * N)


def double_tree(P: int, N: float, blocks: int = 1) -> Terms:
    """4(K + D - 1) messages of N / 2K bytes, D = floor(lg P), two fewer if P = 2^D; half of them are added.

    K is `blocks`: with many blocks this tends to 2 N beta (Sanders et al. 2009). Exact where P is a power of two, 3 or
    5, else up to one message too many for P < 10, up to four for P <= 32. Two processes pass no block on: 2K messages.
    """
    if P == 1:
        return Terms(0, 0, 0)
    depth = floor(log2(P))
    messages = 2 * blocks if P == 2 else 4 * (blocks + depth - 1) - 2 * is_power_of_two(P)
    return Terms(messages, messages * N / (2 * blocks), messages * N / (4 * blocks))


def hierarchical(P: int, N: float, per_node: int = 1) -> Terms:
    """2(g-1) alpha + 2(g-1)/g N beta + 2(m-1) alpha + 2(m-1)/m (N/g) beta; half of the bytes sent are added.

    g is `per_node`, the number of processes in a node; m = P/g is the number of nodes.
    """
    inside, between = ring(per_node, N), ring(P // per_node, N / per_node)
    return Terms(*(inner + outer for inner, outer in zip(inside, between, strict=True)))


def is_power_of_two(P: int) -> bool:
    """Whether P is 1, 2, 4, ..."""
    return P & (P - 1) == 0


FORMULAS: dict[str, Callable[[int, float], Terms]] = {
    "single-master": single_master,
    "parameter-server": parameter_server,
    "ring": ring,
    "recursive-doubling": recursive_doubling,
    "rabenseifner": rabenseifner,
}


def formula(algorithm: str, P: int, N: float, *, blocks: int = 1, per_node: int = 1) -> Terms:
    """The terms of an algorithm among P processes for N bytes, by its name.

    `blocks` is for double-tree, `per_node` for hierarchical. Raises UsageError for an unknown algorithm, or for sizes
    out of range.
    """
    one_of("algorithm", algorithm, [*FORMULAS, "double-tree", "hierarchical"])
    for name, value in (("P", P), ("blocks", blocks), ("per_node", per_node)):
        whole(name, value, 1, sys.maxsize)
    number("N", N, 0)
    if algorithm == "double-tree":
        return double_tree(P, N, blocks)
    if algorithm == "hierarchical":
        return hierarchical(P, N, per_node)
    return FORMULAS[algorithm](P, N)
