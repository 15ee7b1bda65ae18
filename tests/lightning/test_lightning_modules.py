"""Modules of other forms: forwards of their own, Hugging Face, metrics, random augmentation, dropout, precisions."""

import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lit_modules import Classifier, Measured, Remembering, difference, fitted, loader, network, trainer
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax, relu
from torch.utils.data import DataLoader

import stretto
from hugging_face_models import build, padding, words
from pairwise import thinned
from stretto.lightning import StrettoStrategy
from stretto.nn.chain import Chain

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch", "ignore::FutureWarning")


class OwnForward(Classifier):
    """Layers as attributes, and operations between them: there is no list to cut."""

    def __init__(self):
        super().__init__(nn.Identity())
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(a, b).double() for a, b in ((6, 12), (12, 12), (12, 4)))
        self.save_hyperparameters()

    def forward(self, x):
        x = relu(self.first(x.view(x.size(0), -1)))
        return log_softmax(self.last(relu(self.second(x))), dim=1)


class Scaled(nn.Module):
    """A stage of two inputs, of which the second goes along."""

    def __init__(self, ends=False):
        super().__init__()
        self.layer, self.ends = nn.Linear(6, 4 if ends else 6).double(), ends

    def forward(self, scale, x):
        x = torch.tanh(self.layer(x)) * scale
        return x if self.ends else (scale, x)


class TwoInputs(Classifier):
    """The module takes them in another order than the network, which gets them by name."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(Chain(Scaled(), Scaled(), Scaled(ends=True)))

    def forward(self, x, scale):
        return self.net(scale, x)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0], batch[0].abs().mean(1, keepdim=True)), batch[1])

    def validation_step(self, batch, batch_idx):
        logits = self(scale=batch[0].abs().mean(1, keepdim=True), x=batch[0])
        self.log("val_loss", cross_entropy(logits, batch[1]))


class CallsItsNetwork(Classifier):
    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))


@pytest.mark.parametrize(
    ("make", "options"),
    thinned([(OwnForward, {}), (Measured, {}), (CallsItsNetwork, {"network": "net"}), (TwoInputs, {})], 2),
    ids=str,
)
def test_it_comes_to_what_lightning_comes_to(make, options):
    one, by_lightning = fitted(module=make())
    two, by_us = fitted(StrettoStrategy("1f1b", stages=3, **options), make())
    assert difference(one, two) < 1e-12
    metrics = [{k: v.item() for k, v in own.callback_metrics.items()} for own in (by_lightning, by_us)]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-12)
    if make is Measured:
        assert one.tables == two.tables
        assert [shape for _, shape in one.returned] == [shape for _, shape in two.returned]
        assert [loss for loss, _ in one.returned] == pytest.approx([loss for loss, _ in two.returned], abs=1e-12)


class Language(pl.LightningModule):
    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.form = build("gpt2").double(), form

    def forward(self, input_ids, attention_mask=None, labels=None):
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        return output.logits if self.form == "logits" else output

    def training_step(self, batch, batch_idx):
        if self.form == "loss":
            return self(**batch, labels=batch["input_ids"]).loss
        logits = self(batch["input_ids"], batch["attention_mask"])
        logits = logits if self.form == "logits" else logits.logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("form", ["logits", "output", "loss"])
def test_a_language_model_of_transformers(form):
    texts = zip(words(0, 8), padding(8), strict=True)
    rows = DataLoader([{"input_ids": ids, "attention_mask": mask} for ids, mask in texts], 4)
    modules = []
    for strategy in ("auto", StrettoStrategy("1f1b", stages=2)):
        modules.append(Language(form))
        trainer(strategy, max_epochs=2, limit_val_batches=0).fit(modules[-1], rows)
    assert difference(*modules) < (1e-5 if form == "loss" else 1e-12)  # its own loss is a float32


class Augmented(Classifier):
    """Draws before and after self(...), from torch, NumPy and random."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.Dropout(0.3))
        self.draws, self.seen = [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        noise, order = torch.randn_like(x), torch.randperm(len(x))
        self.seen.append((float(noise[0, 0]), random.random(), np.random.rand()))
        logits = self(x + 0.1 * noise + 0.1 * x[order])
        self.draws.append(float(noise[0, 0]))
        return (cross_entropy(logits, y) + cross_entropy(logits, y[order]) + 0 * torch.rand(())) / 2


def test_augmentation_is_drawn_alike_where_the_input_and_where_the_loss_is():
    modules = []
    for seed in (5, 9):  # the global generators have no part in it
        strategy = StrettoStrategy("1f1b(microbatches=2)", stages=2, seed=3)
        module, _ = fitted(strategy, Augmented(), train=loader(), max_epochs=1, seed=seed, limit_val_batches=0)
        modules.append(module)
    assert difference(*modules) == 0
    module = modules[0]
    assert len({*module.draws}) == len(module.draws) == 24
    steps = [module.seen[first : first + 4] for first in range(1, 49, 4)]  # the first run is that of the example
    assert [step[:2] for step in steps] == [step[2:] for step in steps]
    assert len({*module.seen}) == 25


def test_global_generators_are_left_as_lightning_leaves_them():
    torch.manual_seed(1)
    fitted(StrettoStrategy("1f1b", stages=2), Augmented(), train=loader(), seed=5)
    ours = torch.rand(3)
    fitted("auto", Classifier(), train=loader(), seed=5)
    assert torch.equal(ours, torch.rand(3))


def test_batch_norm_and_dropout_have_the_numbers_of_stretto_trainer():
    def normed():
        torch.manual_seed(0)
        layers = [nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12), nn.Dropout(0.5), nn.Linear(12, 4)]
        return nn.Sequential(*layers).double()

    x, y = loader().dataset.tensors
    module = Classifier(normed())
    fitted(StrettoStrategy("pipedream", stages=2, seed=4), module, train=loader(), max_epochs=1, limit_val_batches=0)
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
    module = Classifier(network().float())
    data = loader(8, float32=True)
    options = {"precision": named, "gradient_clip_val": clip, "max_epochs": 1, "limit_val_batches": 0}
    fitted(StrettoStrategy("1f1b", stages=2), module, train=data, **options)
    x, y = data.dataset.tensors
    stages = stretto.split(network().float(), 2, example=x[:8])
    loss = stretto.mean(cross_entropy)
    own = stretto.Trainer(stages, loss, module.configure, "1f1b", precision=ours, clip=clip, device="cpu")
    for rows in torch.arange(len(x)).split(8):
        own.step(x[rows], y[rows])
    assert all(map(torch.equal, module.net.state_dict().values(), own.gather().values()))


def test_float64_is_lightnings():
    one, _ = fitted(module=Classifier(network().float()), precision="64-true")
    two, _ = fitted(StrettoStrategy("1f1b", stages=2), Classifier(network().float()), precision="64-true")
    assert one.net[0][0].weight.dtype == torch.float64
    assert difference(one, two) < 1e-12


@pytest.mark.parametrize("method", ["async", "local(head=linear)", "greedy", "spectrain", "pipedream(rotate=True)"])
def test_evaluation_without_training(method):
    heads = {"heads": [nn.Linear(12, 4), None]} if method == "greedy" else {}
    plain = trainer().validate(Classifier(), loader(16), verbose=False)
    ours = trainer(StrettoStrategy(method, stages=2, **heads))
    for stage in (ours.validate, ours.test):
        told = stage(Classifier(), loader(16), verbose=False)
        assert next(iter(told[0].values())) == pytest.approx(plain[0]["val_loss"], rel=1e-12)


def test_replicas_come_to_the_same():
    one, _ = fitted(StrettoStrategy("1f1b(microbatches=2)", stages=2), logger=(first := Remembering()))
    strategy = StrettoStrategy("1f1b(microbatches=2)", stages=2, mesh=stretto.Mesh(data=2))
    two, _ = fitted(strategy, logger=(second := Remembering()))
    assert difference(one, two) < 1e-12
    assert list(first.of("train_loss_step")) == list(second.of("train_loss_step"))


def test_a_strategy_by_its_name_and_a_second_fit():
    module, fitting = fitted("stretto")
    assert type(fitting.strategy) is StrettoStrategy
    fitting.fit_loop.max_epochs = 3
    fitting.fit(module, loader(shuffle=True), loader(16))
    plain, other = fitted("auto")
    other.fit_loop.max_epochs = 3
    other.fit(plain, loader(shuffle=True), loader(16))
    assert fitting.global_step == other.global_step


class Stops(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = batch_idx == 6


def test_steps_under_way_when_training_stops_in_an_epoch_are_logged():
    lines = []
    for options in ({"callbacks": [Stops()]}, {"max_steps": 7}):
        logger = Remembering()
        fitted(StrettoStrategy("pipedream", stages=3), train=loader(), logger=logger, **options)
        lines.append([logger.of(name) for name in ("train_loss_step", "train_accuracy")])
    assert lines[0] == lines[1]
    assert list(lines[0][0]) == list(range(7))


def test_workers_of_loaders_are_seeded_alike_in_all_processes(monkeypatch):
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    (rank,) = StrettoStrategy("1f1b", stages=2).process_dataloader(loader()).worker_init_fn.keywords.values()
    assert rank == 0
