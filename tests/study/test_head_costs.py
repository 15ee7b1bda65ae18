"""What heads cost, before a model is cut and after: against torch's count of real steps, and against formulas."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import stretto
from laws.networks import Attention, token_loss
from pairwise import slow_where
from stretto.cost import ModelCosts
from stretto.cost.head_costs import equal_stages
from stretto.measure.flops import count
from stretto.measure.layer_counting import LayerCounting
from stretto.measure.layer_flops import layer_costs
from stretto.plan.problem import merged
from stretto.study.counted_heads import UncutModel, costs_of_head, counted_head
from stretto.study.model_costs import outputs

VOCABULARY, WIDTH, TOKENS = 11, 8, 5
BOUNDS = (0, 2, 3, 5)  # of three stages: [E b] [b] [b norm+U]
HEADS = {  # the head, which blocks and readouts the one behind stage 0 holds, and which of them its stage steps
    "blocks(depth=2)": ("b b U", "b b U"), "solo": ("U", ""), "man": ("b b U", "b U"), "auglocal": ("b b U", "b b U"),
    "segprop(layers=2)": ("b b U", ""), "language": ("U", "U"), "infopro": ("U U h", "U U h"),
}  # fmt: skip


def language_model():
    torch.manual_seed(0)
    readout = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
    return [nn.Embedding(VOCABULARY, WIDTH), *(Attention(WIDTH) for _ in range(3)), readout]


def words(count, seed=0):
    return torch.randint(VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model():
    layers, x, y, counting = language_model(), words(2), words(2, 1), LayerCounting()
    rows = merged(layer_costs(layers, x, loss=token_loss, target=y, fake=counting).layers)
    return UncutModel(layers, outputs(layers, x), (x,), y, token_loss, rows, counting)


def numbers(layers):
    """Parameters of blocks, readouts and hidden layers, by hand."""
    sizes = {"b": 4 * WIDTH + 3 * WIDTH * (WIDTH + 1) + WIDTH * (WIDTH + 1) + 4 * WIDTH * WIDTH + 3 * WIDTH,
             "U": 2 * WIDTH + WIDTH * VOCABULARY, "h": WIDTH * (WIDTH + 1)}  # fmt: skip
    return sum(sizes[layer] for layer in layers.split())


QUICK = ("solo", "language")


@pytest.mark.parametrize("name", slow_where(lambda name: name not in QUICK, HEADS))
def test_a_head_costs_the_same_before_the_cut_and_in_real_steps(model, name):
    found, reason = costs_of_head(name, model)
    assert found is not None, reason
    layers, x, y = language_model(), words(4), words(4, 1)
    stages = [nn.Sequential(*layers[a:b]) for a, b in pairwise(BOUNDS)]
    trainer = stretto.Trainer(stages, token_loss, partial(torch.optim.SGD, lr=0.1), f"greedy(head={name})", example=x)
    counted, features = count(trainer, x, y), outputs(stages, x)
    alone = layer_costs(stages, x, fake=model.counting).layers
    for stage, head in enumerate(trainer.heads[:-1]):
        row = found.at(stage, BOUNDS)
        of_trainer = counted_head(head, features[stage], token_loss, (x,), y, model.counting)
        for kind in "FB":
            assert row.flops(kind).each == of_trainer.flops(kind).each
        own = alone[stage].flops("F").each + row.flops("F").each
        assert own == counted["F", stage]
        back = alone[stage].flops("W").each + row.flops("B").each
        assert back == counted["B", stage]
        assert row.parameters == of_trainer.parameters == sum(p.numel() for p in head.parameters())
        assert row.gradient_bytes == of_trainer.gradient_bytes
    held, stepped = HEADS[name]
    assert found.at(0, BOUNDS).parameters == numbers(held)
    assert found.at(0, BOUNDS).trained == numbers(stepped)
    sent = found.weights_read(BOUNDS, (0, 1), ModelCosts((), "float32"))
    assert sent == pytest.approx(trainer.weight_bytes)
    assert {(tie.owner, tie.user) for tie in trainer.rules.ties} == {*sent}


def test_copies_of_stages_are_priced_for_equal_ones_until_the_cut_is_known(model):
    found, _ = costs_of_head("auglocal(depth=1)", model)
    assert [row is None for row in found.behind(0, 3)] == [False, False, False, True, True]
    last = [found.rows[-1].parameters, found.rows[-2].parameters]
    assert found.behind(0, 3)[2].parameters == last[0]  # stages of one layer each
    assert found.behind(0, 3)[1].parameters == last[0]  # [b b] [U], as of three layers the first stage gets two
    assert found.at(0, (0, 2, 3, 5)).parameters == sum(last)
    assert equal_stages(2, 5, 2) == [2, 4, 5]


def test_a_reconstruction_that_weighs_nothing_costs_nothing(model):
    found, _ = costs_of_head("infopro(first=1, last=0)", model)
    with_decoder, without = found.behind(0, 3)[1], found.behind(1, 3)[1]
    decoder = 2 * TOKENS * WIDTH * VOCABULARY  # FLOPs of a Linear's forward for an example
    assert with_decoder.flops("F").each - without.flops("F").each == decoder
    assert with_decoder.trained - without.trained == numbers("U")
    assert found.behind(0, 2) == found.behind(0, 3)
