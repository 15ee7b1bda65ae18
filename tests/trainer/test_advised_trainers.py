"""A Trainer that was asked for "async" or "local": what its refusals say, and which checkpoints it takes."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import stretto
from stretto.errors import UsageError
from stretto.methods import findings
from stretto.methods.table import with_fewer


def stages(count):
    torch.manual_seed(0)
    return [nn.Linear(3, 3) for _ in range(count)]


def trainer(method, count=4, optimizer=torch.optim.AdamW, **options):
    return stretto.Trainer(stages(count), nn.functional.mse_loss, optimizer, method, device="cpu", **options)


def advise(monkeypatch, method):
    """From here on this method is what "async" stands for, whatever the optimizer and the stages."""
    found = next(each for each in findings.findings() if each.advice == "async")
    sooner = replace(found, method=method, optimizer="adamw", ratio=0.1, low=0.1, high=0.1, error=0.01)
    monkeypatch.setattr(findings, "findings", lambda: (sooner,))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (
            "pipedream(rotate=True)",
            {"sync": "fully-shard", "mesh": stretto.Mesh(data=2)},
            "works with several versions",
        ),
        ("pipedream(rotate=True)", {"optimizer": lambda p: torch.optim.AdamW(p, amsgrad=True)}, "amsgrad=True"),
        ("pb", {"precision": "bf16-autocast"}, "bf16-autocast"),
        ("pipedream", {"heads": [None]}, "heads has 1 entries for 4 stages"),
    ],
)
def test_refusals_say_what_the_word_stands_for(monkeypatch, method, options, message):
    advise(monkeypatch, method)
    with pytest.raises(UsageError) as told:
        trainer("async", **options)
    said = str(told.value)
    assert said.startswith(f"method 'async' stands for {method} (adamw, 4 stages): ")
    assert message in said
    other = "pb" if method == "pipedream" else "pipedream"
    assert said.endswith(f"; or name another method, such as {other} or 1f1b")
    with pytest.raises(UsageError) as told:
        trainer(method, **options)
    assert "stands for" not in str(told.value)


def normed(**options):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, **options)), nn.Linear(3, 3)]


@pytest.mark.parametrize(
    ("method", "data", "parts"), [("1f1b(microbatches=4)", 1, 4), ("gpipe(microbatches=2)", 2, 4), ("backprop", 2, 2)]
)
def test_batch_norms_that_see_parts_of_minibatches_are_said_once(method, data, parts):
    def build(stages):
        mesh = stretto.Mesh(data=data)
        return stretto.Trainer(stages, nn.functional.mse_loss, torch.optim.AdamW, method, device="cpu", mesh=mesh)

    for options in ({}, {"track_running_stats": False}):
        with pytest.warns(UserWarning, match=f"batch norms normalise each of {parts} parts of a minibatch") as told:
            trainer = build(normed(**options))
        assert len(told) == 1
        trainer.step(torch.randn(8, 3), torch.randn(8, 3))
    frozen = normed()
    frozen[0][1].eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(frozen)
        build(stages(2))
        stretto.Trainer(normed(), nn.functional.mse_loss, torch.optim.AdamW, "pb", device="cpu")


def test_with_batch_norms_it_is_accumulation_over_the_same_micro_batches():
    with pytest.warns(UserWarning, match="plain PyTorch does with gradients accumulated"):
        trainer = stretto.Trainer(
            [each.double() for each in normed()], nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1),
            "1f1b(microbatches=4)", device="cpu",
        )  # fmt: skip
    plain = nn.Sequential(*normed()).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        x, y = torch.randn(8, 3).double(), torch.randn(8, 3).double()
        optimizer.zero_grad()
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            (nn.functional.mse_loss(plain(part), target) / 4).backward()
        optimizer.step()
        trainer.step(x, y)
    for one, other in zip(trainer.model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_too_few_examples_say_it_too(monkeypatch):
    advise(monkeypatch, "pipedream-2bw")
    few = torch.ones(3, 3), torch.ones(3, 3)
    asked = trainer("async(warmup=2)")
    said = r"method 'async\(warmup=2\)' stands for pipedream-2bw\(warmup=2\) .* fewer stages.* such as pipedream$"
    for train in (lambda: asked.step(*few), lambda: asked.fit(few, epochs=1), lambda: asked.fit([few], epochs=1)):
        with pytest.raises(UsageError, match=said):
            train()
    with pytest.raises(
        UsageError, match=r"3 examples cannot be cut .* as paci\(every=4\) .* method 'paci\(every=3\)',"
    ):
        trainer("paci(every=4)").step(*few)


@pytest.mark.parametrize(
    ("method", "most", "workers", "fewer"),
    [
        ("paci(every=8,warmup=3)", 5, 4, "paci(every=5, warmup=3)"),
        ("gpipe(microbatches=8)", 3, 4, "gpipe(microbatches=3)"),
        ("pipedream-2bw(microbatches=8)", 5, 4, "pipedream-2bw(microbatches=5)"),
        ("pipedream-2bw", 3, 4, None),  # two versions are enough from as many micro-batches on as stages
        ("pipedream-2bw(microbatches=8)", 3, 2, None),
        ("backprop", 3, 4, None),
        ("pb", 3, 4, None),
        ("1f1b(microbatches=4)", 0, 4, None),
    ],
)
def test_the_same_method_with_fewer_micro_batches(method, most, workers, fewer):
    chosen = stretto.method(method)
    found = with_fewer(chosen, most, chosen.plan(4, workers)[0])
    assert (found and str(found)) == fewer


def test_a_checkpoint_outlives_the_advice_and_the_refusal_says_what_to_write(monkeypatch, tmp_path):
    advise(monkeypatch, "pipedream")
    trainer("async").save(tmp_path / "saved")
    advise(monkeypatch, "pb")
    later = trainer("async")
    said = r"saved with method pipedream, and 'async' stands for pb here .* advice has changed.*Give method='pipedream'"
    with pytest.raises(UsageError, match=said):
        later.load(tmp_path / "saved")
    trainer("pipedream").load(tmp_path / "saved")
    with pytest.raises(UsageError, match="this trainer has method pb: give method='pipedream'"):
        trainer("pb").load(tmp_path / "saved")


def test_the_optimizer_function_is_called_once_more_than_there_are_stages():
    calls = []

    def made(parameters):
        calls.append(len(parameters))
        return torch.optim.AdamW(parameters)

    trainer("pipedream", optimizer=made)
    assert len(calls) == 4
    trainer("async", optimizer=made)
    assert len(calls) == 9


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stages": []}, "stages is empty"),
        ({"workers": 9}, "workers=9 for 4 stages"),
        ({"precision": "fp7"}, "fp7"),
        ({"device": "abacus"}, "abacus"),
        ({"optimizer": "adamw"}, "optimizer is a str"),
        ({"optimizer": lambda parameters: 3}, "optimizer returned 3, not a torch.optim.Optimizer"),
        ({"optimizer": lambda parameters: 1 / 0}, "failed with ZeroDivisionError"),
    ],
)
def test_what_no_method_would_train_is_not_its_fault(given, message):
    arguments = {"stages": stages(4), "loss": nn.functional.mse_loss, "optimizer": torch.optim.AdamW, "device": "cpu"}
    for method in ("async", "pipedream"):
        with pytest.raises(UsageError, match=message) as told:
            stretto.Trainer(**arguments | given, method=method)
        assert "stands for" not in str(told.value)


def test_stages_may_come_from_an_iterator():
    for method in ("async", "pipedream"):
        made = stretto.Trainer(iter(stages(4)), nn.functional.mse_loss, torch.optim.AdamW, method, device="cpu")
        assert len(made.stages) == 4


def test_norms_of_stages_that_are_functions_are_seen_late_and_told():
    def normalised():
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def train(method, made):
        return stretto.Trainer(made, nn.functional.mse_loss, torch.optim.AdamW, method, device="cpu")

    with pytest.raises(UsageError, match=r"stands for 1f1b .*normalise each of 4 micro-batches by itself"):
        train("async", [normalised] * 4)
    assert train("pipedream-2bw", [normalised] * 4).schedule.per_turn == 4  # named, it is the user's choice
    with pytest.warns(UserWarning, match="take turns"):
        assert train("async", [normalised() for _ in range(4)]).schedule.per_turn == 1


@pytest.mark.parametrize("count", [5, 6, 8, 10, 20])
def test_local_warns_of_chunks_that_idle(count):
    """Of whole minibatches the stages of a chunk of k take turns: each works 1/k of the time; the larger sets it."""
    larger = -(-count // 2)
    idle = f"{1 - count * 3 / (count * larger * 3):.0%}"
    norms = [nn.Sequential(each, nn.BatchNorm1d(3)) for each in stages(count)]
    with pytest.warns(UserWarning, match=f"workers idle {idle} of the time on {count} stages") as told:
        made = stretto.Trainer(
            norms, nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1), "local", device="cpu",
            example=torch.ones(2, 3),
        )  # fmt: skip
    assert len(told) == 1
    assert made.schedule.per_turn == 1


@pytest.mark.parametrize("count", [2, 3, 8])
def test_chunks_of_local_are_pipelines_of_as_many_micro_batches_as_there_are_stages(count):
    made = trainer("local", count)
    assert made.schedule.per_turn == {2: 1, 3: 4, 8: 8}[count]
    assert trainer("local(microbatches=2)", count).schedule.per_turn == 2  # which idles, and was asked for
    plain = trainer("chunked(chunks=2)", count)
    x, y = torch.randn(16, 3), torch.randn(16, 3)
    for each in (made, plain):
        each.step(x, y)
        each.flush()
    for name, value in plain.gather().items():
        torch.testing.assert_close(made.gather()[name], value)


@pytest.mark.parametrize(
    ("method", "options"),
    [("local", {}), ("local", {"count": 4}), ("chunked(chunks=2)", {}), ("local", {"workers": 2}), ("async", {})],
)
def test_other_trainers_warn_of_nothing(method, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(method, **{"count": 8, **options})
