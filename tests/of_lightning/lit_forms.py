"""Modules of other forms than the usual classifier, for test_lightning_modules.py."""

import random

import lightning.pytorch as pl
import numpy as np
import torch
from lit_modules import Classifier, Measured
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax, relu

from hugging_face_models import build
from stretto.nn.chain import Chain


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


class Stops(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = batch_idx == 3


FORMS = {"own forward": OwnForward, "measured": Measured, "calls its network": CallsItsNetwork, "two inputs": TwoInputs}
