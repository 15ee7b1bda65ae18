"""A loss with parameters is trained with the last stage: as one plain loop trains it, or refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import stretto
from pairwise import in_turn
from runtime.processes import launch
from runtime.trained_loss import STEPS, Weighted, batch, sgd, stages
from stretto import UsageError


class Counted(Weighted):
    """The same as a sum and a count."""

    def forward(self, output, target):
        return super().forward(output, target) * len(output), len(output)


def build(loss, method="1f1b(microbatches=3)", **options):
    return stretto.Trainer(stages(), loss, sgd, method, device="cpu", **options)


def plainly(kind, dtype=torch.float64, clip=None):
    model, loss = nn.Sequential(*stages(dtype)), kind().to(dtype)
    parameters = [*model.parameters(), *loss.parameters()]
    optimizer, values = sgd(parameters), []
    for step in range(STEPS):
        x, y = batch(step, dtype)
        optimizer.zero_grad()
        value = loss(model(x), y)
        value = value[0] / value[1] if isinstance(value, tuple) else value
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        values.append(value.item())
    return values, model, loss


SYNCHRONOUS = [
    "backprop", "gpipe(microbatches=3)", "1f1b(microbatches=3)", "zb-h1(microbatches=4)",
    "1f1b(microbatches=3, recompute=True)",
]  # fmt: skip
AXES = [(1, None), (2, None), (1, 0.3), (3, 0.3)]


@pytest.mark.parametrize(("method", "axes"), in_turn(SYNCHRONOUS, AXES), ids=str)
@pytest.mark.parametrize("kind", [Weighted, Counted])
def test_it_is_trained_as_in_plain_pytorch(kind, method, axes):
    data, clip = axes
    loss = kind().double()
    trainer = build(loss, method, mesh=stretto.Mesh(data=data), clip=clip)
    values, model, trained = plainly(kind, clip=clip)
    assert [trainer.step(*batch(step)) for step in range(STEPS)] == pytest.approx(values, abs=1e-10)
    assert loss.scale.item() == pytest.approx(trained.scale.item(), abs=1e-10)
    assert torch.allclose(loss.centers, trained.centers, atol=1e-10)
    assert loss.scale.item() != 0
    for one, other in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-10)
    evaluated = trainer.evaluate([batch(9)])["loss"]
    value = trained(model(batch(9)[0]), batch(9)[1])
    assert evaluated == pytest.approx((value[0] / value[1] if isinstance(value, tuple) else value).item(), abs=1e-10)


def test_it_has_a_label_a_name_and_a_place_in_checkpoints(tmp_path):
    loss = Weighted().double()
    trainer = build(loss)
    for step in range(2):
        trainer.step(*batch(step))
    gathered = trainer.gather()
    assert torch.equal(gathered["heads.2.loss.scale"], loss.scale)
    trainer.save(tmp_path / "saved")
    other = Weighted().double()
    resumed = build(other)
    resumed.load(tmp_path / "saved")
    assert torch.equal(other.scale, loss.scale)
    assert resumed.step(*batch(2)) == trainer.step(*batch(2))
    assert torch.equal(other.centers, loss.centers)


def test_rules_for_hidden_matrices_know_what_it_is_for():
    seen = {}

    def optimizer(params, labels):
        seen.update({label.name: label for label in labels})
        return sgd(params)

    stretto.Trainer(stages(), Weighted().double(), optimizer, "backprop")
    assert seen["heads.2.loss.centers"].module == "Weighted"
    assert seen["heads.2.loss.scale"].dims == 0


def test_it_stays_in_float32_under_bf16():
    loss = Weighted()
    trainer = build(loss, precision="bf16")
    values, _, trained = plainly(Weighted, torch.float32)
    told = [trainer.step(*batch(step, torch.float32)) for step in range(STEPS)]
    assert loss.scale.dtype == torch.float32
    assert loss.scale.item() == pytest.approx(trained.scale.item(), rel=0.03)
    assert told == pytest.approx(values, rel=0.03)


def test_asynchronous_methods_train_it_where_the_last_stage_has_no_delay():
    loss = Weighted().double()
    trainer = build(loss, "pb")
    before = copy.deepcopy(loss)
    for step in range(8):
        trainer.step(*batch(step))
    trainer.flush()
    assert not torch.equal(before.scale, loss.scale)


@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_on_processes_it_is_trained_where_the_last_stage_is(data):
    values, model, trained = plainly(Weighted)
    (told, gathered, evaluated), *others = launch(3 * data, "runtime.trained_loss:train", data)
    assert told == pytest.approx(values, abs=1e-10)
    assert gathered["heads.2.loss.scale"].item() == pytest.approx(trained.scale.item(), abs=1e-10)
    assert torch.allclose(gathered["2.1.weight"], model[2][1].weight, atol=1e-10)
    assert evaluated == pytest.approx(trained(model(batch(9)[0]), batch(9)[1]).item(), abs=1e-10)
    assert {other[2] for other in others} == {evaluated}


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("greedy", {"example": batch(0)[0]}, r"stages \[0, 1, 2\] all have a loss"),
        ("pipedream-2bw", {}, "no versions of the loss's are kept"),
        ("backprop", {"sync": "fully-shard", "mesh": stretto.Mesh(data=2)}, "several processes share the last stage"),
    ],
)
def test_where_it_cannot_be_trained_it_is_refused(method, options, message):
    with pytest.raises(UsageError, match=message):
        build(Weighted().double(), method, **options)


def test_what_a_function_closes_over_would_not_be_trained():
    loss, network = Weighted().double(), stages()
    with pytest.raises(UsageError, match=r"a gradient for a tensor \[\] that this stage does not have.*nn.Module"):
        build(lambda output, y: loss(output, y)).step(*batch(0))
    frozen = Weighted().double().requires_grad_(False)
    build(lambda output, y: frozen(output, y)).step(*batch(0))

    def decayed(stage):
        def loss(output, y):
            return mse_loss(output, y) + 0.1 * sum((each**2).sum() for each in network[stage].parameters())

        return stretto.Trainer(network, loss, sgd, "1f1b(microbatches=3)", device="cpu")

    with pytest.raises(UsageError, match=r"a gradient for a tensor \[8(, 4)?\] that this stage does not have"):
        decayed(0).step(*batch(0))
    decayed(2).step(*batch(0))


def test_cross_entropy_with_weights_is_not_one():
    loss = nn.CrossEntropyLoss(weight=torch.ones(3).double())
    trainer = build(loss)
    trainer.step(batch(0)[0], torch.arange(12) % 3)
    assert trainer.heads == [None] * 3
    assert trainer.evaluate([(batch(0)[0], torch.arange(12) % 3)])["loss"] == pytest.approx(
        cross_entropy(trainer.model(batch(0)[0]), torch.arange(12) % 3).item()
    )


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=torch.tensor([0.1, 2.0, 5.3])), nn.NLLLoss()])
def test_a_criterion_gets_float32_outputs_under_bf16(loss):
    torch.manual_seed(0)
    stages = [nn.Linear(4, 5), nn.Linear(5, 3)]
    model = nn.Sequential(*copy.deepcopy(stages)).bfloat16()
    trainer = stretto.Trainer(stages, loss, sgd, "gpipe(microbatches=2)", precision="bf16")
    x, y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    expected = loss(model(x.bfloat16()).float(), y).item()
    assert trainer.step(x, y) == pytest.approx(expected, rel=1e-5)


def test_the_options_of_a_criterion_are_those_it_has_now():
    """Deferred re-weighting: class weights that begin later, as in a plain loop."""
    results = []
    for cut in (True, False):
        torch.manual_seed(0)
        model, loss = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), nn.CrossEntropyLoss(label_smoothing=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = stretto.Trainer(
            list(model), loss, lambda params: torch.optim.SGD(params, lr=0.1), "gpipe(microbatches=2)"
        )
        for step in range(4):
            if step == 2:
                loss.weight, loss.label_smoothing = torch.tensor([1.0, 2.0, 5.0]), 0.0
            x, y = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)), torch.arange(6) % 3
            if cut:
                trainer.step(x, y)
            else:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    loss.reduction = "sum"
    with pytest.raises(stretto.UsageError, match="the loss has reduction='sum' now, and had 'mean'"):
        trainer.step(x, y)
