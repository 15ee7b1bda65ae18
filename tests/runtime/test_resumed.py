"""Replicas on processes go on from a checkpoint as if nothing had been, and from one of an emulated run."""

import pytest

from runtime import resumed
from runtime.processes import launch
from stretto import Mesh

TWO = {  # what is trained, steps before the checkpoint, steps after it
    "all-reduce": ({"method": "backprop", "sync": "all-reduce", "optimizer": "nadam"}, 5, 3),
    "powersgd": ({"method": "greedy", "sync": "all-reduce(hook=powersgd)"}, 12, 2),
    "fully-shard": ({"method": "1f1b", "sync": "fully-shard(min_block=0)", "optimizer": "muon"}, 2, 2),
    "local-sgd": ({"method": "pb", "sync": "local-sgd(every=4)", "optimizer": "sgd"}, 6, 7),
    "post-local": ({"method": "pipedream-2bw", "sync": "local-sgd(every=3,start=7)"}, 5, 9),
    "diloco": ({"method": "pb", "sync": "diloco(every=3)", "precision": "bf16"}, 4, 4),
}
FOUR = {
    "pipeline": ({"method": "pipedream", "sync": "local-sgd(every=3)"}, 5, 4),
    "tensor": ({"method": "backprop", "sync": "diloco(every=3)", "mesh": Mesh(data=2, tensor=2)}, 5, 4),
    "space": ({"method": "backprop", "sync": "local-sgd(every=3)", "mesh": Mesh(data=2, space=(2, 1))}, 5, 4),
}


def check(number, cases, folder, workers):
    for name, (case, before, _) in cases.items():
        if resumed.emulated(case):
            resumed.half({**case, "workers": workers}, before, f"{folder}/emulated-{name}")
    told = launch(number, "runtime.resumed:all_of", cases, str(folder), timeout=400)
    for name, (case, before, after) in cases.items():
        for each in told:
            assert each[name]["own"] == each[name]["through"], name
            assert each[name]["emulated"] in (None, each[name]["through"]), name
        if resumed.emulated(case):
            here = resumed.rest({**case, "workers": workers}, before, after, f"{folder}/{name}")
            assert told[0][name]["through"][4] == here[4], name
            for each in told:
                losses, apart, owed, settled, *_ = each[name]["through"]
                assert (losses, owed) == (here[0], here[2]), name
                if "shard" not in name:
                    assert apart.items() <= here[1].items(), name
                    assert settled.items() <= here[3].items(), name


@pytest.mark.parametrize(
    "names",
    [
        ("powersgd", "diloco"),
        pytest.param(("all-reduce", "fully-shard", "local-sgd", "post-local"), marks=pytest.mark.slow),
    ],
    ids=",".join,
)
def test_two_replicas(names, tmp_path):
    check(2, {name: TWO[name] for name in names}, tmp_path, 1)


@pytest.mark.slow
def test_two_replicas_of_two(tmp_path):
    check(4, FOUR, tmp_path, 2)


def test_a_parameter_server(tmp_path):
    """Updates are counted on: the order of the whole run serves each part of it, and keeps the bound all through."""
    case, before, after, folder = {"method": "pb"}, 3, 4, str(tmp_path / "processes")
    told = launch(2, "runtime.resumed:served", case, before, after, folder)
    order = told[0][5]
    assert [len(order.of(stage)) for stage in range(2)] == [2 * (before + after)] * 2
    assert max(max(each) for each in order.staleness.values()) <= 4
    emulated = str(tmp_path / "emulated")
    runs = [
        resumed.served(case, before, after, emulated, order),
        resumed.served_again(case, before, after, folder, order),
        *launch(2, "runtime.resumed:served_again", case, before, after, emulated, order),
    ]
    wanted = told[0][3] | told[1][3]
    for losses, _, owed, settled, weights, counted in (*told, *runs):
        assert (losses, owed) == (told[0][0], told[0][2])
        assert settled.items() <= wanted.items()
        assert weights in (None, told[0][4])
        assert counted in (None, order)
