"""A script as users have it: python lit_script.py FOLDER DEVICES METHOD EPOCHS [PATH [KILLED_AT]]."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lit_modules import Classifier, Measured, adam_halved, loader, weights

from stretto import Mesh
from stretto.lightning import StrettoStrategy


class Killed(pl.Callback):
    """A power cut at a step; or the second process leaves."""

    def __init__(self, step, *, leaves):
        self.step, self.leaves = step, leaves

    def on_train_batch_start(self, trainer, *_):
        if self.leaves and trainer.global_step == self.step and trainer.global_rank == 1:
            sys.exit(3)
        if self.leaves:
            return
        if trainer.global_step == self.step and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder, devices, method, epochs, path="", killed_at="-1", replicas="1"):
    torch.set_num_threads(1)
    folder = Path(folder)
    saves = ModelCheckpoint(folder, save_last=True, monitor="val_loss")
    stops = EarlyStopping("val_loss", patience=100)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(devices),
        strategy=StrettoStrategy(method, stages=2, mesh=Mesh(data=int(replicas)), timeout=600),
        max_epochs=int(epochs),
        callbacks=[saves, stops, Killed(int(killed_at), leaves=path == "leaves")],
        logger=CSVLogger(folder, version="logs"),
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    kind = Classifier if replicas != "1" else Measured  # each replica would have a Metric of its own
    module = kind(configure=adam_halved)
    if trainer.global_rank:
        torch.manual_seed(7)  # nobody's: batches are drawn as rank 0 draws them
    trainer.fit(
        module, loader(shuffle=not path and killed_at == "-1"), loader(16), ckpt_path="last" if path == "last" else None
    )
    (tested,) = trainer.test(module, loader(), verbose=False)
    predicted = torch.cat(trainer.predict(module, loader())).tolist()
    told = {
        "weights": hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights(module))).hexdigest(),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "step": trainer.global_step,
        "tested": tested,
        "predicted": predicted,
        "tables": getattr(module, "tables", [])[-1:],
        "returned": getattr(module, "returned", [])[-3:],  # of the last epoch
        "best": Path(saves.best_model_path).name,
    }
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
