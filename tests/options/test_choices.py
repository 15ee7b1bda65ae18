"""Arguments that are one of a few values: arrays and tensors, which answer == with more of them, are refused."""

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from stretto import parallel
from stretto.nn.batch import target_of
from stretto.optim.layerwise import LAMB, LARS
from stretto.options.checks import is_among
from stretto.tracing import Recording, perfetto

ARRAYS = (np.zeros((4, 3)), np.array(["a", "b"]), torch.zeros(2, 3), torch.zeros(0), torch.eye(2).to_sparse())


def test_types_count():
    """True is not 1, and 1.0 is not either."""
    assert all(is_among(value, known) for value, known in ((1, (0, 1)), (None, (None, "a")), ("a", {"a": 1})))
    assert not any(is_among(value, (0, 1, "a")) for value in (True, 1.0, []))


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: f"{type(value).__name__}{list(value.shape)}")
def test_arrays_are_none_of_the_choices(value):
    for name, options in {"overlapping": ("delay", "combine"), "pb": ("predict", "horizon")}.items():
        for option in options:
            given = {"predict": "velocity"} if option == "horizon" else {}
            with pytest.raises(stretto.UsageError, match=option):
                stretto.method(name, **given, **{option: value})
    for option in ("hook", "algorithm"):
        with pytest.raises(stretto.UsageError, match=option):
            stretto.AllReduce(**{option: value})


def test_what_has_no_shape_yet_cannot_be_gathered():
    with pytest.raises(stretto.UsageError, match="weight has no shape yet"):
        parallel.gather(nn.LazyLinear(3))


def test_sparse_targets():
    with pytest.raises(stretto.UsageError, match=r"y\[1\] is a sparse tensor.*to_dense"):
        target_of((torch.zeros(2), torch.eye(2).to_sparse()))


@pytest.mark.parametrize("optimizer", [LAMB, lambda params: LARS(params, lr=0.1)])
def test_parameters_of_whole_numbers(optimizer):
    with pytest.raises(stretto.UsageError, match="floating point"):
        optimizer([torch.zeros(2, dtype=torch.int64)])


def test_a_time_that_a_trace_cannot_hold(tmp_path):
    recording = Recording()
    recording.span("compute", "0F0", 0, 2**63)
    with pytest.raises(stretto.UsageError, match=r"9.22e\+09 s"):
        perfetto.write([recording], tmp_path / "trace")
    assert not list(tmp_path.iterdir())
