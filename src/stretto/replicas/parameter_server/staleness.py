"""Who updates a stage next: one sequence for all its replicas, which never leaves one of them too far behind. No torch.

Three replicas, staleness 2. A replica computes on the version that it took; a ticket is the number of an update:

    replica      0   0   1   2   ...
    ticket       0   1   2   3
    took before  0   1   0   0
    staleness    0   0   2   3 > 2: so replica 0 was not given ticket 1 before 1 and 2 had updated
"""

from collections.abc import Sequence
from typing import NamedTuple

from stretto.errors import UsageError


class Ticket(NamedTuple):
    """A replica makes the update of this number, on weights that so many updates of others have changed since."""

    replica: int
    number: int
    staleness: int


class Tickets:
    """One stage's. `order` says which replica gets each one, as far as it goes; after that who comes first."""

    def __init__(self, stage: int, replicas: int, bound: int, order: Sequence[int] = ()) -> None:
        self._stage, self._bound, self._order = stage, bound, order
        self._taken = dict.fromkeys(range(replicas), 0)  # the version on which each replica computes, if it does
        self._asking: list[int] = []
        self._updates = [0] * replicas
        self.log: list[Ticket] = []

    def restart(self, log: Sequence[Ticket]) -> None:
        """Go on after the updates of `log`; nobody waits for one, and every replica has the newest version."""
        self.log = list(log)
        self._asking.clear()
        self._updates = [sum(ticket.replica == replica for ticket in log) for replica in range(len(self._updates))]
        self.begin()

    def begin(self) -> None:
        """Every replica has the newest version, and computes on it from now on."""
        self._taken = dict.fromkeys(range(len(self._updates)), len(self.log))

    def ask(self, replica: int) -> list[Ticket]:
        """A replica wants to update. Returns the tickets that can be given now, to it or to others."""
        assert replica in self._taken.keys() - set(self._asking), f"replica {replica} asks out of turn"
        self._asking.append(replica)
        return self._give()

    def leave(self, replica: int) -> list[Ticket]:
        """A replica will not update before the next `begin`: nobody has to wait for it."""
        self._taken.pop(replica, None)
        return self._give()

    @property
    def next(self) -> int:
        """Whose turn it is where replicas take turns: who `order` says, after that who has made the fewest updates."""
        number = len(self.log)
        return self._order[number] if number < len(self._order) else self._updates.index(min(self._updates))

    def _give(self) -> list[Ticket]:
        given: list[Ticket] = []
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
            given.append(ticket)
        return given

    def _may(self, replica: int) -> bool:
        # The others, those with the oldest weights first, can still follow one by one within the bound. Who has the
        # oldest weights of all always may: so somebody can go on.
        number = len(self.log)
        if number < len(self._order):
            return self._order[number] == replica
        others = sorted(version for other, version in self._taken.items() if other != replica)
        return all(number + 1 + place - version <= self._bound for place, version in enumerate(others))
