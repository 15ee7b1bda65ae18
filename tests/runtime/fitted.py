"""Scripts that call `Trainer.fit`, and know nothing of processes."""

import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader

import stretto
from runtime.scripts import same, weights_of

__all__ = ["X", "Y", "build", "same"]

_generator = torch.Generator().manual_seed(4)
X = torch.randn(27, 8, generator=_generator)
Y = (X[:, 0] > 0).long()
RANK = int(os.environ.get("RANK", 0))
DISAGREEMENTS = ("data", "validation", "length", "order of batches", "batch size", "epochs")


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def build(method="backprop", *, optimizer=sgd, loss=nn.functional.cross_entropy, **options):
    """Three stages with dropout, on 8 numbers."""
    torch.manual_seed(6)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2)]
    return stretto.Trainer([*stages, nn.Linear(8, 4)], loss, optimizer, method, example=X[:4], **options)


class Counted(torch.utils.data.Dataset):
    """Examples that count how often they are read."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return len(X)

    def __getitem__(self, number):
        self.read += 1
        return X[number] + 0.01 * torch.randn(8), Y[number]


def fit_one(method, folder, **options):
    """An epoch, and two more that go on from its checkpoint."""
    data, logged = Counted(), []
    common = {"batch_size": 6, "checkpoint": f"{folder}-{method}", "quiet": True, "log": logged.append}
    build(method, **options).fit(data, validation=data, epochs=1, **common)
    trainer = build(method, **options)
    history = trainer.fit(data, validation=data, epochs=3, **common)
    plain = Counted()
    build(method, **options).fit(plain, epochs=1, batch_size=6, quiet=True)
    batches = [(x, y) for x, y in zip(X.split(6), Y.split(6), strict=True)]
    streamed = build(method, **options).fit(batches, validation=batches, epochs=2, quiet=True)
    return {
        "entries": history.entries + streamed.entries,
        "steps": history.steps + streamed.steps,
        "weights": weights_of(trainer),
        "logged": len(logged),
        "read": plain.read,
    }


def fit_all(methods, folder):
    return [fit_one(method, folder) for method in methods]


def fit_replicas():
    trainer = build(
        "1f1b(microbatches=3)", mesh=stretto.Mesh(data=2), **({} if "RANK" in os.environ else {"workers": 1})
    )
    history = trainer.fit((X[:24], Y[:24]), validation=(X, Y), batch_size=6, epochs=2, quiet=True)
    return history.entries, history.steps, weights_of(trainer)


def disagree():
    """For each kind: the error's name and its text."""
    told = {}
    for kind in DISAGREEMENTS:
        other = RANK == 1
        train, validation, options = (X, Y), (X, Y), {"batch_size": 6, "epochs": 2}
        if kind == "data" and other:
            train = (X + 1, Y)
        if kind == "validation" and other:
            validation = (X, 1 - Y)
        if kind == "length" and other:
            train = (X[:20], Y[:20])
        if kind == "batch size" and other:
            options["batch_size"] = 5
        if kind == "epochs" and other:
            options["epochs"] = 3
        if kind == "order of batches":
            train = list(zip(X.split(6), Y.split(6), strict=True))
            train = train[::-1] if other else train
            del options["batch_size"]
        try:
            build("1f1b(microbatches=2)").fit(train, validation, quiet=True, **options)
            told[kind] = ("nothing was refused", "")
        except stretto.StrettoError as error:
            told[kind] = (type(error).__name__, str(error))
    return told


def interrupted(folder):
    """What is said when process 1 gets Ctrl-C in its second epoch, and what training then comes to."""

    def press(trainer, entry):
        if RANK == 1 and entry["epoch"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    common, message, logged = {"batch_size": 6, "epochs": 3, "checkpoint": folder, "quiet": True}, "", []
    try:
        build("1f1b(microbatches=2)").fit((X, Y), callbacks=[press], **common)
    except KeyboardInterrupt as error:
        message = str(error)
    trainer = build("1f1b(microbatches=2)")
    history = trainer.fit((X, Y), log=logged.append, **common)
    return message, history.steps, len(logged), weights_of(trainer)


def stopped_by_one():
    def stop(trainer, entry):
        return RANK == 1 and entry["epoch"] == 2

    history = build("1f1b(microbatches=2)").fit((X, Y), batch_size=6, epochs=9, callbacks=[stop], quiet=True)
    return history.stopped, len(history.steps)


def loader():
    """A DataLoader that draws its order, and its items, from torch's generator."""
    return DataLoader(Counted(), 6, shuffle=True)


def with_loaders(folder):
    """A run whose loaders draw, one that goes on from its checkpoint, and a refusal: one process draws otherwise."""

    def fit(folder=None, seed=11, **options):
        trainer = build("1f1b(microbatches=2)")
        torch.manual_seed(seed)
        return trainer, trainer.fit(loader(), loader(), checkpoint=folder, quiet=True, **options)

    whole, history = fit(epochs=2)
    trained = weights_of(whole)
    fit(folder, epochs=1)
    _, again = fit(folder, seed=99 + RANK, epochs=2)
    refusal = ""
    if "RANK" in os.environ:
        try:
            fit(seed=RANK, epochs=1)
        except stretto.UsageError as error:
            refusal = str(error)
    return history.entries, again.entries, trained, refusal
