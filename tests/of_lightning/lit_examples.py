"""Modules as Lightning's own examples write them, and two that Lightning ships, on small data; without dropout."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos import LightningTransformer, Transformer
from lightning.pytorch.demos.lstm import LightningLSTM, SimpleLSTM
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

WORDS, LENGTH, SIDE, BATCH = 11, 5, 8, 6


def digits(examples=18):
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(examples, 1, SIDE, SIDE, generator=drawn, dtype=torch.float64)
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long() + 2 * (x[:, 0, 0, 0] > 0).long())


def texts(examples=18):
    words = torch.randint(WORDS, (examples, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(words[:, :-1], words[:, 1:])


class AutoEncoder(pl.LightningModule):
    """basics/autoencoder.py: an encoder, a decoder, one step for all; its own hyperparameters."""

    def __init__(self, hidden_dim: int = 16, learning_rate: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(SIDE * SIDE, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, SIDE * SIDE))

    def forward(self, x):
        z = self.encoder(x)
        return self.decoder(z)

    def training_step(self, batch, batch_idx):
        return self._common_step(batch, batch_idx, "train")

    def validation_step(self, batch, batch_idx):
        self._common_step(batch, batch_idx, "val")

    def predict_step(self, batch, batch_idx, dataloader_idx=None):
        return self(self._prepare_batch(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)

    def _prepare_batch(self, batch):
        x, _ = batch
        return x.view(x.size(0), -1)

    def _common_step(self, batch, batch_idx, stage: str):
        x = self._prepare_batch(batch)
        loss = F.mse_loss(x, self(x))
        self.log(f"{stage}_loss", loss, on_step=True)
        return loss


class PartByPart(AutoEncoder):
    """The README's: training_step calls encoder and decoder, and not self(...)."""

    def training_step(self, batch, batch_idx):
        x = self._prepare_batch(batch)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        return F.mse_loss(x_hat, x)


class Net(nn.Module):
    """mnist_examples: convolutions, log probabilities."""

    def __init__(self, dropout):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 6, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)
        self.fc1, self.fc2 = nn.Linear(24, 12), nn.Linear(12, 4)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = self.dropout2(x)
        return F.log_softmax(self.fc2(x), dim=1)


class ImageClassifier(pl.LightningModule):
    """mnist_examples/image_classifier_4_lightning_module.py: a metric in validation, Adadelta, a rate that falls."""

    def __init__(self, lr=1.0, gamma=0.7, dropout=0.0):
        super().__init__()
        self.save_hyperparameters()
        self.model = Net(dropout)
        self.val_acc, self.test_acc = (Accuracy(task="multiclass", num_classes=4) for _ in range(2))

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.forward(x)
        return F.nll_loss(logits, y.long())

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.forward(x)
        loss = F.nll_loss(logits, y.long())
        self.val_acc(logits, y)
        self.log("val_acc", self.val_acc)
        self.log("val_loss", loss)

    def configure_optimizers(self):
        optimizer = torch.optim.Adadelta(self.model.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=self.hparams.gamma)]


class Backbone(nn.Module):
    def __init__(self, hidden_dim=16):
        super().__init__()
        self.l1, self.l2 = nn.Linear(SIDE * SIDE, hidden_dim), nn.Linear(hidden_dim, 4)

    def forward(self, x):
        x = x.view(x.size(0), -1)
        x = torch.relu(self.l1(x))
        return torch.relu(self.l2(x))


class BackboneClassifier(pl.LightningModule):
    """basics/backbone_image_classifier.py."""

    def __init__(self, learning_rate: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = Backbone()

    def forward(self, x):
        return self.backbone(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self(x)
        loss = F.cross_entropy(y_hat, y)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("valid_loss", F.cross_entropy(self(x), y), on_step=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


class LanguageModel(LightningTransformer):
    """The transformer that Lightning ships: two inputs, positions and masks that its forward keeps; a warm-up."""

    def __init__(self, dropout=0.0):
        super().__init__(vocab_size=WORDS)
        self.model = Transformer(WORDS, ninp=8, nhead=2, nhid=12, nlayers=2, dropout=dropout)

    def prepare_data(self):
        """Nothing is downloaded."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-3)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class Recurrent(LightningLSTM):
    """The LSTM that Lightning ships: its state goes from one batch to the next."""

    def __init__(self):
        super().__init__(vocab_size=WORDS)
        self.model = SimpleLSTM(WORDS, ninp=8, nhid=8, nlayers=2, dropout=0.0)

    def prepare_data(self):
        """Nothing is downloaded."""


EXAMPLES = {
    "autoencoder": (AutoEncoder, digits),
    "image classifier, a metric, a scheduler": (ImageClassifier, digits),
    "backbone classifier": (BackboneClassifier, digits),
    "transformer language model, a warm-up": (LanguageModel, texts),
    "autoencoder, part by part": (PartByPart, digits),
    "LSTM with a state": (Recurrent, texts),
}
OPTIONS = {"LSTM with a state": {"network": "model"}}  # of StrettoStrategy


def made(name, seed=0):
    torch.manual_seed(seed)
    return EXAMPLES[name][0]().double()


def loader(name, batch=BATCH, **options):
    return DataLoader(EXAMPLES[name][1](), batch, **options)
