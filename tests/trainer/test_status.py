"""What a Trainer says of itself while it trains, and its outputs: optimizers, rates, updates, norms, predict, repr."""

import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from laws.networks import features, labels
from runtime import replicated, scripts
from runtime.processes import launch
from stretto.errors import UsageError
from stretto.nn.nested import tensors_of
from stretto.runtime.process_memory import CLEAR, forget_most_held

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
HALVED = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


def stages():
    torch.manual_seed(0)
    return [nn.Linear(6, 5).double(), nn.Tanh(), nn.Linear(5, 4).double()]


def make(method="backprop", optimizer=SGD, **options):
    if method.startswith("greedy"):
        options["example"] = batches(1)[0][0]
    return stretto.Trainer(stages(), cross_entropy, optimizer, method, device="cpu", **options)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [(features(generator, 8, 6), labels(generator, 8)) for _ in range(count)]


def whole_gradient(trainer, x, y):
    model = nn.Sequential(*stages())
    model.load_state_dict(trainer.model.state_dict())
    cross_entropy(model(x), y).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_optimizers_by_stage():
    trainer = make()
    first, none, last = trainer.optimizers
    assert none is None
    assert first.param_groups[0]["params"] == list(trainer.stages[0].parameters())
    assert last.param_groups[0]["params"] == list(trainer.stages[2].parameters())


@pytest.mark.parametrize("method", ["backprop", "pb", "greedy(head=linear)"])
def test_rates_and_updates_go_on_with_the_steps(method):
    trainer = make(method, scheduler=HALVED)
    assert trainer.lr[0] == trainer.lr[2] == 0.1
    assert trainer.updates == [0, 0, 0]
    for x, y in batches(4):
        trainer.step(x, y)
    trainer.flush()
    assert trainer.lr[0] == trainer.lr[2] == 0.025
    assert trainer.updates == [4, 4, 4]


def test_rates_of_groups():
    def two(params):
        return torch.optim.SGD([{"params": params[:1], "lr": 0.3}, {"params": params[1:]}], lr=0.2)

    assert make(optimizer=two).lr == [[0.3, 0.2], None, [0.3, 0.2]]


def test_rates_of_a_parameter_server_are_its_shards():
    sync = stretto.ParameterServer(staleness=1)
    trainer = make("pb", scheduler=HALVED, mesh=stretto.Mesh(data=2), sync=sync)
    for x, y in batches(4):
        trainer.step(x, y)
    trainer.flush()
    made = trainer.updates[0] * 2  # by both replicas
    assert trainer.lr[0] == 0.1 * 0.5 ** (made // 2)


def test_the_norm_is_that_of_the_whole_gradient_before_it_is_shrunk():
    (x, y), *_ = batches(1)
    for clip in (math.inf, 1e-3):
        trainer = make(clip=clip)
        assert trainer.grad_norm is None
        gradients = whole_gradient(trainer, x, y)
        trainer.step(x, y)
        expected = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        assert trainer.grad_norm == pytest.approx(expected, rel=1e-12)
    trainer = make()
    trainer.step(x, y)
    assert trainer.grad_norm is None


@pytest.mark.parametrize("method", ["backprop", "1f1b", "pb", "greedy(head=linear)"])
def test_a_norm_that_is_only_measured_changes_nothing(method):
    plain, measured = make(method), make(method, clip=math.inf)
    for x, y in batches(5):
        plain.step(x, y)
        measured.step(x, y)
    plain.flush()
    measured.flush()
    for one, other in zip(plain.model.parameters(), measured.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert measured.grad_norm > 0


# -- predict ----------------------------------------------------------------------------------------------------


def test_outputs_are_the_models():
    trainer = stretto.Trainer(scripts.stages(3), cross_entropy, SGD, "pb", example=scripts.batches(1)[0][0])
    data = scripts.batches(3)
    for x, y in data:
        trainer.step(x, y)
    assert trainer.stages[0].training
    before = trainer.stages[0][1].running_mean.clone()
    outputs = trainer.predict(x.numpy() if n == 1 else x for n, (x, _) in enumerate(data))
    assert trainer.stages[0].training
    assert torch.equal(before, trainer.stages[0][1].running_mean)
    model = trainer.model.eval()
    for (x, _), output in zip(data, outputs, strict=True):
        assert torch.equal(model(x), output)
        assert not output.requires_grad
    assert trainer.predict([]) == []


def test_outputs_under_bf16_are_float32():
    torch.manual_seed(0)
    trainer = stretto.Trainer([nn.Linear(6, 5), nn.Linear(5, 4)], cross_entropy, SGD, precision="bf16")
    (output,) = trainer.predict([torch.randn(3, 6)])
    assert output.dtype == torch.float32


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    states: list


def nested(x):
    return {
        "dict": {"a": x},
        "tuple in dict": {"a": (x, [x])},
        "list": [x, {"b": x}],
        "ordered": OrderedDict(a=x),
        "dataclass": Output(x, [x]),
        "dict of dataclasses": {"a": Output(x, [x])},
        "namespace": SimpleNamespace(logits=x, other=None),
    }


@pytest.mark.parametrize("kind", nested(None))
def test_the_loss_under_bf16_gets_float32_in_any_nesting(kind):
    class Last(nn.Linear):
        def forward(self, x):
            return nested(super().forward(x))[kind]

    def loss(output, y):
        outputs = tensors_of(output)
        assert type(output) is type(nested(None)[kind])
        assert {output.dtype for output in outputs} == {torch.float32}
        return cross_entropy(sum(outputs), y)

    trainer = stretto.Trainer([nn.Linear(6, 5), Last(5, 3)], loss, SGD, "1f1b(microbatches=2)", precision="bf16")
    before = trainer.stages[0].weight.clone()
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    trainer.step(x, y)
    assert not torch.equal(before, trainer.stages[0].weight)
    trainer.evaluate([(x, y)])


def test_outputs_of_several_tensors():
    class Two(nn.Module):
        def forward(self, x):
            return x, 2 * x

    trainer = stretto.Trainer(
        [nn.Linear(6, 5), Two()], lambda output, y: cross_entropy(output[0] + output[1], y), SGD, device="cpu"
    )
    ((one, other),) = trainer.predict([torch.randn(3, 6)])
    assert torch.equal(2 * one, other)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            torch.zeros(3, 6),
            r"predict: batches=Tensor \[3, 6\].*: give an iterable of batches of inputs, such as \[x\]",
        ),
        (np.zeros((3, 6)), "predict: batches=ndarray"),
        ([(torch.zeros(3, 6), torch.zeros(3))], r"cannot take batch 0, x .*TypeError.*predict\(x for x, y in loader\)"),
        ([torch.zeros(3, 6).double(), torch.zeros(3, 7).double()], r"cannot take batch 1, x Tensor \[3, 7\]"),
        (["text"], "predict: batch 0 is 'text'"),
        (7, "predict: batches=7"),
    ],
)
def test_what_predict_cannot_take(given, message):
    with pytest.raises(UsageError, match=message):
        make().predict(given)


@pytest.mark.parametrize(
    ("method", "precision"), [("pb", None), ("backprop", "bf16"), pytest.param("zb-v", None, marks=pytest.mark.slow)]
)
def test_processes_predict_the_same(method, precision):
    emulated, *_, norms, norm = scripts.predicted(method, precision, workers=2)
    first, other = launch(2, "runtime.scripts:predicted", method, precision)
    assert other[0] is None
    assert all(torch.equal(a, b) for a, b in zip(first[0], emulated, strict=True))
    for (_, updates, rates, text, norms_here, norm_here), rank in ((first, 0), (other, 1)):
        assert sorted(updates, key=str) == [6, 6, None, None]
        assert [rate is None for rate in rates] == [number is None for number in updates]
        assert f"2 processes, this is rank {rank}" in text
        assert norms_here == norms
        refused = f"own stages, {[2 * rank, 2 * rank + 1]}, since pb does not clip all stages together"
        assert refused in norm_here if method == "pb" else norm_here == norm == pytest.approx(math.hypot(*norms))


@pytest.mark.parametrize(
    ("processes", "sync"),
    [(4, "all-reduce"), (2, "fully-shard"), pytest.param(4, "fully-shard", marks=pytest.mark.slow)],
)
def test_the_first_replica_predicts(processes, sync):
    emulated = replicated.predicted("all-reduce", 2)
    first, *others = launch(processes, "runtime.replicated:predicted", sync, 2)
    assert others == [None] * (processes - 1)
    assert all(torch.equal(a, b) for a, b in zip(first, emulated, strict=True))


# -- repr -------------------------------------------------------------------------------------------------------


def test_what_it_says_of_itself():
    trainer = make("pb(predict=step)", workers=2)
    (x, y), *_ = batches(1)
    trainer.step(x, y)
    assert repr(trainer) == (
        "Trainer(pb(predict=step): 3 stages on 2 workers, one process, 59 parameters, cpu, 1 step done)"
    )


@pytest.mark.skipif(not CLEAR.exists(), reason="only Linux can forget a process's peak")
def test_peak_memory_is_the_most_that_was_held():
    trainer = make()
    forget_most_held()
    (before,) = trainer.peak_memory()
    held = torch.ones(2**23, dtype=torch.float64)
    (after,) = trainer.peak_memory()
    assert after > before + 0.9 * held.nbytes
    size = held.nbytes
    del held
    assert trainer.peak_memory() == [pytest.approx(after, rel=0.01)], "also when it is given back"
    forget_most_held()
    assert trainer.peak_memory()[0] < after - size / 2


def test_weights_are_written_a_file_a_stage(tmp_path):
    trainer = make("greedy")
    for x, y in batches(3):
        trainer.step(x, y)
    heads = trainer.write_weights(tmp_path / "model")
    gathered = trainer.gather()
    assert heads.keys() == {name for name in gathered if name.startswith("heads.")}
    assert all(torch.equal(value, gathered[name]) for name, value in heads.items())
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "0.weight": "model-00001-of-00003.safetensors", "0.bias": "model-00001-of-00003.safetensors",
        "2.weight": "model-00003-of-00003.safetensors", "2.bias": "model-00003-of-00003.safetensors",
    }  # fmt: skip
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in trainer.model.parameters())
    written = {name: load_file(tmp_path / "model" / file)[name] for name, file in index["weight_map"].items()}
    assert all(torch.equal(value, gathered[name]) for name, value in written.items())


def test_weights_that_are_tied_within_a_stage_are_written_under_each_name(tmp_path):
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stage[1].weight = stage[0].weight
    trainer = stretto.Trainer([stage], nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1), "backprop")
    trainer.write_weights(tmp_path)
    written, gathered = load_file(tmp_path / "model-00001-of-00001.safetensors"), trainer.gather()
    assert written.keys() == gathered.keys()
    assert torch.equal(written["0.1.weight"], gathered["0.0.weight"])


def test_weights_are_written_under_the_names_that_are_asked_for(tmp_path):
    trainer = make()
    trainer.write_weights(tmp_path, lambda name: None if name.endswith("bias") else f"net.{name}")
    written = load_file(tmp_path / "model-00001-of-00003.safetensors")
    assert written.keys() == {"net.0.weight"}
    with pytest.raises(UsageError, match="write_weights: folder"):
        trainer.write_weights(3)
