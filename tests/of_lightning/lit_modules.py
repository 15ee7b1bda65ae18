"""Modules and data of the tests, and a logger and a callback that remember what they are told."""

from itertools import pairwise

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy, ConfusionMatrix

EXAMPLES, BATCH = 24, 4
STEPS = EXAMPLES // BATCH  # of an epoch


def data(dtype=torch.float64, examples=EXAMPLES):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(dtype), (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


def loader(batch=BATCH, float32=False, examples=EXAMPLES, **options):
    return DataLoader(data(torch.float32 if float32 else torch.float64, examples), batch, **options)


def network():
    """Its four layers are about as expensive as each other: no search for fairer cuts."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, after), nn.Tanh()) for width, after in pairwise((6, 12, 6, 14))]
    return nn.Sequential(*layers, nn.Linear(14, 4)).double()


class Classifier(pl.LightningModule):
    """A classifier as people write it; `configure` makes what configure_optimizers returns."""

    def __init__(self, net=None, configure=None):
        super().__init__()
        self.net = network() if net is None else net
        self.configure = configure or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_accuracy", (logits.argmax(1) == y).double().mean(), prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = cross_entropy(logits, y)
        self.log_dict({"val_loss": loss, "val_accuracy": (logits.argmax(1) == y).double().mean()})
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(1)

    def configure_optimizers(self):
        return self.configure(self.parameters())


class Measured(Classifier):
    """torchmetrics objects, logged and by hand; what the step returns besides the loss."""

    def __init__(self, configure=None):
        super().__init__(configure=configure)
        self.accuracy, self.held_out = (Accuracy("multiclass", num_classes=4) for _ in range(2))
        self.confusion = ConfusionMatrix("multiclass", num_classes=4)
        self.returned, self.tables = [], []

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        loss = cross_entropy(logits, batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "logits": logits}

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.held_out.update(logits, batch[1])
        self.confusion.update(logits, batch[1])
        self.log_dict({"held_out": self.held_out, "val_loss": cross_entropy(logits, batch[1])}, sync_dist=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if "logits" in outputs:  # under asynchronous methods some steps later
            self.returned.append((outputs["loss"].item(), list(outputs["logits"].shape)))

    def on_validation_epoch_end(self):
        self.tables.append(self.confusion.compute().tolist())
        self.confusion.reset()


class Remembering(Logger):
    """A logger: (metrics, step) of each call."""

    def __init__(self):
        super().__init__()
        self.lines = []

    name, version = "remembering", "0"

    def log_metrics(self, metrics, step=None):
        self.lines.append((dict(metrics), step))

    def log_hyperparams(self, *given, **named):
        pass

    def of(self, name):
        return {step: metrics[name] for metrics, step in self.lines if name in metrics}


class Events(pl.Callback):
    """Every hook's name with where the trainer is, and the metrics that callbacks see."""

    def __init__(self):
        self.seen = []


def event(name):
    def hook(self, trainer, module, *given):
        metrics = {key: value.item() for key, value in trainer.callback_metrics.items()}
        self.seen.append((name, trainer.global_step, trainer.current_epoch, metrics))

    return hook


LOOKED_AT = {"on_after_backward", "on_before_optimizer_step"}  # they look at gradients, and are refused
for each in vars(pl.Callback):
    if each.startswith("on_") and each not in LOOKED_AT | {"on_exception", "on_load_checkpoint", "on_save_checkpoint"}:
        setattr(Events, each, event(each))


def trainer(strategy="auto", logger=False, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 2, "log_every_n_steps": 1, **quiet, **options},
        strategy=strategy,
        logger=logger,
    )


def fitted(strategy="auto", module=None, train=None, seed=1, **options):
    """A module that was fitted, and its trainer."""
    module = Classifier() if module is None else module
    fitting = trainer(strategy, **options)
    torch.manual_seed(seed)  # of shuffling
    fitting.fit(module, loader(shuffle=True) if train is None else train, loader(16))
    return module, fitting


def weights(module):
    return [value for value in module.state_dict().values() if value.is_floating_point()]


def difference(one, other):
    """The largest difference of two modules' weights."""
    pairs = zip(weights(one), weights(other), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def adam_halved(parameters):
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}
