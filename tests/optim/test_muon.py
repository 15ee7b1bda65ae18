"""Muon beside AdamW: which parameter goes where, the numbers of both by hand, and what is refused."""

import math
from copy import deepcopy

import pytest
import torch
from torch import nn

import stretto
from stretto.optim import CombinedOptimizer, Label, labels_of, muon
from stretto.optim.muon_with_adamw import orthogonalised

LR, MOMENTUM, DECAY = 0.03, 0.9, 0.1


class Network(nn.Module):
    """Every kind of parameter that goes another way, with the output layer assigned last."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.token = nn.Embedding(11, 6)
        self.position = nn.Parameter(torch.randn(5, 6))
        self.norm = nn.LayerNorm(6)
        self.wide = nn.Linear(6, 9)
        self.tall = nn.Linear(9, 6, bias=False)
        self.kernel = nn.Conv1d(6, 6, 3, padding=1)
        self.score = nn.Linear(6, 11)
        if tied:
            self.score.weight = self.token.weight

    def forward(self, tokens):
        x = self.norm(self.token(tokens) + self.position)
        x = x + self.tall(torch.tanh(self.wide(x)))
        return self.score(x + self.kernel(x.transpose(1, 2)).transpose(1, 2)).flatten(0, 1)


def network(**options):
    torch.manual_seed(0)
    return Network(**options).double()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(11, (4, 5), generator=generator), torch.randint(11, (20,), generator=generator)


def newton_schulz(matrix):
    """Keller Jordan's iteration in bfloat16, as written in torch's documentation."""
    x = matrix.bfloat16()
    x = x.mT if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.mT
        b = torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, b, x, beta=3.4445)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


class ByHand:
    """Both rules for plain tensors, equation by equation, with a rate that may change."""

    def __init__(self, model, hidden):
        self.model, self.hidden, self.count, self.averages = model, hidden, 0, {}

    @torch.no_grad()
    def step(self, lr):
        self.count += 1
        for name, w in self.model.named_parameters():
            g = w.grad
            m, v = self.averages.get(name, (torch.zeros_like(w), torch.zeros_like(w)))
            if name in self.hidden:
                m = MOMENTUM * m + (1 - MOMENTUM) * g
                step = newton_schulz((1 - MOMENTUM) * g + MOMENTUM * m).double() * 0.2 * math.sqrt(max(w.shape))
            else:
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
                step = m / (1 - 0.9**self.count) / (torch.sqrt(v / (1 - 0.999**self.count)) + 1e-8)
            self.averages[name] = m, v
            w.copy_(w - lr * DECAY * w - lr * step)


def train_by_hand(model, hidden, rates):
    hand = ByHand(model, hidden)
    for seed, rate in enumerate(rates):
        tokens, targets = batch(seed)
        model.zero_grad()
        nn.functional.cross_entropy(model(tokens), targets).backward()
        hand.step(rate)
    return {name: p.detach() for name, p in model.named_parameters()}


def options(**more):
    return {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, **more}


def test_which_parameter_is_for_what():
    roles = {label.name: label.role for label in labels_of(network())}
    assert {name for name, role in roles.items() if role == "embedding"} == {"token.weight", "position"}
    assert {name for name, role in roles.items() if role == "output"} == {"score.weight", "score.bias"}
    assert {label.name: label.role for label in labels_of(network(tied=True))}["token.weight"] == "embedding"
    assert {label.name: label.module for label in labels_of(network())}["wide.weight"] == "Linear"


@pytest.mark.parametrize("tied", [False, True])
def test_both_rules_are_those_by_hand(tied):
    model, rates = network(tied=tied), [0.01, 0.02, 0.03, 0.01, 0.005]
    expected = train_by_hand(network(tied=tied), {"wide.weight", "tall.weight"}, rates)
    optimizer = muon(model.parameters(), labels=labels_of(model), **options())
    assert [group["rule"] for group in optimizer.param_groups] == ["Muon", "AdamW"]
    for seed, rate in enumerate(rates):
        tokens, targets = batch(seed)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), targets).backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-10)


def test_excluding_is_labelling():
    labelled, excluding, one = network(), network(), network()
    made = [
        muon(labelled.parameters(), labels=labels_of(labelled), **options()),
        muon(excluding.named_parameters(), exclude=["token", "position", "score"], **options()),
        muon(one.parameters(), exclude=[one.token.weight, one.position, one.score.weight], **options()),
    ]
    for model, optimizer in zip((labelled, excluding, one), made, strict=True):
        tokens, targets = batch(0)
        nn.functional.cross_entropy(model(tokens), targets).backward()
        optimizer.step()
    for parameters in zip(labelled.parameters(), excluding.parameters(), one.parameters(), strict=True):
        assert all(torch.equal(parameters[0], other) for other in parameters[1:])


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (7, 7), (1, 6)])
def test_orthogonalised_is_torchs_to_the_last_bit(shape):
    weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    before, ahead = weight.detach().clone(), weight.grad.lerp(weight.grad * 0.05, 0.95)
    optimizer = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn="original")
    optimizer.step()
    step = orthogonalised(ahead, (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert torch.equal(weight, before.add(step, alpha=-math.sqrt(max(1, shape[0] / shape[1]))))


def test_its_state_goes_on_and_other_rules_are_refused():
    model = network()
    optimizer = muon(model.parameters(), labels=labels_of(model), **options())
    tokens, targets = batch(0)
    nn.functional.cross_entropy(model(tokens), targets).backward()
    optimizer.step()
    other = network()
    other.load_state_dict(model.state_dict())
    copy = muon(other.parameters(), labels=labels_of(other), **options())
    copy.load_state_dict(deepcopy(optimizer.state_dict()))  # torch shares tensors otherwise
    for net, made in ((model, optimizer), (other, copy)):
        made.zero_grad()
        nn.functional.cross_entropy(net(tokens), targets).backward()
        made.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    state = optimizer.state_dict()
    state["param_groups"].reverse()
    with pytest.raises(ValueError, match=r"groups of the rules \['AdamW', 'Muon'\]"):
        copy.load_state_dict(state)


def test_schedulers_set_the_rates_of_all_groups():
    model = network()
    optimizer = muon(model.parameters(), labels=labels_of(model), **options())
    schedule = stretto.optim.warmup(4)(optimizer)
    assert isinstance(optimizer, CombinedOptimizer)
    seen = []
    for _ in range(3):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert seen == [[pytest.approx(LR * k / 4)] * 2 for k in (1, 2, 3)]


LAYER = nn.Linear(3, 3)
PAIRS = list(LAYER.named_parameters())


@pytest.mark.parametrize(
    ("params", "given", "message"),
    [
        (PAIRS, {}, r"which of 1 matrices belong to hidden layers .* give labels="),
        (PAIRS, {"exclude": ["weigth"]}, r"exclude='weigth' names no parameter: did you mean 'weight'"),
        (LAYER.parameters(), {"exclude": ["weight"]}, r"names no parameter: give \(name, parameter\) pairs"),
        (PAIRS, {"exclude": [torch.ones(2)]}, "none of the parameters that muon was given"),
        (PAIRS, {"exclude": "weight"}, r"give a list, exclude=\['weight'\]"),
        (PAIRS, {"exclude": ["weight"]}, "none of 2 parameters is a matrix of a hidden layer"),
        ([("bias", LAYER.bias)], {"exclude": []}, r"none of 1 parameters .* \(0 are matrices"),
        (PAIRS, {"labels": ["hidden", "hidden"]}, r"labels\[0\]='hidden' is no stretto.optim.Label"),
        (PAIRS, {"labels": [Label("weight", "Linear")]}, "1 labels for 2 parameters"),
        (PAIRS, {"labels": labels_of(LAYER)[::-1]}, "the label of bias is of a parameter of 1 dims"),
        (PAIRS, {"labels": labels_of(LAYER), "exclude": []}, "give one of them"),
        ([], {"exclude": []}, "empty list of parameters"),
        ([3], {"exclude": []}, "not int"),
        (PAIRS, {"exclude": [], "lr": -1.0}, "lr=-1.0: choose a value"),
        (PAIRS, {"exclude": [], "adjust_lr_fn": "moonshot"}, "adjust_lr_fn='moonshot'"),
    ],
)  # fmt: skip
def test_mistakes(params, given, message):
    with pytest.raises(stretto.UsageError, match=message):
        muon(params, **given)


def test_an_unknown_role():
    with pytest.raises(stretto.UsageError, match="role='hiden'"):
        Label("0.weight", "Linear", "hiden")
