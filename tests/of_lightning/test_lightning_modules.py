"""Modules of other forms: forwards of their own, Hugging Face, metrics, random augmentation, dropout, precisions."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import stretto
from hugging_face_models import padding, words
from late_imports import Late
from pairwise import thinned

forms, lit, piped = Late("lit_forms"), Late("lit_modules"), Late("stretto.lightning")
pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch", "ignore::FutureWarning")


@pytest.mark.parametrize(
    ("form", "options"),
    thinned([("own forward", {}), ("measured", {}), ("calls its network", {"network": "net"}), ("two inputs", {})], 2),
    ids=str,
)
def test_it_comes_to_what_lightning_comes_to(form, options):
    make = forms.FORMS[form]
    one, by_lightning = lit.fitted(module=make())
    two, by_us = lit.fitted(piped.StrettoStrategy("1f1b", stages=3, **options), make())
    assert lit.difference(one, two) < 1e-12
    metrics = [{k: v.item() for k, v in own.callback_metrics.items()} for own in (by_lightning, by_us)]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-12)
    if form == "measured":
        assert one.tables == two.tables
        assert [shape for _, shape in one.returned] == [shape for _, shape in two.returned]
        assert [loss for loss, _ in one.returned] == pytest.approx([loss for loss, _ in two.returned], abs=1e-12)


@pytest.mark.parametrize("form", [pytest.param("logits", marks=pytest.mark.slow), "output", "loss"])
def test_a_language_model_of_transformers(form):
    texts = zip(words(0, 8), padding(8), strict=True)
    rows = DataLoader([{"input_ids": ids, "attention_mask": mask} for ids, mask in texts], 4)
    modules = []
    method = "1f1b(microbatches=1)" if form == "loss" else "1f1b"  # its own loss is a number of a whole batch
    for strategy in ("auto", piped.StrettoStrategy(method, stages=2)):
        modules.append(forms.Language(form))
        lit.trainer(strategy, max_epochs=2, limit_val_batches=0).fit(modules[-1], rows)
    assert lit.difference(*modules) < (1e-5 if form == "loss" else 1e-12)  # its own loss is a float32


def test_a_models_own_loss_is_not_averaged_over_micro_batches():
    texts = zip(words(0, 8), padding(8), strict=True)
    rows = DataLoader([{"input_ids": ids, "attention_mask": mask} for ids, mask in texts], 4)
    strategy = piped.StrettoStrategy("1f1b", stages=2)
    with pytest.raises(stretto.UsageError, match=r"number that the model computed[\s\S]*microbatches=1"):
        lit.trainer(strategy, max_epochs=1, limit_val_batches=0).fit(forms.Language("loss"), rows)


def marked(module, batch, batch_idx):
    y = torch.where(batch[0][:, 2] > 1.2, -1, batch[1])
    module.losses.append(module(batch[0]))
    module.calls = getattr(module, "calls", 0) + 1
    return cross_entropy(module.losses[-1], y, ignore_index=-1)


def together(module, batch, batch_idx):
    return module(batch[0]).std(0).mean()


def noisy_sum(module, batch, batch_idx):
    return cross_entropy(module(batch[0]) + 0.1 * torch.randn(len(batch[0]), 1), batch[1], reduction="sum")


def noisy_mean(module, batch, batch_idx):
    return cross_entropy(module(batch[0]) + 0.1 * torch.randn(len(batch[0]), 1), batch[1])


def plainly(module, batch, batch_idx):
    module.losses.append(batch_idx)
    module.calls = getattr(module, "calls", 0) + 1
    return cross_entropy(module(batch[0]), batch[1], reduction="none").mean()


def with_step(step):
    module = type("Module", (lit.Classifier,), {"training_step": step})()
    module.losses = []
    return module


def test_a_step_that_draws_may_be_a_mean_over_examples():
    lit.fitted(piped.StrettoStrategy("1f1b(microbatches=2)", stages=2), with_step(noisy_mean), limit_val_batches=0)


@pytest.mark.parametrize("step", [marked, together, noisy_sum])
def test_a_step_that_is_no_mean_over_examples_is_refused(step):
    module = with_step(step)
    with pytest.raises(stretto.UsageError, match=r"not a mean over examples: on micro-batches[\s\S]*microbatches=1"):
        lit.fitted(piped.StrettoStrategy("1f1b(microbatches=2)", stages=2), module, limit_val_batches=0)
    lit.fitted(piped.StrettoStrategy("1f1b(microbatches=1)", stages=2), with_step(step), limit_val_batches=0)


def test_looking_at_a_step_leaves_no_trace_on_the_module():
    module, strategy = with_step(plainly), piped.StrettoStrategy("1f1b(microbatches=2)", stages=2)
    lit.fitted(strategy, module, max_epochs=1, limit_val_batches=0)
    twice = 2 * 2 * lit.STEPS  # where the input is, and where the loss is, of two micro-batches
    assert module.calls == len(module.losses) == twice + 1  # the first one is that of the example


def test_augmentation_is_drawn_alike_where_the_input_and_where_the_loss_is():
    modules = []
    for seed in (5, 9):  # the global generators have no part in it
        strategy = piped.StrettoStrategy("1f1b(microbatches=2)", stages=2, seed=3)
        module, _ = lit.fitted(
            strategy, forms.Augmented(), train=lit.loader(), max_epochs=1, seed=seed, limit_val_batches=0
        )
        modules.append(module)
    assert lit.difference(*modules) == 0
    module = modules[0]
    assert len({*module.draws}) == len(module.draws) == 2 * lit.STEPS
    runs = module.seen[1:]  # the first one is that of the example
    steps = [runs[first : first + 4] for first in range(0, 4 * lit.STEPS, 4)]
    assert [step[:2] for step in steps] == [step[2:] for step in steps]
    assert len({*module.seen}) == 2 * lit.STEPS + 1


def test_global_generators_are_left_as_lightning_leaves_them():
    torch.manual_seed(1)
    lit.fitted(piped.StrettoStrategy("1f1b", stages=2), forms.Augmented(), train=lit.loader(), seed=5)
    ours = torch.rand(3)
    lit.fitted("auto", lit.Classifier(), train=lit.loader(), seed=5)
    assert torch.equal(ours, torch.rand(3))


def test_batch_norm_and_dropout_have_the_numbers_of_stretto_trainer():
    def normed():
        torch.manual_seed(0)
        layers = [nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12), nn.Dropout(0.5), nn.Linear(12, 4)]
        return nn.Sequential(*layers).double()

    x, y = lit.loader().dataset.tensors
    module = lit.Classifier(normed())
    lit.fitted(
        piped.StrettoStrategy("pipedream", stages=2, seed=4),
        module,
        train=lit.loader(),
        max_epochs=1,
        limit_val_batches=0,
    )
    stages = stretto.split(normed(), 2, example=x[:4])
    sgd = module.configure
    own = stretto.Trainer(stages, stretto.mean(cross_entropy), sgd, "pipedream", seed=4, device="cpu")
    for rows in torch.arange(len(x)).split(4):
        own.step(x[rows], y[rows])
    own.flush()
    values = list(own.gather().values())
    assert all(map(torch.equal, module.net.state_dict().values(), values))


@pytest.mark.parametrize(("named", "ours"), [("bf16-true", "bf16"), ("bf16-mixed", "bf16-autocast")])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_precisions_are_those_of_stretto_trainer(named, ours, clip):
    module = lit.Classifier(lit.network().float())
    data = lit.loader(8, float32=True)
    options = {"precision": named, "gradient_clip_val": clip, "max_epochs": 1, "limit_val_batches": 0}
    lit.fitted(piped.StrettoStrategy("1f1b", stages=2), module, train=data, **options)
    x, y = data.dataset.tensors
    stages = stretto.split(lit.network().float(), 2, example=x[:8])
    loss = stretto.mean(cross_entropy)
    own = stretto.Trainer(stages, loss, module.configure, "1f1b", precision=ours, clip=clip, device="cpu")
    for rows in torch.arange(len(x)).split(8):
        own.step(x[rows], y[rows])
    assert all(map(torch.equal, module.net.state_dict().values(), own.gather().values()))


def test_float64_is_lightnings():
    one, _ = lit.fitted(module=lit.Classifier(lit.network().float()), precision="64-true")
    two, _ = lit.fitted(
        piped.StrettoStrategy("1f1b", stages=2), lit.Classifier(lit.network().float()), precision="64-true"
    )
    assert one.net[0][0].weight.dtype == torch.float64
    assert lit.difference(one, two) < 1e-12


@pytest.mark.parametrize("method", ["async", "local(head=linear)", "greedy", "spectrain", "pipedream(rotate=True)"])
def test_evaluation_without_training(method):
    heads = {"heads": [nn.Linear(6, 4), None]} if method == "greedy" else {}
    plain = lit.trainer().validate(lit.Classifier(), lit.loader(16), verbose=False)
    ours = lit.trainer(piped.StrettoStrategy(method, stages=2, **heads))
    for stage in (ours.validate, ours.test):
        told = stage(lit.Classifier(), lit.loader(16), verbose=False)
        assert next(iter(told[0].values())) == pytest.approx(plain[0]["val_loss"], rel=1e-12)


def test_replicas_come_to_the_same():
    one, _ = lit.fitted(piped.StrettoStrategy("1f1b(microbatches=2)", stages=2), logger=(first := lit.Remembering()))
    strategy = piped.StrettoStrategy("1f1b(microbatches=2)", stages=2, mesh=stretto.Mesh(data=2))
    two, _ = lit.fitted(strategy, logger=(second := lit.Remembering()))
    assert lit.difference(one, two) < 1e-12
    assert list(first.of("train_loss_step")) == list(second.of("train_loss_step"))


def test_a_strategy_by_its_name_and_a_second_fit():
    kind = piped.StrettoStrategy  # its import tells Lightning of the name
    module, fitting = lit.fitted("stretto")
    assert type(fitting.strategy) is kind
    fitting.fit_loop.max_epochs = 3
    fitting.fit(module, lit.loader(shuffle=True), lit.loader(16))
    plain, other = lit.fitted("auto")
    other.fit_loop.max_epochs = 3
    other.fit(plain, lit.loader(shuffle=True), lit.loader(16))
    assert fitting.global_step == other.global_step


def test_steps_under_way_when_training_stops_in_an_epoch_are_logged():
    lines = []
    for options in ({"callbacks": [forms.Stops()]}, {"max_steps": 4}):
        logger = lit.Remembering()
        lit.fitted(piped.StrettoStrategy("pipedream", stages=3), train=lit.loader(), logger=logger, **options)
        lines.append([logger.of(name) for name in ("train_loss_step", "train_accuracy")])
    assert lines[0] == lines[1]
    assert list(lines[0][0]) == list(range(4))


def test_workers_of_loaders_are_seeded_alike_in_all_processes(monkeypatch):
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    (rank,) = piped.StrettoStrategy("1f1b", stages=2).process_dataloader(lit.loader()).worker_init_fn.keywords.values()
    assert rank == 0
