"""What the situations share: a plain loop, Stretto beside it, and the comparison of what both come to."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import stretto

METHODS = ("backprop", "gpipe(microbatches=2)", "1f1b(microbatches=3)", "pipedream")
SYNCHRONOUS = METHODS[:3]
WHOLE = METHODS[::3]  # nothing is cut
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Sides:
    """A situation under one method: what plain PyTorch comes to, and what Stretto does, as numbers by name."""

    plain: Callable[[], dict[str, Any]]
    ours: Callable[[], dict[str, Any]]
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class Situation:
    """One of the fifty: its number, kind, source, methods, and the function that makes its sides for a method."""

    number: int
    kind: str
    source: str
    methods: tuple[str, ...]
    sides: Callable[[str], Sides]


SITUATIONS: dict[int, Situation] = {}


def situation(kind: str, source: str, methods: tuple[str, ...] = METHODS) -> Callable[[Any], Any]:
    """Enter a function `situation_NN` into the table."""

    def enter(function):
        number = int(function.__name__.rpartition("_")[2])
        assert number not in SITUATIONS
        SITUATIONS[number] = Situation(number, kind, source, methods, function)
        return function

    return enter


def answer(number: int, method: str) -> str:
    """What becomes of it: "equal", "refused: message", "SILENT: what differs", or "ERROR:" and a raw exception."""
    sides = SITUATIONS[number].sides(method)
    actual: dict[str, Any] | Exception
    try:
        actual = sides.ours()  # first, as it tells which stage has which weights
    except stretto.UsageError as error:
        return f"refused: {error}"
    except ModuleNotFoundError:
        raise
    except Exception as error:  # noqa: BLE001 (it is the answer)
        actual = error
    try:
        expected = sides.plain()
    except Exception as error:  # noqa: BLE001 (people do meet it)
        same = type(actual) is type(error)
        return "equal" if same else f"SILENT: plain PyTorch raises {type(error).__name__}: {error}"
    if isinstance(actual, Exception):
        return f"ERROR: {type(actual).__name__}: {actual}"
    found = difference(expected, actual, sides.tolerance)
    return "equal" if found is None else f"SILENT: {found}"


def difference(expected: dict[str, Any], actual: dict[str, Any], tolerance: float) -> str | None:
    """What differs most; None if nothing does."""
    if expected.keys() != actual.keys():
        return f"{sorted(expected.keys() ^ actual.keys())} on one side only"
    worst, said = 0.0, None
    for name, value in expected.items():
        one, two = torch.as_tensor(value), torch.as_tensor(actual[name])
        if one.shape != two.shape:
            return f"{name} has the shape {list(two.shape)}, plain {list(one.shape)}"
        if torch.allclose(one, two.to(one.dtype), rtol=tolerance, atol=tolerance, equal_nan=True):
            continue
        apart = (one - two.to(one.dtype)).abs() if one.dtype != torch.bool else (one != two).double()
        apart = float(apart.double().nan_to_num(nan=1e9).max())
        if apart > worst:
            shown = f": {actual[name]}, plain {value}" if one.numel() == 1 else ""
            worst, said = apart, f"{name} differs by {apart:.3g}{shown}"
    return said


def training(
    make: Callable[[], tuple[nn.Module, Any]],
    data: Callable[[], list[tuple[Any, Any]]],
    method: str,
    *,
    stages: int = 2,
    cut: Callable[[nn.Module], Any] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    scheduler: Callable[[Any], Any] | None = None,
    clip: float | None = None,
    each: Callable[[int, nn.Module, Any], None] | None = None,
    evaluate_every: int = 0,
    evaluation: bool = True,
    in_parts: bool = False,
    options: dict[str, Any] | None = None,
    tolerance: float = TOLERANCE,
) -> Sides:
    """A model and a loss, made anew for each side, trained on some batches.

    each: called after every step. in_parts: the plain loop adds up over the micro-batches, as what it has sees each of
    them by itself. evaluate_every: evaluations in between. options: of stretto.Trainer.
    """
    optimizer = sgd if optimizer is None else optimizer
    delays: dict[str, int] = {}

    def ours() -> dict[str, Any]:
        seeded()
        model, loss = make()
        batches = data()
        given = stretto.split(model, stages, example=batches[0][0]) if cut is None else cut(model)
        trainer = stretto.Trainer(given, loss, optimizer, method, scheduler=scheduler, clip=clip, **(options or {}))
        owners = {id(p): s for s in reversed(range(len(given))) for p in given[s].parameters()}
        delays.update({name: len(given) - 1 - owners.get(id(p), 0) for name, p in model.named_parameters()})
        seeded()
        losses, evaluated = [], []
        for step, (x, y) in enumerate(batches):
            losses.append(trainer.step(x, y))
            if each is not None:
                each(step, model, loss)
            if evaluate_every and (step + 1) % evaluate_every == 0:
                evaluated.append(trainer.evaluate([data()[0]])["loss"])
        losses = [value for value in (*losses, *trainer.flush()) if value is not None]
        numbers = state_of(model, loss) | {"losses": losses}
        if evaluate_every and method != "pipedream":  # whose stages have weights of other ages in between
            numbers["evaluated"] = evaluated
        if evaluation:
            numbers["evaluation"] = trainer.evaluate([data()[-1]])["loss"]
        return numbers

    def plain() -> dict[str, Any]:
        seeded()
        model, loss = make()
        names = [name for name, _ in model.named_parameters()]
        halves = {name: int(index < len(names) // 2) for index, name in enumerate(names)}
        late = (delays or halves) if method == "pipedream" else {}
        batches = data()
        seeded()
        loop = Loop(model, loss, optimizer, scheduler, clip, late, pieces_of(method) if in_parts else 1)
        losses, evaluated = [], []
        for step, (x, y) in enumerate(batches):
            losses.append(loop.step(x, y))
            if each is not None:
                each(step, model, loss)
            if evaluate_every and (step + 1) % evaluate_every == 0:
                evaluated.append(loop.evaluate(*data()[0]))
        numbers = state_of(model, loss) | {"losses": losses}
        if evaluate_every and method != "pipedream":  # whose stages have weights of other ages in between
            numbers["evaluated"] = evaluated
        if evaluation:
            numbers["evaluation"] = loop.evaluate(*data()[-1])
        return numbers

    return Sides(plain, ours, tolerance)


class Loop:
    """The loop that people write. late: by how many updates the weights are old that a parameter computes with."""

    def __init__(self, model, loss, optimizer, scheduler=None, clip=None, late=None, pieces=1):
        self.model, self.loss, self.clip, self.pieces = model, loss, clip, pieces
        trained = [*model.parameters()]
        if isinstance(loss, nn.Module):
            known = {id(p) for p in trained}
            trained += [p for p in loss.parameters() if id(p) not in known]
        self.trained = [p for p in trained if p.requires_grad]
        self.optimizer = optimizer(self.trained)
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None
        named = dict(model.named_parameters())
        self.late = {name: delay for name, delay in (late or {}).items() if named[name].requires_grad}
        self.versions = []

    def step(self, x, y):
        """One update; returns the loss before it."""
        named = dict(self.model.named_parameters())
        latest = {name: named[name].detach().clone() for name in self.late}
        self.versions.append(latest)
        for name, delay in self.late.items():
            named[name].data.copy_(self.versions[max(0, len(self.versions) - 1 - delay)][name])
        self.optimizer.zero_grad()
        rows, total = rows_of(y), 0.0
        for part, target in zip(cut_in(x, self.pieces), cut_in(y, self.pieces), strict=True):
            value = self.loss(called(self.model, part), target) * (rows_of(target) / rows if self.pieces > 1 else 1)
            value.backward()
            total += float(value.detach())
        for name in self.late:
            named[name].data.copy_(latest[name])
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.trained, self.clip)
        self.optimizer.step()
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(total)
        elif self.scheduler is not None:
            self.scheduler.step()
        return total

    def evaluate(self, x, y):
        """The loss in evaluation mode."""
        before = [(module, module.training) for module in self.model.modules()]
        trains = self.model.training
        self.model.eval()
        with torch.no_grad():
            value = float(self.loss(called(self.model, x), y))
        if trains:
            self.model.train()
        else:
            for module, mode in before:
                module.training = mode
        return value


def pieces_of(method):
    """How many micro-batches a minibatch has."""
    return int(method.partition("microbatches=")[2].rstrip(")") or 1)


def seeded():
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def state_of(model, loss=None):
    """Parameters and buffers by name, those of a loss, too."""
    numbers = {}
    for title, root in (("", model), ("loss.", loss)):
        if isinstance(root, nn.Module):
            for name, value in (*root.named_parameters(), *root.named_buffers()):
                numbers[title + name] = value.detach().clone()
    return numbers


def called(model, x):
    """The model on a batch's inputs."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def rows_of(y):
    return len(y[0]) if isinstance(y, tuple) else len(y)


def cut_in(x, pieces):
    """A batch's inputs or targets in parts."""
    if pieces == 1:
        return [x]
    if isinstance(x, dict):
        parts = [cut_in(value, pieces) for value in x.values()]
        return [dict(zip(x, part, strict=True)) for part in zip(*parts, strict=True)]
    if isinstance(x, tuple):
        return list(zip(*(cut_in(value, pieces) for value in x), strict=True))
    return list(x.tensor_split(pieces))
