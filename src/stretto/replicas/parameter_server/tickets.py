"""The replica that updates a stage next, and the log of turns, which another run can follow. No torch.

One sequence of updates, which leaves no replica too far behind. Three replicas, staleness 2; a replica computes on the
version that it took, a ticket is the number of an update:

    replica      0   0   1   2   ...
    ticket       0   1   2   3
    took before  0   1   0   0
    staleness    0   0   2   3 > 2: so replica 0 must not get ticket 1 before replicas 1 and 2 have updated
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stretto.errors import UsageError


@dataclass(frozen=True)
class Order:
    """By stage: the replica that made each update, and the update's staleness, from the first update on."""

    replicas: Mapping[int, tuple[int, ...]]
    staleness: Mapping[int, tuple[int, ...]]

    def of(self, stage: int) -> tuple[int, ...]:
        """The replicas that updated a stage, one after the other."""
        return self.replicas.get(stage, ())

    def __str__(self) -> str:
        return f"{sum(map(len, self.replicas.values()))} updates of {len(self.replicas)} stages"

    def to_json(self) -> dict[str, Any]:
        """`{"0": {"replica": [...], "staleness": [...]}}`."""
        return {
            str(stage): {"replica": replicas, "staleness": self.staleness.get(stage, ())}
            for stage, replicas in self.replicas.items()
        }

    @staticmethod
    def of_json(stages: Mapping[str, Any]) -> "Order":
        """The order from the result of `to_json`."""
        return Order(
            {int(stage): tuple(map(int, log["replica"])) for stage, log in stages.items()},
            {int(stage): tuple(map(int, log["staleness"])) for stage, log in stages.items()},
        )

    @staticmethod
    def join(parts: Iterable["Order"]) -> "Order":
        """One order of all stages, from orders of different stages."""
        replicas: dict[int, tuple[int, ...]] = {}
        staleness: dict[int, tuple[int, ...]] = {}
        for part in parts:
            replicas.update(part.replicas)
            staleness.update(part.staleness)
        return Order(dict(sorted(replicas.items())), dict(sorted(staleness.items())))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the order to a file, as JSON."""
        Path(path).write_text(json.dumps({"stages": self.to_json()}))

    @staticmethod
    def read(path: str | os.PathLike[str]) -> "Order":
        """The order from a file that `write` wrote. Raises UsageError if the file is none, or cannot be read."""
        try:
            return Order.of_json(json.loads(Path(path).read_bytes())["stages"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path} is no order of updates ({error}): give a file that Trainer.order().write(path) wrote"
            ) from error


class Ticket(NamedTuple):
    """The right of a replica to make update `number`; `staleness` updates came since it took its weights."""

    replica: int
    number: int
    staleness: int


class Tickets:
    """The tickets of one stage. `order` says which replica gets each of the first ones; then the first to ask."""

    def __init__(self, stage: int, replicas: int, bound: int, order: Sequence[int] = ()) -> None:
        self._stage, self._bound, self._order = stage, bound, order
        self._taken = dict.fromkeys(range(replicas), 0)  # the version on which each replica computes, until it leaves
        self._asking: list[int] = []
        self._updates = [0] * replicas
        self.log: list[Ticket] = []

    def restart(self, log: Sequence[Ticket]) -> None:
        """Go on after the updates of `log`: no replica waits for a ticket, and each has the newest version."""
        self.log = list(log)
        self._asking.clear()
        self._updates = [sum(ticket.replica == replica for ticket in log) for replica in range(len(self._updates))]
        self.begin()

    def begin(self) -> None:
        """Every replica has the newest version, and computes on it from now on."""
        self._taken = dict.fromkeys(range(len(self._updates)), len(self.log))

    def ask(self, replica: int) -> list[Ticket]:
        """Queue a replica for its next update. Returns the tickets that can be given now, to it or to others.

        Raises UsageError if the next update in `order` would be staler than the bound.
        """
        assert replica in self._taken.keys() - set(self._asking), f"replica {replica} asks out of turn"
        self._asking.append(replica)
        return self._give()

    def leave(self, replica: int) -> list[Ticket]:
        """Withdraw a replica until the next `begin`; returns the tickets that others no longer have to wait for."""
        self._taken.pop(replica, None)
        return self._give()

    @property
    def next(self) -> int:
        """The replica whose turn it is: the next one in `order`, after its end the one with the fewest updates."""
        number = len(self.log)
        return self._order[number] if number < len(self._order) else self._updates.index(min(self._updates))

    def _give(self) -> list[Ticket]:
        tickets: list[Ticket] = []
        while (replica := next(filter(self._may, self._asking), None)) is not None:
            number = len(self.log)
            ticket = Ticket(replica, number, number - self._taken[replica])
            if ticket.staleness > self._bound:
                raise UsageError(
                    f"update {number} of stage {self._stage} by replica {replica} would be {ticket.staleness} updates "
                    f"stale in the given order, and staleness={self._bound}: give the bound of the run that was logged"
                )
            self._asking.remove(replica)
            self._taken[replica] = number + 1
            self._updates[replica] += 1
            self.log.append(ticket)
            tickets.append(ticket)
        return tickets

    def _may(self, replica: int) -> bool:
        # True if the other replicas can still update within the bound one after the other, oldest weights first. The
        # replica with the oldest weights of all always may, so one can go on.
        number = len(self.log)
        if number < len(self._order):
            return self._order[number] == replica
        others = sorted(version for other, version in self._taken.items() if other != replica)
        return all(number + 1 + place - version <= self._bound for place, version in enumerate(others))
