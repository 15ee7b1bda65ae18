"""A classifier of Fashion-MNIST in plain Lightning: python plain.py FOLDER-WITH-THE-IDX-FILES [STEPS]."""

import gzip
import sys
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

Batch = tuple[Tensor, Tensor]


def read(folder: Path, name: str) -> TensorDataset:
    """Images [N, 1, 28, 28] from 0 to 1 and their classes, from two idx files, gzip or not."""

    def values(kind: str, header: int) -> Tensor:
        (path,) = folder.glob(f"{name}-{kind}*")
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).copy())

    return TensorDataset(values("images", 16).view(-1, 1, 28, 28) / 255, values("labels", 8).long())


def block(channels_in: int, channels: int, stride: int) -> nn.Module:
    """A convolution that may halve the image."""
    convolution = nn.Conv2d(channels_in, channels, 3, stride, padding=1)
    return nn.Sequential(convolution, nn.GroupNorm(4, channels), nn.ReLU())


class Clothes(L.LightningModule):
    """Six blocks and a linear layer."""

    def __init__(self, steps: int, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        sizes = [(1, width, 2), (width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1),
                 (2 * width, 4 * width, 2), (4 * width, 4 * width, 1)]  # fmt: skip
        self.blocks = nn.ModuleList([block(*size) for size in sizes])
        self.classes = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, 10]."""
        for layer in self.blocks:
            x = layer(x)
        return self.classes(x.mean((2, 3)))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss and accuracy of a batch."""
        logits = self(batch[0])
        accuracy = (logits.argmax(1) == batch[1]).float().mean()
        self.log_dict({"val_loss": cross_entropy(logits, batch[1]), "val_accuracy": accuracy}, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Accuracy of a batch."""
        self.log("test_accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> dict[str, object]:
        """SGD whose rate falls along half a cosine."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(self.hparams["steps"]))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def main(folder: str, steps: str = "300") -> None:
    """Train, and test the best checkpoint."""
    L.seed_everything(0)
    train, validation = random_split(read(Path(folder), "train"), [0.9, 0.1])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=int(steps),
        val_check_interval=max(1, min(100, int(steps) // 2)),
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        callbacks=[
            ModelCheckpoint("checkpoints", monitor="val_loss", save_last=True),
            EarlyStopping("val_loss", patience=5),
            LearningRateMonitor(),
        ],
        logger=CSVLogger("logs"),
    )
    loader = DataLoader(train, 128, shuffle=True, drop_last=True)
    trainer.fit(Clothes(int(steps)), loader, DataLoader(validation, 256), ckpt_path="last")
    trainer.test(ckpt_path="best", dataloaders=DataLoader(read(Path(folder), "t10k"), 256))


if __name__ == "__main__":
    main(*sys.argv[1:])
