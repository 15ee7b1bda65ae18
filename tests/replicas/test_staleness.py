"""The order of updates: nobody is left behind its bound, and nobody waits for ever."""

import random

import pytest

from stretto.errors import UsageError
from stretto.replicas.parameter_server.tickets import Order, Tickets


def test_the_picture():
    tickets = Tickets(0, replicas=3, bound=2)
    assert tickets.ask(0) == [(0, 0, 0)]
    assert tickets.ask(0) == []  # 1 and 2 have their first weights
    assert tickets.ask(1) == [(1, 1, 1)]
    assert tickets.ask(2) == [(2, 2, 2), (0, 3, 2)]


@pytest.mark.parametrize(("replicas", "bound"), [(1, 0), (2, 1), (2, 4), (3, 2), (3, 5), (5, 4), (6, 13)])
def test_any_asking_stays_within_the_bound_and_goes_on(replicas, bound):
    """Replicas compute for random times; the staleness is counted here, from the numbers alone."""
    draw = random.Random(replicas * bound)
    tickets = Tickets(0, replicas, bound)
    taken, asking, given = [0] * replicas, set(), []
    for _ in range(3000):
        free = [replica for replica in range(replicas) if replica not in asking]
        assert free, "everybody waits"
        slow = free[0]
        replica = draw.choice([each for each in free if each != slow] * 9 + [slow])
        asking.add(replica)
        for who, number, staleness in tickets.ask(replica):
            assert number == len(given)
            assert staleness == number - taken[who] <= bound
            taken[who] = number + 1
            given.append(who)
            asking.remove(who)
    assert max(ticket.staleness for ticket in tickets.log) == bound
    assert [ticket.replica for ticket in tickets.log] == given


def test_nobody_waits_for_one_that_has_left():
    tickets = Tickets(0, replicas=2, bound=1)
    tickets.ask(0)
    assert tickets.ask(0) == []
    assert tickets.leave(1) == [(0, 1, 0)]
    assert tickets.ask(0) == [(0, 2, 0)]
    tickets.begin()
    assert tickets.ask(1) == [(1, 3, 0)]
    assert tickets.ask(0) == [(0, 4, 1)]


def test_a_given_order_is_kept():
    tickets = Tickets(0, replicas=2, bound=3, order=(1, 1, 0))
    assert tickets.next == 1
    assert tickets.ask(0) == []
    assert tickets.ask(1) == [(1, 0, 0)]
    assert tickets.ask(1) == [(1, 1, 0), (0, 2, 2)]
    assert tickets.next == 0  # which has made fewer


def test_an_order_that_breaks_the_bound_is_refused():
    tickets = Tickets(4, replicas=2, bound=1, order=(1, 1, 0))
    tickets.ask(1)
    tickets.ask(1)
    with pytest.raises(UsageError, match=r"update 2 of stage 4 by replica 0 would be 2 updates stale.*staleness=1"):
        tickets.ask(0)


def test_an_order_is_kept_on_disk(tmp_path):
    order = Order({0: (0, 1, 1), 3: (1, 0)}, {0: (0, 1, 0), 3: (0, 1)})
    order.write(tmp_path / "order.json")
    assert Order.read(tmp_path / "order.json") == order
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UsageError, match=r"other\.json is no order of updates"):
        Order.read(tmp_path / "other.json")
