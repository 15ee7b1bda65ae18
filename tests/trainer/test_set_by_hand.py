"""Weights that are set by hand between steps: a plain loop goes on from them, and so does what has copies of them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto

REPLICAS = stretto.Mesh(data=2)


def stages(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    parts = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False).eval()), nn.Tanh(), nn.Linear(6, 3)]
    return [nn.Sequential(*parts[:2]).to(dtype), parts[2].to(dtype)]


def batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator).to(dtype), torch.randint(3, (8,), generator=generator)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@torch.no_grad()
def smaller(model):
    for parameter in model.parameters():
        parameter.clamp_(-0.3, 0.3)
    model[0][0][1].running_mean += 0.1


@torch.no_grad()
def loaded(model):
    for number, part in enumerate(stages(seed=7)):
        model[number].load_state_dict(part.state_dict())


def by_data(model):
    for parameter, value in zip(model.parameters(), nn.ModuleList(stages(seed=7)).parameters(), strict=True):
        parameter.data.copy_(value.data)


def plainly(changes, dtype=torch.float64, steps=4):
    """A loop on the same weights, changed in front of some steps."""
    model = nn.ModuleList(stages(dtype=dtype))
    optimizer = sgd(model.parameters())
    for step in range(steps):
        changes.get(step, lambda _: None)(model)
        x, y = batch(step, dtype)
        optimizer.zero_grad()
        cross_entropy(model[1](model[0](x)), y).backward()
        optimizer.step()
    return model


def trained(changes, method="backprop", dtype=torch.float64, steps=4, **options):
    given = stages(dtype=dtype)
    model = nn.ModuleList(given)
    trainer = stretto.Trainer(given, cross_entropy, sgd, method, **options)
    for step in range(steps):
        changes.get(step, lambda _: None)(model)
        trainer.step(*batch(step, dtype))
    trainer.flush()
    return model


def distance(model, other):
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((one.double() - two.double()).abs().max()) for one, two in pairs)


@pytest.mark.parametrize("change", [loaded, smaller])
@pytest.mark.parametrize(
    "options",
    [{}, {"mesh": REPLICAS}, {"mesh": REPLICAS, "sync": "shard-optimizer"}, {"method": "gpipe(microbatches=2)"}],
)
def test_a_step_goes_on_from_weights_set_by_hand(change, options):
    changes = {0: change, 2: change, 3: smaller}
    assert distance(trained(changes, **options), plainly(changes)) < 1e-12


@pytest.mark.parametrize("change", [loaded, smaller, by_data])
@pytest.mark.parametrize("options", [{}, {"mesh": REPLICAS}])
def test_float32_masters_follow_weights_set_by_hand(change, options):
    """Within what bfloat16 rounds; they were 0.6 off."""
    changes = {0: change} if change is by_data else {0: change, 2: smaller}
    if change is by_data and options:
        changes[0] = loaded  # memory written behind torch's back is looked at on one replica only
    ours = trained(changes, dtype=torch.float32, precision="bf16", **options)
    assert distance(ours, plainly(changes, torch.float32)) < 0.03


def test_masters_keep_what_was_not_changed():
    """A mask on some entries of a weight leaves the others their lost bits."""
    from stretto.optim import Masters

    weight = nn.Parameter(torch.tensor([0.1, 0.2, 0.3]).bfloat16())
    master = nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))
    masters = Masters({weight: master})
    masters.take_over()
    assert master.tolist() == torch.tensor([0.1, 0.2, 0.3]).tolist()
    with torch.no_grad():
        weight[1] = 0
    masters.take_over()
    assert master.tolist() == torch.tensor([0.1, 0.0, 0.3]).tolist()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "pipedream"}, "in flight that were computed with it: call flush"),
        ({"mesh": REPLICAS, "sync": "local-sgd(every=3)"}, "replicas differ between their meetings"),
        ({"mesh": REPLICAS, "sync": "diloco(every=3)"}, "replicas differ between their meetings"),
        ({"mesh": REPLICAS, "sync": "parameter-server(staleness=1)"}, "other copies of it train"),
    ],
)
def test_what_cannot_go_on_from_them_is_refused(options, said):
    with pytest.raises(stretto.UsageError, match=rf"^0\.0\.0\.weight was set by hand .*{said}"):
        trained({2: smaller}, **options)


@pytest.mark.parametrize("sync", ["local-sgd(every=3)", "diloco(every=3)"])
def test_replicas_that_meet_later_begin_with_weights_set_before_the_first_step(sync):
    """As if they had been set before the Trainer was made."""
    ours = trained({0: loaded}, mesh=REPLICAS, sync=sync)
    first = stages()
    loaded(nn.ModuleList(first))
    trainer = stretto.Trainer(first, cross_entropy, sgd, mesh=REPLICAS, sync=sync)
    for step in range(4):
        trainer.step(*batch(step))
    trainer.flush()
    assert distance(ours, nn.ModuleList(first)) == 0


@pytest.mark.parametrize("options", [{"method": "pipedream"}, {"mesh": REPLICAS}, {"precision": "bf16"}])
def test_another_parameter_in_its_place_is_refused(options):
    """No optimizer has it; stashed weights would put the former one back."""
    given = stages(dtype=torch.float32)
    trainer = stretto.Trainer(given, cross_entropy, sgd, **options)
    trainer.step(*batch(0, torch.float32))
    trainer.flush()
    given[1].weight = nn.Parameter(given[1].weight.detach().clone())
    with pytest.raises(stretto.UsageError, match=r"^1\.weight is another parameter since the last step"):
        trainer.step(*batch(1, torch.float32))


def test_after_a_flush_a_pipeline_goes_on_from_them():
    given = stages()
    model = nn.ModuleList(given)
    trainer = stretto.Trainer(given, cross_entropy, sgd, "pipedream")
    wanted = copy.deepcopy(model)
    optimizer = sgd(wanted.parameters())
    for step in range(3):
        for each in (model, wanted):
            smaller(each)
        trainer.step(*batch(step))
        trainer.flush()
        x, y = batch(step)
        optimizer.zero_grad()
        cross_entropy(wanted[1](wanted[0](x)), y).backward()
        optimizer.step()
    assert distance(model, wanted) < 1e-12


def test_an_evaluation_in_between_hides_nothing():
    given = stages()
    model = nn.ModuleList(given)
    trainer = stretto.Trainer(given, cross_entropy, sgd, mesh=REPLICAS)
    for step in range(3):
        smaller(model)
        trainer.evaluate([batch(9)])
        trainer.step(*batch(step))
    assert distance(model, plainly(dict.fromkeys(range(3), smaller), steps=3)) < 1e-12


def clamped_by_data(model):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


@pytest.mark.parametrize("options", [{"mesh": REPLICAS}, {"precision": "bf16"}], ids=str)
def test_what_leaves_no_trace_is_found_by_value_soon(options):
    """As in the first implementations of Wasserstein networks, after every step."""
    changes = dict.fromkeys(range(1, 5), clamped_by_data)
    with pytest.raises(stretto.UsageError, match=r"set by hand through \.data, which leaves no trace"):
        trained(changes, steps=5, dtype=torch.float32, **options)


def test_a_buffer_that_a_backward_needs_is_changed_after_a_flush():
    trainer = stretto.Trainer(stages(), cross_entropy, sgd, "pipedream")
    for step in range(2):
        trainer.step(*batch(step))
    trainer.model[0][0][1].running_var.add_(1)
    with pytest.raises(stretto.UsageError, match=r"call flush\(\) before"):
        trainer.step(*batch(2))


@pytest.mark.parametrize("options", [{"mesh": REPLICAS}, {"precision": "bf16"}])
def test_a_run_that_diverges_goes_on_as_a_plain_loop_does(options):
    trainer = stretto.Trainer(stages(dtype=torch.float32), cross_entropy, sgd, **options)
    for step in range(6):
        x, y = batch(step, torch.float32)
        trainer.step(x * float("nan") if step == 1 else x, y)
    assert torch.isnan(trainer.stages[1].weight).all()


def test_a_buffer_that_grows_between_steps_is_that_of_all_replicas():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("mask", torch.ones(2))

        def forward(self, x):
            if len(self.mask) < len(x):
                self.mask = torch.ones(len(x))
            return self.linear(x) * self.mask[: len(x), None]

    given = [Masked().double(), stages()[1]]
    trainer = stretto.Trainer(given, cross_entropy, sgd, mesh=REPLICAS)
    trainer.step(*batch(0))
    given[0](torch.ones(9, 6, dtype=torch.float64))
    trainer.step(*batch(1))
    assert len(given[0].mask) == 9
