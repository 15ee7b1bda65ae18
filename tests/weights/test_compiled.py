"""Stages that the user compiled: right where the weights of a backward can be guaranteed, refused by name elsewhere."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from pairwise import in_turn, slow_where
from stretto.doctor.model_check import survey
from stretto.errors import UsageError
from stretto.measure import layer_costs
from stretto.nn.flop_counter import counting

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
STEPS = 10


class Block(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(a, b), nn.LayerNorm(b), nn.Linear(b, b)

    def forward(self, x):
        return self.out(self.norm(self.into(x)).tanh())


@pytest.fixture(scope="module")
def compiled():
    """Runs the graphs of forward and backward as they are, and notes them: quicker than a compiler, as strict.

    What one test has had compiled serves the others, whose blocks are alike. torch's compiler is imported here: that
    takes a second, which processes that only collect this file can spare.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    made, ran = [], []

    def compiler(graph, _):
        made.append(graph)

        def run(*inputs):
            ran.append(graph)
            return graph.forward(*inputs)

        return make_boxed_func(run)

    backend = aot_autograd(fw_compiler=compiler)
    backend.made, backend.ran = made, ran
    yield backend
    torch._dynamo.reset()


@pytest.fixture
def backend(compiled):
    compiled.ran.clear()
    return compiled


def blocks():
    torch.manual_seed(0)
    return [Block(6, 5), Block(5, 5), Block(5, 4)]


def batches():
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=g), torch.randint(4, (8,), generator=g)) for _ in range(STEPS)]


def make(method, stages=None, **options):
    options = {"example": batches()[0][0], **options}
    return stretto.Trainer(blocks() if stages is None else stages, cross_entropy, SGD, method, **options)


def train(trainer, data):
    losses = [trainer.step(x, y) for x, y in data]
    return [loss for loss in losses if loss is not None] + trainer.flush()


def assert_same(trainer, plain):
    found = {key.replace("_orig_mod.", ""): value for key, value in trainer.gather().items()}
    wanted = plain.gather()
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


GUARANTEED = ["backprop", "1f1b", "gpipe", "pipedream", "pipedream-2bw", "pb(stash=True)", "greedy", "overlapping",
              "pb(predict=weight, stash=True)"]  # fmt: skip


QUICK = ("1f1b", "pipedream-2bw", "overlapping", "pb(predict=weight, stash=True)")


@pytest.mark.parametrize("method", slow_where(lambda method: method not in QUICK, GUARANTEED))
def test_one_compiled_stage_among_others(method, backend):
    if method == "overlapping":  # two backwards: a graph that was compiled for one lets go of what it needs
        torch._dynamo.reset()
    plain, stages = make(method), blocks()
    stages[1] = torch.compile(stages[1], backend=backend)
    trainer = make(method, stages)
    data = batches()
    assert train(trainer, data[:5]) == pytest.approx(train(plain, data[:5]), rel=1e-5)
    graphs = len(backend.made)
    assert len(backend.ran) >= 2 * 5
    assert train(trainer, data[5:]) == pytest.approx(train(plain, data[5:]), rel=1e-5)
    assert len(backend.made) == graphs, "compiled anew for other versions of the weights"
    assert len(backend.ran) >= 2 * STEPS, "not compiled any more"
    assert_same(trainer, plain)
    assert trainer.evaluate(data)["loss"] == pytest.approx(plain.evaluate(data)["loss"], rel=1e-5)


def in_place(stage, backend):
    stage.compile(backend=backend)
    return stage


def partly(stage, backend):
    stage.into = torch.compile(stage.into, backend=backend)
    return stage


WAYS = {"whole": lambda stage, backend: torch.compile(stage, backend=backend), "in place": in_place, "partly": partly}


@pytest.mark.parametrize(
    ("method", "way"), in_turn(["pb", "pb-lwp", "spectrain", "pipemare", "paci"], list(WAYS), rounds=3, slow=2)
)
def test_refused_where_a_backward_sees_other_weights(method, way, backend):
    stages = blocks()
    stages[1] = WAYS[way](stages[1], backend)
    message = rf"method {method} cannot train stage 1 .*it is compiled.*leave it uncompiled, or .*pb\(stash=True\)"
    with pytest.raises(UsageError, match=message):
        make(method, stages, example=None)
    assert not backend.ran


def test_the_last_stage_has_no_delay_and_may_be_compiled(backend):
    plain, stages = make("pb"), blocks()
    stages[2] = torch.compile(stages[2], backend=backend)
    trainer = make("pb", stages)
    assert train(trainer, batches()) == pytest.approx(train(plain, batches()), rel=1e-5)
    assert backend.ran


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_and_gather_have_the_models_own_keys(way, backend, tmp_path):
    data = batches()

    def fresh(seed):
        stages = blocks()
        stages[0] = WAYS[way](stages[0], backend)
        trainer = make("pipedream", stages)
        if seed:
            for p in trainer.model.parameters():
                p.data.zero_()
        return trainer

    one, other = fresh(0), fresh(1)
    train(one, data[:4])
    one.save(tmp_path / "run.pt")
    other.load(tmp_path / "run.pt")
    assert train(one, data[4:]) == train(other, data[4:])
    assert one.gather().keys() == one.model.state_dict().keys()
    keys = [key for key in one.gather() if "_orig_mod" in key]
    assert {key.replace("_orig_mod.", "") for key in keys} == {
        "whole": {key for key in make("pipedream").gather() if key.startswith("0.")},
        "in place": set(),
        "partly": {"0.into.weight", "0.into.bias"},
    }[way]


@pytest.mark.parametrize("method", ["zb-h1", pytest.param("overlapping", marks=pytest.mark.slow)])
def test_a_backward_in_two_halves_wants_buffers_that_are_not_donated(method, backend):
    """torch refuses to run a compiled graph twice otherwise, and says so; its W then repeats its I."""
    plain, stages = make(method), blocks()
    stages[1] = torch.compile(stages[1], backend=backend)
    with torch._functorch.config.patch(donated_buffer=False):
        trainer = make(method, stages)
        assert train(trainer, batches()) == pytest.approx(train(plain, batches()), rel=1e-5)
    assert_same(trainer, plain)


def counted(stage, x):
    with counting():
        stage(x)


MEASURES = {
    "doctor": lambda stage, x: survey(stage, (x,)),
    "FLOPs": counted,
    "layers": lambda stage, x: layer_costs([stage], x),
}


@pytest.mark.parametrize("measure", MEASURES)
def test_what_was_measured_first_is_compiled_afterwards(measure, backend):
    """Up to torch 2.13, torch.compile gives up for good on what first ran under a dispatch mode."""
    torch._dynamo.reset()
    stage, x = torch.compile(blocks()[0], backend=backend), batches()[0][0]
    MEASURES[measure](stage, x)
    assert not backend.ran
    stage(x)
    assert backend.ran


def test_stages_of_a_split_model(backend):
    ends = [*blocks()[:1], Block(5, 4)]
    model, plain = nn.Sequential(*copy.deepcopy(ends)), make("pipedream", ends)
    stages = [torch.compile(stage, backend=backend) for stage in stretto.split(model, 2, example=batches()[0][0])]
    trainer = make("pipedream", stages)
    assert train(trainer, batches()) == pytest.approx(train(plain, batches()), rel=1e-5)
    assert {key for key, _ in model.named_parameters()} == set(plain.gather())
    for key, value in plain.gather().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-5, atol=1e-6)
