import logging

import pytest
import torch
from splitting_models import GPT, Residual, Transformer, cnn
from torch import nn

import stretto
from stretto.doctor.model_check import shared
from stretto.errors import UsageError
from stretto.nn.chain import Chain


def gradients(model, x):
    parameters = list(model.parameters())
    return torch.autograd.grad(model(x).square().sum(), parameters)


def mlp(depth=4, width=4):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("by", ["flops", "time", "parameters"])
def test_a_residual_cnn_is_the_same_in_stages(num_stages, by):
    torch.manual_seed(0)
    model, x = cnn().double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    stages = stretto.split(model, num_stages, example=x, by=by)
    whole = Chain(*stages)
    assert len(stages) == num_stages
    if by != "time":  # measured, a layer may seem so slow that it is cut
        assert [id(layer) for stage in stages for layer in stage] == [id(layer) for layer in model]
    assert all(torch.equal(a, b) for a, b in zip(gradients(whole, x), gradients(model, x), strict=True))
    model.eval()
    assert torch.equal(whole(x), model(x))


def test_layers_keep_their_names():
    """A key of the trained model is a stage's number and the user's own key."""
    model = mlp()
    keys = [key.split(".", 1)[1] for key in Chain(*stretto.split(model, 3)).state_dict()]
    assert keys == list(model.state_dict())


def test_lists_and_module_lists():
    layers = [nn.Linear(4, 4) for _ in range(4)]
    for model in (layers, tuple(layers), nn.ModuleList(layers), Chain(*layers)):
        stages = stretto.split(model, 2)
        assert [[id(layer) for layer in stage] for stage in stages] == [
            [id(layer) for layer in layers[:2]],
            [id(layer) for layer in layers[2:]],
        ]
        assert all(isinstance(stage, nn.Sequential) for stage in stages)


def test_stages_are_balanced_and_say_why(caplog):
    model = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))
    with caplog.at_level(logging.INFO, logger="stretto"):
        stages = stretto.split(model, 3, example=torch.randn(10, 4))
    assert stages.bounds == [0, 2, 4, 5]
    assert caplog.messages[0] == stages.explanation
    assert "the proof took" in caplog.messages[1]
    assert stages.explanation.splitlines() == [
        "stage  layers  kinds                cost  share",
        "0      0-1     Linear, ReLU   3.20 kFLOP   8.3%",
        "1      2-3     Linear, ReLU  32.00 kFLOP  83.3%",
        "2      4       Linear         3.20 kFLOP   8.3%",
        "cost: forward FLOPs counted on the example, [10, 4] float32; imbalance 2.50 (largest stage / mean)",
        "proved on the example: outputs, gradients of 6 parameters, buffers and random numbers are the model's, in "
        "training and in evaluation",
    ]


def test_stages_begin_where_they_are_told_to():
    model = mlp(4)
    stages = stretto.split(model, [0, 1, 6, 8])
    assert stages.bounds == [0, 1, 6, 8]
    assert [len(stage) for stage in stages] == [1, 5, 2]
    assert stretto.split(model, stretto.split(model, 3).bounds).bounds == stretto.split(model, 3).bounds


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 9], "and the number of layers, 8"),
        ([1, 8], "give 0, the layer that each further stage begins with"),
        ([0, 3, 3, 8], "in rising order"),
        ([0, "4", 8], "say where they begin"),
    ],
)
def test_bounds_that_are_none(bounds, message):
    with pytest.raises(UsageError, match=message):
        stretto.split(mlp(4), bounds)


def test_no_stage_begins_where_nothing_can_be_parted():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    with pytest.raises(UsageError, match="no stage can begin at 1: "):
        stretto.split(model, [0, 1, 3], example=torch.zeros(2, 4))


def test_without_an_example_parameters_count():
    stages = stretto.split([nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(9, 9)], 2)
    assert stages.bounds == [0, 2, 3]
    assert "number of parameters (to count FLOPs, give one input batch, example=x)" in stages.explanation


def test_shared_layers_stay_together():
    shared = nn.Linear(4, 4)
    layers = [nn.Linear(4, 4), shared, nn.ReLU(), shared, nn.Linear(4, 4)]
    stages = stretto.split(layers, 3, example=torch.randn(2, 4), tied="together")
    assert stages.bounds == [0, 1, 4, 5]
    assert "layer 1 (Linear) and layer 3 (Linear) share the parameter 'weight'" in stages.explanation
    with pytest.raises(UsageError, match=r"only 3 pieces can be separated.*layer 1.*layer 3.*'weight'.*untie"):
        stretto.split(layers, 4, tied="together")


def test_tied_ends_of_a_list_come_apart_unless_told_otherwise():
    layers = [nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)]
    layers[2].weight = layers[0].weight
    stages = stretto.split(layers, 2, example=torch.tensor([[1, 2]]))
    assert stages[0][0].weight is stages[1][-1].weight
    assert "tied: stages 0 and 1 share the parameter '0.weight'; pipelines train it on the first" in stages.explanation
    (remark,) = shared(stages)  # of stretto doctor
    assert remark.remark.split(": ")[1] in stages.explanation
    with pytest.raises(UsageError, match=r"layer 0 \(Embedding\) and layer 2 \(Linear\) share.*'weight'.*one stage"):
        stretto.split(layers, 2, tied="together")
    with pytest.raises(UsageError, match="did you mean 'together'"):
        stretto.split(layers, 2, tied="togehter")
    assert len(stretto.split(layers, 1)) == 1


def test_a_layer_that_overwrites_its_input_stays_with_the_one_before():
    """By measured time a ReLU costs something, and could begin a stage; but what a stage is sent must stand."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True)))
    assert stretto.split(model, 2, example=torch.randn(2, 4), by="time").bounds == [0, 2, 4]


class Fork(nn.Module):
    def forward(self, x):
        return x, 2 * x


class Join(nn.Module):
    def forward(self, x, y):
        return x + y


class JoinTuple(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


def test_tuples_between_the_layers_of_a_list_become_arguments():
    layers, x = [nn.Linear(4, 4), Fork(), Join(), nn.Linear(4, 4)], torch.randn(2, 4)
    for num_stages in (1, 2, 3, 4):
        stages = stretto.split(layers, num_stages, example=x)
        assert torch.equal(Chain(*stages)(x), layers[3](3 * layers[0](x)))


def test_tuples_within_a_sequential_stay_within_a_stage():
    model, x = nn.Sequential(nn.Linear(4, 4), Fork(), JoinTuple(), nn.Linear(4, 4)), torch.randn(2, 4)
    stages = stretto.split(model, 3, example=x)
    assert stages.bounds == [0, 1, 3, 4]
    assert torch.equal(Chain(*stages)(x), model(x))
    with pytest.raises(UsageError, match="hands a tuple on"):
        stretto.split(model, 4, example=x)


def test_an_example_of_several_tensors():
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    stages = stretto.split([Join(), nn.Linear(4, 4)], 2, example=(x, y))
    assert torch.equal(Chain(*stages)(x, y), stages[1](x + y))
    with pytest.raises(UsageError, match=r"2 tensors.*nn\.Sequential takes one"):
        stretto.split(nn.Sequential(Join(), nn.Linear(4, 4)), 2, example=(x, y))


def test_split_leaves_the_model_as_it_was():
    model = cnn()
    model[2].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    generator = torch.get_rng_state()
    stretto.split(model, 3, example=torch.ones(2, 3, 8, 8))
    assert torch.equal(torch.get_rng_state(), generator)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class Doubtful(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Transformer(4, 8, 0.0), Transformer(3, 8, 0.0)


class Custom(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + x


@pytest.mark.parametrize(
    ("model", "num_stages", "options", "message"),
    [
        (mlp(), 0, {}, "num_stages=0: ask for at least one stage"),
        (mlp(), 2.0, {}, r"num_stages=2\.0"),
        (mlp(2), 5, {}, "5 stages from 4 layers: a stage holds at least one layer. Ask for at most 4 stages"),
        ([], 1, {}, "the list of layers is empty"),
        (mlp(), 2, {"by": "flop"}, "by='flop': did you mean 'flops'"),
        (mlp(), 2, {"by": "time"}, "by='time' measures.*example=x"),
        (mlp(), 2, {"example": [torch.ones(2, 4), None]}, r"example\[1\] is None, a NoneType: give a tensor"),
        (mlp(), 2, {"example": ()}, "example is an empty tuple"),
        (nn.ModuleList([nn.ReLU()]), 1, {"path": "0"}, "a ModuleList has no forward: leave the path out"),
        ([nn.ReLU(), torch.relu], 1, {}, "entry 1 of the list of layers is builtin"),
        (Residual(3), 2, {}, "Residual is not an nn.Sequential.*has no list of modules"),
        (Doubtful(), 2, {}, r"Doubtful is not an nn.Seq.*it has: 'encoder\.h' \(4 Block\), 'decoder\.h' \(3 Block\)"),
        (GPT(), 2, {"example": {"token": torch.ones(2, 4)}}, r"'token', no argument of GPT.*did you mean 'tokens'"),
        (GPT(), 2, {"example": {"scale": torch.ones(1)}}, r"example names scale, but GPT\.forward.*also needs tokens"),
        (mlp(), 2, {"example": {"x": torch.ones(2, 4)}}, "example names x, but a list of layers knows no names"),
        (Custom(nn.ReLU()), 1, {}, r"Custom is not an nn.Sequential.*list\(model\)"),
        (GPT(), 2, {"path": "transformer.hh"}, "names nothing in GPT; did you mean 'transformer.h'"),
        (GPT(), 2, {"path": "transformer.norm"}, "is LayerNorm, not a list of blocks"),
        (GPT(), 6, {"path": "transformer.h"}, "6 stages from 5 blocks"),
        ([nn.Linear(2, 2), nn.LazyLinear(3)], 2, {}, r"layer 1 \(LazyLinear\) is lazy"),
        (nn.LazyLinear(3), 2, {"example": torch.randn(4, 2)}, r"layer 0 \(LazyLinear\) is lazy"),
        (
            [nn.Linear(3, 4), nn.ReLU(), nn.Linear(5, 6)],
            2,
            {"example": torch.ones(2, 3)},
            r"layer 2 \(Linear\) cannot take what reaches it for the example, \[2, 4\] float32",
        ),
    ],
)
def test_mistakes(model, num_stages, options, message):
    with pytest.raises(UsageError, match=message):
        stretto.split(model, num_stages, **options)
