"""What plans are made of, read off networks."""

from functools import cache

import pytest
import torch
from test_refine import linear_problem
from torch import nn

import stretto
from stretto.cli.plan_output import passed_rows
from stretto.cost.head_costs import HeadCosts
from stretto.nn.batch import as_tuple
from stretto.plan import search
from stretto.settings.runs import TrainSettings
from stretto.study.model_costs import CostRequest, costed


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_layers_that_pass_on_several_tensors_have_costs_and_heads(depth):
    data = {"limit": 100, "examples": 100}
    found = costed(
        TrainSettings(
            model="encoder-decoder", model_options={"depth": depth, "width": 16}, data="number-words", data_options=data
        )
    )
    assert len(found.layers) == 2 * depth
    assert len(found.heads["auto"].rows) == 2 * depth
    assert all(row.forward for row in found.costs.layers[: 2 * depth])
    assert found.sides == (0,) * 2 * depth


REASONS = {
    "pooled": "goes [N, C, ...] -> [N, K]",
    "mlp": "unknown head 'mlp'",
    "solo": "goes [N, T, d] -> [N, T, V]",
    "segprop(layers=9)": "has 2 layers between its first layer and its output layer",
}


@pytest.fixture(scope="module")
def mlp():
    requested = TrainSettings(model="mlp", model_options={"depth": 3, "width": 8}, data="digits", optimizer="sgd")
    return costed(requested, CostRequest(heads=("auto", "two-layer(width=100)", *REASONS)))


@pytest.mark.parametrize(("head", "said"), REASONS.items())
def test_why_a_head_has_no_price(mlp, head, said):
    assert {*mlp.heads} == {"auto", "two-layer(width=100)"}
    assert said in mlp.no_heads[head]


def test_a_named_head_has_its_own_price(mlp):
    auto, wide = (costs.rows[1] for costs in mlp.heads.values())
    assert auto.parameters == 8 * 10 + 10
    assert wide.parameters > 100 * 10
    methods = {"methods": ("greedy", "greedy(head=wide)"), "named_heads": {"wide": HeadCosts(rows=(wide,) * 7)}}
    problem = linear_problem([True] * 7, "greedy").but(**methods)
    assert problem.heads_of("greedy(head=wide)").rows[0].parameters == wide.parameters
    told = {name: search(problem.but(methods=(name,))).best.formula for name in problem.names}
    assert told["greedy(head=wide)"] != told["greedy"]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """What a chain with so many skips costs."""
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return cache(
        lambda skips: costed(TrainSettings(model=f"{file}:build", model_options={"skips": skips}, optimizer="sgd"))
    )


def test_a_single_piece_and_a_model_without_data_say_why_they_have_no_heads(own):
    assert "add --data path/to/file.py:function" in own(0).no_heads["auto"]


class Branching(nn.Module):
    """Skips over several pieces, which cross; a second output that is made early; a mask that all blocks read."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(6, 6) for _ in range(5))

    def forward(self, tokens):
        mask = (tokens > 0).unsqueeze(-1)
        a = torch.relu(self.a(self.embed(tokens))) * mask
        b = torch.relu(self.b(a)) * mask
        c = torch.relu(self.c(b) + a) * mask
        d = torch.relu(self.d(c) + b) * mask
        return self.e(d) + a, b.mean((1, 2))


def branching():
    torch.manual_seed(0)
    return Branching(), torch.ones(4, 3, dtype=torch.long)


@pytest.fixture(scope="module")
def branched():
    """What is priced of it, the network itself and its input."""
    return costed(TrainSettings(model=f"{__file__}:branching", optimizer="sgd")), *branching()


def test_messages_between_stages_have_every_tensor_that_passes(branched):
    """The outputs of real stages, one for every piece, are what is priced between them."""
    found, model, x = branched
    stages, given, several = stretto.split(model, [*found.positions], example=x), (x,), 0
    for cut, stage in enumerate(stages[:-1], 1):
        given = as_tuple(stage(*given))
        assert_priced(found, cut, given, x)
        several += len(given) > 2
    torch.testing.assert_close(stages[-1](*given), model(x))
    assert several
    assert found.passed([0, len(found.layers)]) == []


@pytest.mark.slow
def test_messages_between_two_stages_have_every_tensor_that_passes(branched):
    """However they are cut: behind every piece."""
    found, model, x = branched
    for cut in range(1, len(found.layers)):
        lower, upper = stretto.split(model, [0, found.positions[cut], found.positions[-1]], example=x)
        passed = as_tuple(lower(x))
        assert_priced(found, cut, passed, x)
        torch.testing.assert_close(upper(*passed), model(x))


def assert_priced(found, cut, passed, x):
    """The tensors that pass behind a piece are those of the table of costs."""
    sent = sum(tensor.numel() * tensor.element_size() for tensor in passed)
    assert found.costs.layers[cut - 1].output.at(len(x)) == found.costs.layers[cut].input.at(len(x)) == sent
    assert found.passed([0, cut, len(found.layers)]) == [{"tensors": len(passed), "bytes_per_example": sent / len(x)}]


def test_a_plan_says_where_a_model_is_no_chain():
    chain, branches = {"tensors": 1, "bytes_per_example": 32.0}, {"tensors": 3, "bytes_per_example": 96.0}
    assert passed_rows([chain, chain]) == passed_rows([]) == []
    ((title, words),) = passed_rows([chain, branches])
    assert title == "between stages"
    assert words.startswith("1 tensor of 32 B an example, 3 tensors of 96 B an example: branches pass through")


@pytest.mark.parametrize("skips", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_chain_passes_one_tensor_and_each_skip_one_more(own, skips):
    found = own(skips)
    assert found.tensors[2] == 1 + skips
    assert found.costs.layers[2].output.each == (1 + skips) * 8 * 4


OWN = """
import torch
from torch import nn

class Skips(nn.Module):
    def __init__(self, skips):
        super().__init__()
        self.layers, self.skips = nn.ModuleList(nn.Linear(8, 8) for _ in range(5)), skips

    def forward(self, x):
        seen = []
        for layer in self.layers:
            x = torch.relu(layer(x))
            seen.append(x)
        return x + sum(seen[: self.skips])

def build(skips=0):
    return Skips(skips), torch.zeros(4, 8)
"""
