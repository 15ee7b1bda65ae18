"""Ten thousand updates by three processes on a parameter server, some slow for a while; a minute on idle cores.

PYTHONPATH=src:tests python tests/runtime/ten_thousand.py
"""

from collections import Counter

from runtime.processes import launch


def check_many(told, updates, bound):
    """What `served.many` has returned in each of three processes."""
    order, _ = told[0]
    assert told == [(order, []), (None, []), (None, [])]
    replicas, staleness = order.of(0), order.staleness[0]
    each = -(-updates // 3)
    assert len(replicas) == len(staleness) == 3 * each
    assert [replicas.count(r) for r in range(3)] == [each] * 3
    taken = [0] * 3
    for number, replica in enumerate(replicas):
        assert staleness[number] == number - taken[replica]
        taken[replica] = number + 1
    assert max(staleness) == bound
    turns = sum(a == b for a, b in zip(replicas, replicas[3:], strict=False))
    assert turns < 0.95 * len(replicas), "replicas took turns"
    return {"updates": len(replicas), "in turn": turns, "staleness": dict(sorted(Counter(staleness).items()))}


if __name__ == "__main__":
    told = launch(3, "runtime.served:many", 10_000, 5, timeout=1200)
    print(check_many([tuple(each) for each in told], 10_000, 5))
