"""Muon in a Trainer: the loop by hand on one device, through ties, masters, schedules and checkpoints."""

import pytest
import torch
from torch import nn

import stretto
from optim.test_muon import DECAY, LR, MOMENTUM, Network, batch, network, train_by_hand
from stretto.optim import labels_of, muon
from stretto.optim.parameter_labels import stage_labels

STEPS, WARM, GPIPE = 6, 4, "gpipe(microbatches=1)"
RATES = [LR * min(step + 1, WARM) / WARM for step in range(STEPS)]
HIDDEN = {"wide.weight", "tall.weight"}


class Below(nn.Module):
    """The network up to its branch."""

    def __init__(self, whole):
        super().__init__()
        self.token, self.position, self.norm = whole.token, whole.position, whole.norm

    def forward(self, tokens):
        return self.norm(self.token(tokens) + self.position)


class Between(nn.Module):
    """The branch."""

    def __init__(self, whole):
        super().__init__()
        self.wide, self.tall = whole.wide, whole.tall

    def forward(self, x):
        return x + self.tall(torch.tanh(self.wide(x)))


class Above(nn.Module):
    """The rest."""

    def __init__(self, whole):
        super().__init__()
        self.kernel, self.score = whole.kernel, whole.score

    def forward(self, x):
        return self.score(x + self.kernel(x.transpose(1, 2)).transpose(1, 2)).flatten(0, 1)


def stages_of(model):
    return [Below(model), Between(model), Above(model)]


def loss(output, target):
    return nn.functional.cross_entropy(output, target.flatten())


def build(stages, method=GPIPE, **options):
    def optimizer(params, labels):
        return muon(params, LR, labels=labels, momentum=MOMENTUM, weight_decay=DECAY)

    return stretto.Trainer(stages, loss, optimizer, method, scheduler=stretto.optim.warmup(WARM), **options)


def steps(trainer, first=0, last=STEPS):
    for seed in range(first, last):
        tokens, targets = batch(seed)
        trainer.step(tokens, targets.view(4, 5))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cut", [1, 3])
def test_a_pipeline_is_the_loop_by_hand(tied, cut):
    expected = train_by_hand(network(tied=tied), HIDDEN, RATES)
    model = network(tied=tied)
    steps(build(stages_of(model) if cut == 3 else [model]))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-10)


def test_stages_are_labelled_as_the_whole_model():
    for tied in (False, True):
        model = network(tied=tied)
        whole = {id(p): label.role for p, label in zip(model.parameters(), labels_of(model), strict=True)}
        stages = stages_of(model)
        for name, label in stage_labels(stages).items():
            index, _, path = name.partition(".")
            assert label.role == whole[id(stages[int(index)].get_parameter(path))], name
    without = stage_labels([*stages_of(network()), nn.Softmax(1)])  # a last stage without weights
    assert without["2.score.bias"].role == "output"


def test_heads_have_outputs_of_their_own():
    torch.manual_seed(0)
    stages = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)]
    heads = [nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), nn.Linear(6, 3), None]
    seen = {}

    def optimizer(params, labels):
        seen.update({label.name: label.role for label in labels})
        return muon(params, labels=labels)

    stretto.Trainer(stages, nn.functional.cross_entropy, optimizer, "greedy", heads=heads)
    output = {name for name, role in seen.items() if role == "output"}
    layers = ("2", "heads.0.2", "heads.1")
    assert output == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    assert seen["heads.0.0.weight"] == "hidden"


def test_masters_are_stepped_by_the_rule_of_their_parameter():
    trainer = build(stages_of(network()), precision="bf16")
    steps(trainer)
    groups = trainer.optimizers[1].param_groups
    assert [(group["rule"], [list(p.shape) for p in group["params"]]) for group in groups] == [
        ("Muon", [[9, 6], [6, 9]]), ("AdamW", [[9]]),
    ]  # fmt: skip
    assert all(p.dtype == torch.float32 for group in groups for p in group["params"])


@pytest.mark.parametrize(("method", "options"), [("pb(predict=weight)", {}), ("pipedream", {"precision": "bf16"})])
def test_it_goes_on_from_a_checkpoint_to_the_bit(tmp_path, method, options):
    through, half, rest = (build(stages_of(network()), method, **options) for _ in range(3))
    steps(through, 0, 3)
    through.flush()
    steps(through, 3)
    through.flush()
    steps(half, 0, 3)
    half.save(tmp_path / "half")
    rest.load(tmp_path / "half")
    steps(rest, 3)
    rest.flush()
    wanted, found = through.gather(), rest.gather()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_checkpoint_of_other_rules_is_refused(tmp_path):
    trainer = build([network()])
    trainer.save(tmp_path / "muon")

    def swapped(params, labels):
        made = muon(params, LR, labels=labels)
        made.param_groups.reverse()
        return made

    other = stretto.Trainer([network()], loss, swapped, GPIPE, scheduler=stretto.optim.warmup(WARM))
    with pytest.raises(stretto.UsageError, match="groups"):
        other.load(tmp_path / "muon")


def test_a_network_without_hidden_matrices_is_refused():
    with pytest.raises(stretto.UsageError, match=r"no stage has a matrix of a hidden layer.*torch.optim.AdamW"):
        stretto.Trainer([nn.Linear(4, 3)], nn.functional.cross_entropy, muon)


def test_parameter_servers_step_whole_matrices():
    trainer = build([network()], "backprop", mesh=stretto.Mesh(data=2), sync="parameter-server(staleness=1)")
    steps(trainer, 0, 2)
    trainer.flush()
    assert isinstance(trainer.stages[0], Network)
