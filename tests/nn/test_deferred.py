"""Parameters whose values come when their stage is built."""

import pytest
import torch
from torch import nn

from stretto.nn import deferred


class Numbers:
    """Gives every parameter the number of times that it was asked before, plus one."""

    def __init__(self):
        self.asked = []

    def fill(self, parameters, *, mapped=False):
        for parameter in parameters:
            self.asked.append(tuple(parameter.shape))
            parameter.data = torch.full(parameter.shape, float(len(self.asked)))


def deferred_model():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    source = Numbers()
    deferred.defer(model, source)
    return model, source


def test_a_placeholder_takes_one_number_and_ties_stay_tied():
    model, source = deferred_model()
    assert [tuple(p.shape) for p in deferred.placeholders([model])] == [(8, 4), (4, 8)]
    assert all(p.untyped_storage().nbytes() == 4 for p in model.parameters())
    assert model[2].weight is model[0].weight
    assert not source.asked


def test_filling_a_part_leaves_the_rest():
    model, source = deferred_model()
    deferred.fill(model[1])
    assert source.asked == [(4, 8)]
    assert model[1].weight.eq(1).all()
    assert model[1].weight.untyped_storage().nbytes() == 4 * 32
    assert deferred.placeholders([model]) == [model[0].weight]
    deferred.fill(model)
    deferred.fill(model)
    assert source.asked == [(4, 8), (8, 4)], "each is asked for once"


def test_values_in_a_block_are_given_back():
    model, _ = deferred_model()
    with deferred.filled([model[0]]):
        assert model[0].weight.eq(1).all()
    assert model[0].weight.untyped_storage().nbytes() == 4
    assert len(deferred.placeholders([model])) == 2


def test_a_copy_has_values_and_the_original_has_not():
    model, _ = deferred_model()
    copied = deferred.deep_copy([model])[0]
    assert copied[0].weight.eq(1).all()
    assert copied[1].weight.eq(2).all()
    assert copied[2].weight is copied[0].weight
    assert not deferred.placeholders([copied])
    assert len(deferred.placeholders([model])) == 2


def test_copies_of_plain_modules_are_plain_copies():
    module = nn.Linear(3, 2)
    twin = deferred.deep_copy(module)
    assert torch.equal(twin.weight, module.weight)
    assert twin.weight is not module.weight


def test_without_values_a_forward_gives_shapes():
    model, source = deferred_model()
    with deferred.faked([model]) as valueless:
        assert valueless
        assert model(torch.zeros(5, 4)).shape == (5, 8)
    assert model[0].weight.untyped_storage().nbytes() == 4, "put back"
    assert not source.asked
    with deferred.faked([nn.Linear(2, 2)]) as valueless:
        assert not valueless


@pytest.mark.filterwarnings("error")
def test_fakes_are_copied_as_fakes():
    model, _ = deferred_model()
    with deferred.without_values([model]):
        twin = deferred.deep_copy(model)
        assert twin(torch.zeros(2, 4)).shape == (2, 8)
    assert type(twin[0].weight.data) is type(model[0].weight.data)
    assert twin[2].weight is twin[0].weight


def test_values_that_other_processes_hold_are_forgotten_but_for_tied_ones():
    first, second = nn.Linear(3, 4), nn.Linear(4, 3)
    first.weight = nn.Parameter(torch.ones(4, 3))
    tied = nn.Linear(3, 4, bias=False)
    tied.weight = first.weight
    held = second.weight
    deferred.forget_values([first, second], kept=[tied])
    assert torch.equal(first.weight, torch.ones(4, 3))
    assert torch.equal(held, torch.zeros(3, 4)), "whoever holds it sees its shape"
    assert held.untyped_storage().nbytes() == 4
    assert first.bias.untyped_storage().nbytes() == 4
