"""Stages are about as expensive as each other, whatever a network is made of; where they are not, that is said."""

import copy
import functools
import re
import warnings

import pytest
import torch
from ordinary_models import Encoder, Once, SmallResNet, Stemmed, nested
from splitting_models import GPT, Skip
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import stretto
from pairwise import slow_where, thinned
from stretto.errors import UsageError
from stretto.nn.chain import Chain
from stretto.splitting import divide, pieces

IMAGES = (4, 3, 8, 8)
CASES = {  # a network, the shape of its input, the number of stages, how it is cut
    "stem and head": (Stemmed, IMAGES, 2, "modules"),
    "residual": (SmallResNet, IMAGES, 2, "modules"),
    "residual, 4": (SmallResNet, IMAGES, 4, "torch.export"),
    "encoder": (Encoder, (4, 16), 2, "modules"),
    "one large module": (Once, (4, 16), 2, "torch.export"),
    "nested": (nested, (4, 2), 2, "layers"),
    "nested, 4": (nested, (4, 2), 4, "layers"),
    "a sequence of networks": (lambda: nn.Sequential(Encoder(), nn.Linear(5, 5)), (4, 16), 2, "modules"),
}


CHOSEN = slow_where(lambda case: case == "residual, 4", CASES)


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def counted(stages, *inputs):
    """Each stage's share of the forward's FLOPs, as torch counts them."""
    flops = []
    for stage in stages:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            output = stage(*inputs)
        inputs = output if isinstance(output, tuple) else (output,)
        flops.append(counter.get_total_flops())
    return [each / sum(flops) for each in flops]


@functools.cache
def cut(case):
    """A model, its state before it was split, its stages and their input; some cases are exported, which takes long."""
    build, shape, num_stages, _ = CASES[case]
    model, x = build().double(), numbers(*shape)
    before = copy.deepcopy(model.state_dict())
    stages = stretto.split(model, num_stages, example=x)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return model, before, stages, x


@pytest.mark.parametrize("case", CHOSEN)
def test_stages_are_fair(case):
    _, _, num_stages, how = CASES[case]
    model, _, stages, x = cut(case)
    assert how in stages.explanation
    for module in (model, *stages):
        module.eval()
    shares = counted(stages, x)
    assert max(shares) * num_stages <= 1.3
    assert stages.shares == pytest.approx(shares)


def results(module, model, state, x):
    model.load_state_dict(state)
    torch.manual_seed(3)
    output = module(x)
    gradients = torch.autograd.grad(output.square().sum(), list(model.parameters()))
    return [tensor.clone() for tensor in (output, *gradients, *model.buffers())]


@pytest.mark.parametrize("case", thinned(CHOSEN, 2))
def test_fair_stages_are_the_model(case):
    """Outputs, gradients and statistics bit for bit; names, weights and bounds; other numbers of rows."""
    shape = CASES[case][1]
    model, before, stages, x = cut(case)
    whole = Chain(*stages)
    assert {id(p) for p in whole.parameters()} == {id(p) for p in model.parameters()}
    for training in (True, False):
        for rows in (4, 1 if not training else 3):
            model.train(training)
            whole.train(training)
            given = numbers(rows, *shape[1:])
            pairs = zip(results(model, model, before, given), results(whole, model, before, given), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
    state = stages.model_state({f"{i}.{k}": v for i, stage in enumerate(stages) for k, v in stage.state_dict().items()})
    assert state.keys() == before.keys()
    again = stretto.split(model, stages.bounds, example=x)
    assert [list(stage.state_dict()) for stage in again] == [list(stage.state_dict()) for stage in stages]


def test_modules_take_any_size():
    """Unlike a graph of operations, which takes the example's."""
    model = SmallResNet().double().eval()
    stages = stretto.split(model, 2, example=numbers(*IMAGES))
    assert torch.equal(Chain(*stages)(numbers(2, 3, 16, 12)), model(numbers(2, 3, 16, 12)))


def test_layers_within_layers_keep_their_names():
    model = nested()
    stages = stretto.split(model, 2, example=torch.randn(4, 2))
    assert [key for stage in stages for key in stage.state_dict()] == list(model.state_dict())
    assert stages[0][1][0] is model[1][0]
    assert all(type(stage) is nn.Sequential for stage in stages)


def test_sequences_that_do_more_are_not_opened():
    """A hook hangs on one."""
    model = nested()
    model[1].register_forward_hook(lambda module, inputs, output: output * 2)
    layers, x = list(model), torch.randn(4, 2)
    with pytest.warns(UserWarning, match=r"Layer 1 \(Sequential\) alone is too large"):
        stages = stretto.split(layers, 2, example=x)
    assert any(layer is model[1] for stage in stages for layer in stage)


def test_a_tuple_within_a_nested_sequence_stays_within_a_stage():
    class Fork(nn.Module):
        def forward(self, x):
            return x, x * 2

    class Join(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    inner = nn.Sequential(nn.Linear(4, 4), Fork(), Join(), nn.Linear(4, 4))
    layers, x = [inner, nn.ReLU()], torch.randn(3, 4)
    stages = stretto.split(layers, 2, example=x)
    assert stages.bounds == [0, 3, 5]
    assert torch.equal(Chain(*stages)(x), inner(x).relu())
    with pytest.raises(UsageError, match="no stage can begin at 2: layer 1"):
        stretto.split(layers, [0, 2, 5], example=x)


def test_a_module_called_twice_and_work_in_place_stay_together():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.list = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2))
            self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
            self.relu, self.c, self.d = nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            y = self.norm(self.b(self.norm(self.a(x))))
            z = self.c(x) + self.relu(y)
            return self.list(self.d(y + z))

    model, x = Twice().double(), numbers(6, 8)
    stages = stretto.split(model, 2, example=x)
    assert "module norm (BatchNorm1d) is called more than once" in stages.explanation
    holders = [sum(inner is model.norm for inner in stage.modules()) for stage in stages]
    assert sorted(holders) == [0, 1]
    before = copy.deepcopy(model.state_dict())
    for one, other in zip(results(model, model, before, x), results(Chain(*stages), model, before, x), strict=True):
        assert torch.equal(one, other)


def test_shares_of_parameters_alone_are_told_with_the_remedy():
    layers = [nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50)]
    with pytest.warns(UserWarning, match=r"of the parameters, and nobody .* split\(model, 2, example=x\)") as caught:
        stretto.split(layers, 2)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "stages have")
        stretto.split(layers, 2, by="parameters")
        stretto.split(layers, [0, 1, 3])
        stretto.split(layers, 2, example=torch.zeros(2, 3, dtype=torch.long))
        stretto.split(layers[1:], 2)  # where parameters are as good as FLOPs


def test_uneven_stages_warn_once_with_shares_and_a_remedy_that_works():
    model, x = Stemmed().double(), numbers(*IMAGES)
    with pytest.warns(UserWarning, match=r"fair share") as caught:
        stages = stretto.split(model, 4, example=x)
    [said] = [str(each.message) for each in caught]
    shares = ", ".join(f"{share:.1%}" for share in stages.shares)
    assert f"{4 * max(stages.shares):.2f} times its fair share of the cost (stages have {shares};" in said
    fewer = int(re.search(r"sk for (\d) stages, the largest of which has 1\.", said)[1])
    assert caught[0].filename == __file__
    assert max(stretto.split(model, fewer, example=x).shares) * fewer <= 1.3


@pytest.mark.parametrize(
    ("model", "num_stages", "options", "remedy"),
    [
        (nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 40), nn.Linear(40, 4)), 3, {}, "Layer 1 (Linear) alone is "),
        (Skip(), 4, {"path": "blocks"}, "leave path='blocks' out"),
        (Skip(), 4, {"by": "parameters"}, "number of parameters), and"),
    ],
)
def test_what_cannot_be_cut_finer_warns_too(model, num_stages, options, remedy):
    x = torch.randn(4, 4 if isinstance(model, nn.Sequential) else 6)
    with pytest.warns(UserWarning, match="fair share") as caught:
        stretto.split(model, num_stages, example=x, **options)
    assert remedy in str(caught[0].message)


def test_nothing_is_said_where_nothing_is_known_or_asked():
    """Without an example parameters stand for FLOPs; where stages begin may have been said."""
    model, x = Stemmed(), torch.randn(*IMAGES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # ahead of pyproject.toml's filter
        assert not divide(model, 2).uneven  # which is what split warns of, beside the missing example
        stretto.split(model, [0, 1, 3], example=x)
        pieces(model, example=x)


def test_the_plainest_way_that_is_fair():
    """A list of blocks that makes fair stages is cut between them, as ever."""
    model, x = GPT(4).double(), torch.randint(0, 11, (3, 7))
    for num_stages in (1, 2, 4):
        assert "blocks" in stretto.split(model, num_stages, example=x).explanation.splitlines()[0]


def test_pieces_are_those_that_two_stages_are_made_of():
    model, x = SmallResNet().double(), numbers(*IMAGES)
    found = pieces(model, example=x)
    assert found.bounds[-1] == stretto.split(model, 2, example=x).bounds[-1]
    assert len(found) > 6
    assert found.shares == pytest.approx(counted(found, x))
    bounds = [0, found.bounds[3], found.bounds[-1]]
    assert stretto.split(model, bounds, example=x).bounds == bounds
