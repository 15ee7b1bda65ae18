"""What `stretto doctor --model` finds, by module and by mechanism, under the names of the user's own model."""

import pytest
import torch
from torch import nn

import stretto
from stretto.doctor.model_check import MECHANISMS, Remark, cut, diagnose, methods_of
from stretto.errors import UsageError
from stretto.methods import METHODS


def weight_norm(width=8):
    return nn.utils.parametrizations.weight_norm(nn.Linear(width, width))


class Net(nn.Module):
    """Blocks with something before and after them."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), weight_norm(), nn.Linear(8, 8)])
        self.leave = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.leave(x)


EXAMPLE = torch.randn(4, 8)


def look(model, example=EXAMPLE, stages=None, path=None):
    return diagnose(model, cut(model, stages, path, example), example)


def verdicts(found):
    return {each.name: (each.live, each.predicted, each.stash) for each in found.modules}


GOOD, COPIED, AGAIN = (True, True, True), (False, False, True), (False, False, False)


def test_every_layer_of_a_sequential_is_a_stage():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), weight_norm()), nn.Linear(8, 2))
    found = look(model)
    assert found.num_stages == 3
    assert verdicts(found) == {"0": GOOD, "1.1": COPIED, "2": GOOD}
    assert [(each.stage, each.kind, each.parameters) for each in found.modules] == [
        (0, "Linear", 72), (1, "ParametrizedLinear", 80), (2, "Linear", 18),
    ]  # fmt: skip
    (why,) = found.objections
    assert (why.module, why.kind, why.mechanisms) == ("1.1", "ParametrizedLinear", ("live", "predicted"))
    assert "weight_norm" in why.reason
    assert "stash" in why.remedy
    assert found.example == "[4, 8] float32"
    assert not found.to_json()["ok"]


@pytest.mark.parametrize(("stages", "path"), [(None, None), (2, "blocks"), (3, "blocks")])
def test_names_are_those_of_the_users_model_however_it_is_cut(stages, path):
    found = look(Net(), stages=stages, path=path)
    assert found.num_stages == (stages or 1)
    assert verdicts(found) == {
        "enter": GOOD, "blocks.0": GOOD, "blocks.1": COPIED, "blocks.2": GOOD, "leave": GOOD,
    }  # fmt: skip
    assert [why.module for why in found.objections] == ["blocks.1"]


def test_what_is_said_of_a_module_is_said_of_its_parts():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False)

    found = look(nn.Sequential(nn.Linear(8, 8), Checkpointed()))
    assert verdicts(found) == {"0": GOOD, "1.part.0": AGAIN, "1.part.2": AGAIN}
    assert {why.mechanisms for why in found.objections} == {MECHANISMS}


def test_a_trainer_refuses_what_is_listed_and_takes_what_is_not():
    target = torch.zeros(4, 8)
    for model in (nn.Sequential(nn.Linear(8, 8), weight_norm()), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))):
        found = verdicts(look(model))["1"]
        for mechanism, method in zip(MECHANISMS, ("pb", "spectrain", "pipedream"), strict=True):
            stages = [model, nn.Identity()]  # a stage with delay
            trainer = stretto.Trainer(
                stages, nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), method, device="cpu"
            )
            sure = found[MECHANISMS.index(mechanism)]
            if sure:
                trainer.step(EXAMPLE, target)
            else:
                with pytest.raises(UsageError, match="weight_norm"):
                    trainer.step(EXAMPLE, target)


def test_every_method_is_listed_once_or_needs_nothing():
    listed = [name for names in methods_of().values() for name in names]
    assert len(listed) == len(set(listed))
    nothing = {name for name in METHODS if name not in listed}
    assert {"backprop", "gpipe", "1f1b", "zb-v", "greedy", "chunked", "overlapping"} <= nothing
    assert {"pb", "paci"} <= set(methods_of()["live"])
    assert {"pb-lwp", "spectrain", "pipemare"} <= set(methods_of()["predicted"])
    assert {"pipedream", "pipedream-2bw", "nesterov", "pb(stash=True)"} <= set(methods_of()["stash"])
    for name in nothing:
        assert set(stretto.method(name).versions(stretto.method(name).plan(4)[0])) == {1}


def test_what_else_to_mind():
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(8)), nn.Dropout(), nn.Linear(8, 8)
    )
    found = look(model)
    assert [(each.module, each.kind) for each in found.remarks] == [("1.1", "BatchNorm1d"), ("1.0", "ReLU")]
    assert "GroupNorm" in found.remarks[0].remark
    assert "inplace=False" in found.remarks[1].remark
    assert found.objections == ()
    assert model[1][1].num_batches_tracked == 0


def test_tied_weights():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert look(model).remarks == ()
    model[2].weight = model[0].weight
    assert look(model, stages=1).remarks == ()
    (remark,) = look(model).remarks
    assert isinstance(remark, Remark)
    assert remark.kind == "Parameter [8, 8]"
    assert "shared by stages 0, 2" in remark.remark
    assert [(each.parameters, each.tied) for each in look(model).modules] == [(72, 0), (72, 0), (72, 64)]


def test_a_stage_that_changes_its_input_is_none_for_any_method():
    class Begins(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x.mul_(2))

    found = look(nn.Sequential(nn.Linear(8, 8), Begins()))
    assert verdicts(found) == {"0": GOOD, "1.layer": AGAIN}
    assert "changes its input in place" in found.objections[-1].reason


def test_stages_that_do_not_fit():
    with pytest.raises(UsageError, match=r"stage 1 \(Linear\) cannot take what stage 0 gives"):
        look(nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 8)))
    with pytest.raises(UsageError, match="Ask for at most"):
        look(nn.Sequential(nn.Linear(8, 8)), stages=2)
    with pytest.raises(UsageError, match="say in how many stages, too"):
        look(Net(), path="blocks")


def test_the_last_stage_may_return_anything():
    class Named(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x), "more": [x, None]}

    model = nn.Sequential(nn.Linear(4, 4), Named(4, 3))
    found = diagnose(model, list(model), torch.randn(2, 4))
    assert [(each.name, each.kind) for each in found.modules] == [("0", "Linear"), ("1", "Named")]
    with pytest.raises(UsageError, match=r"stage 0 \(Named\) returned dict"):
        diagnose(model, list(model)[::-1], torch.randn(2, 4))
