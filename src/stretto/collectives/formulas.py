"""What each all-reduce should take, in closed form: latency, bytes and additions that follow one another.

P processes, N bytes. They stand beside the plans and share nothing with them; tests compare the two.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import floor, log2
from typing import NamedTuple

from stretto.options.checks import number, one_of, whole


class Terms(NamedTuple):
    """On the longest way from the first to the last: messages, bytes that are sent, bytes that are added."""

    messages: float
    sent: float
    reduced: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """alpha, beta and gamma: seconds a message takes, a byte of it, and adding a byte to another."""

    latency: float
    seconds_per_byte: float
    reduction_seconds_per_byte: float

    def __post_init__(self) -> None:
        for field in fields(self):
            number(field.name, getattr(self, field.name), 0)

    def seconds(self, terms: Terms) -> float:
        """How long they take."""
        return (
            terms.messages * self.latency
            + terms.sent * self.seconds_per_byte
            + terms.reduced * self.reduction_seconds_per_byte
        )


def single_master(P: int, N: float) -> Terms:
    """The master's one port: 2(P-1)(alpha + N beta) + (P-1) N gamma."""
    return Terms(2 * (P - 1), 2 * (P - 1) * N, (P - 1) * N)


def ring(P: int, N: float) -> Terms:
    """2(P-1) alpha + 2(P-1)/P N beta + (P-1)/P N gamma (Patarasu and Yuan 2009)."""
    return Terms(2 * (P - 1), 2 * (P - 1) / P * N, (P - 1) / P * N)


def parameter_server(P: int, N: float) -> Terms:
    """With P servers of one part each, the ring's."""
    return ring(P, N)


def recursive_doubling(P: int, N: float) -> Terms:
    """lg P (alpha + N beta + N gamma); once more to fold, and a message to unfold, if P is no power of two."""
    rounds, odd = floor(log2(P)), not is_power_of_two(P)
    return Terms(rounds + 2 * odd, (rounds + 2 * odd) * N, (rounds + odd) * N)


def rabenseifner(P: int, N: float) -> Terms:
    """2 lg P alpha + 2(P-1)/P N beta + (P-1)/P N gamma (Thakur et al. 2005).

    If P is no power of two: 2 more alpha and 2 N more beta and N more gamma, and P is the power of two below it.
    """
    rounds, odd = floor(log2(P)), not is_power_of_two(P)
    core = 2**rounds
    return Terms(2 * rounds + 2 * odd, (2 * (core - 1) / core + 2 * odd) * N, ((core - 1) / core + odd) * N)


def double_tree(P: int, N: float, blocks: int = 1) -> Terms:
    """4(K + D - 1) messages of N / 2K bytes, D = floor(lg P), two fewer if P = 2^D; half of them are added.

    In K blocks: with many of them 2 N beta (Sanders et al. 2009). Exact where P is a power of two, 3 or 5, else up to
    one message too many for P < 10, up to four for P <= 32. Two processes pass no block on: 2K messages.
    """
    if P == 1:
        return Terms(0, 0, 0)
    depth = floor(log2(P))
    messages = 2 * blocks if P == 2 else 4 * (blocks + depth - 1) - 2 * is_power_of_two(P)
    return Terms(messages, messages * N / (2 * blocks), messages * N / (4 * blocks))


def hierarchical(P: int, N: float, per_node: int = 1) -> Terms:
    """g a node, m nodes: 2(g-1) alpha + 2(g-1)/g N beta + 2(m-1) alpha + 2(m-1)/m (N/g) beta; half the bytes added."""
    inside, between = ring(per_node, N), ring(P // per_node, N / per_node)
    return Terms(*(a + b for a, b in zip(inside, between, strict=True)))


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
    """The closed form of an algorithm by its name. Raises UsageError for an unknown one, or no sizes."""
    one_of("algorithm", algorithm, [*FORMULAS, "double-tree", "hierarchical"])
    for name, value in (("P", P), ("blocks", blocks), ("per_node", per_node)):
        whole(name, value, 1, sys.maxsize)
    number("N", N, 0)
    if algorithm == "double-tree":
        return double_tree(P, N, blocks)
    if algorithm == "hierarchical":
        return hierarchical(P, N, per_node)
    return FORMULAS[algorithm](P, N)
