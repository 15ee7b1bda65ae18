"""A parameter server on real processes: the order is theirs, the numbers are those of that order."""

import pytest

from runtime import replicated, served
from runtime.processes import launch, speakers
from runtime.scripts import same
from runtime.ten_thousand import check_many
from runtime.test_replicas import run
from stretto import Mesh, ParameterServer


def replayed(told, runs, workers):
    for number, (method, replicas, options) in enumerate(runs):
        losses, weights, evaluated, order = told[0][number]
        options = {**options, "slow": None, "workers": workers, "order": order}
        again = served.train(method, replicas, **options)
        assert same(again[1], weights), method
        assert again[3] == order, method
        for rank, each in enumerate(told):
            assert each[number][0] == losses == again[0], (method, rank)
            assert each[number][2] == evaluated == again[2], (method, rank)
            assert (each[number][1] is None) == (each[number][3] is None) == (rank > 0)


def runs(replicas, *methods):
    return [(method, replicas, {"slow": 3, **options}) for method, options in methods]


@pytest.mark.slow
def test_three_replicas_and_many_updates():
    """The bound is reached and never passed, whoever is slow; everything is logged; nobody listens after a flush.

    `ten_thousand.py` does the same with 10,000 updates.
    """
    three, bound = runs(3, ("backprop", {}), ("1f1b", {"staleness": 2})), 5
    told = launch(3, "runtime.served:all_of_three", three, 600, bound, timeout=400)
    replayed([each[0] for each in told], three, 1)
    check_many([each[1] for each in told], 600, bound)


FOUR = runs(
    2, ("backprop", {}), ("pb", {"precision": "bf16"}), ("pipedream", {"staleness": 1}), ("pb", {"clip": 0.1}),
    ("pipedream-2bw", {}), ("1f1b", {"clip": 0.1}),
)  # fmt: skip


@pytest.mark.slow
def test_two_pipelines_of_two(tmp_path):
    told = launch(4, "runtime.served:all_of_four", FOUR, str(tmp_path / "checkpoint"), timeout=400)
    replayed([each[0] for each in told], FOUR, 2)
    sync = ParameterServer(staleness=1)
    resumed = replicated.resume("pb", Mesh(data=2), str(tmp_path / "checkpoint"), sync=sync)
    assert resumed.keys() == told[0][1].keys()  # numbers depend on the order, which was another one


@pytest.mark.slow
def test_a_killed_replica_is_missed_once_by_its_number():
    statuses, said = run("killed", 3, "parameter-server(staleness=4)", whole=True)
    assert sorted(statuses) == [-9, 1, 1]
    assert statuses[2] == -9
    assert len(speakers(said, "worker 2 is gone: it ended without a word")) == 1
    assert len(speakers(said, "Traceback")) == 1


def test_an_error_of_a_server_is_raised_where_it_happened(whole):
    """The optimizer of one shard fails while it serves, maybe in its thread: it is said once, and all end."""
    statuses, said = run("optimizer", 3, "parameter-server(staleness=4)", whole=whole)
    assert statuses == [1, 1, 1]
    assert speakers(said, "ValueError: a bad step") == [1]
    assert speakers(said, "Traceback") == [1]
