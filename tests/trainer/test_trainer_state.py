"""`state_dict` and `load_state_dict`: what `save` and `load` do, without a folder. And losses that know their stage."""

import pytest
import torch
from torch import nn

import stretto
from pairwise import in_turn
from stretto.losses.value import MeanOfStage
from stretto.nn.batch import Examples


def trainer(method="pipedream", loss=None, **options):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3)]
    mse = stretto.mean(nn.functional.mse_loss) if loss is None else loss
    return stretto.Trainer([*layers, nn.Linear(4, 2)], mse, sgd, method, **options)


def sgd(params):
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def batches(first, last):
    for n in range(first, last):
        torch.manual_seed(n)
        yield torch.randn(8, 4), torch.randn(8, 2)


@pytest.mark.parametrize(
    ("method", "data"), in_turn(["1f1b", "pipedream", "pb-lwp-sc", "pipemare", "overlapping"], [2, 1], rounds=2, slow=1)
)
def test_training_goes_on_to_the_last_bit(method, data):
    one, two = (trainer(method, mesh=stretto.Mesh(data=data)) for _ in range(2))
    for x, y in batches(0, 6):
        one.step(x, y)
    two.load_state_dict(one.state_dict())
    assert two.entered == 6
    losses = [[each.step(x, y) for x, y in batches(6, 14)] + each.flush() for each in (one, two)]
    assert losses[0] == losses[1]
    assert all(map(torch.equal, one.gather().values(), two.gather().values()))


def test_another_method_is_refused_as_from_a_folder():
    with pytest.raises(stretto.UsageError, match="the state was saved with method pipedream, this trainer has method"):
        trainer("1f1b").load_state_dict(trainer().state_dict())


class Rows(Examples):
    def __init__(self, rows):
        self.rows, self.size = rows, len(rows)

    def tensors(self):
        return [self.rows]

    def cut(self, pieces):
        return [Rows(part) for part in self.rows.tensor_split(pieces)]

    def joined(self, other):
        return Rows(torch.cat((self.rows, other.rows)))


def test_a_loss_is_told_whose_output_it_gets_and_a_target_cuts_itself():
    told, looked = [], []

    def quietly(stage):
        def loss(output, target):
            looked.append((stage, len(target.rows)))
            return nn.functional.mse_loss(output, target.rows)

        return loss

    def at(stage):
        def loss(output, target):
            told.append((stage, len(target.rows)))
            return nn.functional.mse_loss(output, target.rows)

        return loss

    own = trainer(
        "greedy",
        MeanOfStage(at(None), at, quietly, "cut nothing"),
        example=torch.randn(8, 4),
        mesh=stretto.Mesh(data=2),
    )
    other = trainer("greedy", example=torch.randn(8, 4), mesh=stretto.Mesh(data=2))
    (x, y), *_ = batches(0, 1)
    for _ in range(own.lag + 1):
        losses = own.step(x, Rows(y)), other.step(x, y)
    assert losses[0] == losses[1] is not None
    assert {*told} == {(stage, 4) for stage in range(4)}
    assert {*looked} == {(0, 4), (0, 8)}  # a part of the other replica, and both together
    told.clear()
    assert own.evaluate([(x, Rows(y))])["loss"] == other.evaluate([(x, y)])["loss"]
    assert told == [(None, 8)]
