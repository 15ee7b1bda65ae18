"""A parameter server on real processes: the order is theirs, the numbers are those of that order."""

import pytest
import torch

from runtime import served
from runtime.processes import launch
from runtime.test_bit_for_bit import same


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


TWO = [(method, 2, {"slow": 3}) for method in ("backprop", "1f1b")]


def test_two_replicas():
    told = launch(2, "runtime.served:train_all", TWO)
    replayed(told, TWO, 1)
