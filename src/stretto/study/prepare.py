"""From settings to a trainer with its data; all mistakes in the settings are reported here, before training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from stretto import data, models
from stretto.errors import UsageError
from stretto.measure import Costs, measure
from stretto.mesh import Mesh
from stretto.methods import Method, method
from stretto.models.greedy_decode import find_bleu
from stretto.nn.chain import Chain
from stretto.optim import LAMB, LARS, cosine, scale_for_batch, warmup
from stretto.replicas import find as find_sync
from stretto.settings import runs
from stretto.splitting import divide
from stretto.trainer.trainer import Trainer

S = TypeVar("S", bound=runs.Settings)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A run that is ready to start: resolved settings, data set, model and trainer."""

    settings: runs.TrainSettings
    dataset: data.Dataset
    model: models.Model
    trainer: Trainer


@lru_cache(maxsize=4)
def load(name: str, options: tuple[tuple[str, object], ...]) -> data.Dataset:
    """Load a data set; the last four are kept in memory."""
    return data.load(name, **dict(options))


def dataset(settings: runs.Settings) -> data.Dataset:
    """The data set that the settings name, with their options."""
    return load(settings.data, tuple(sorted(settings.data_options.items())))


def build_model(settings: runs.Settings, seed: int = 0) -> models.Model:
    """The network that the settings name, with their options; its weights are drawn with the seed."""
    options: dict[str, Any] = dict(settings.model_options)
    if "seed" in options:
        raise UsageError("model_options: seed is no option of a network; the seed of a run decides its weights")
    return models.build(settings.model, dataset(settings), seed=seed, **options)


def resolve(settings: S) -> S:
    """Fill in every setting that was left open. Raises UsageError for settings that cannot work."""
    settings = with_methods(settings)
    runs.check(settings)
    model = build_model(settings)
    stages = len(model.layers) if settings.stages is None else settings.stages
    if stages > len(model.layers):
        raise UsageError(
            f"stages={stages}, but {model.name} has {len(model.layers)} blocks: use at most {len(model.layers)} "
            f"stages, or a deeper network (--model-options.depth {stages})"
        )
    mesh = settings.mesh if isinstance(settings, runs.TrainSettings) else Mesh()
    most = stages * mesh.data * mesh.inside
    if settings.workers is not None and settings.workers > most:
        replicas = f" of each of {mesh.data} replicas" if mesh.data > 1 else ""
        shared = f", each shared by {mesh.inside}" if mesh.inside > 1 else ""
        raise UsageError(
            f"workers={settings.workers} for {stages} stages{replicas}{shared}: use at most {most} workers"
        )
    resolved = runs.with_defaults(replace(settings, stages=stages))
    runs.check(resolved)  # what was chosen here fits what was given
    return resolved


def with_methods(settings: S) -> S:
    """Write each method's name as Stretto itself does: two spellings of one method are one.

    A single run takes the optimizer of its method.
    """
    if isinstance(settings, runs.CompareSettings):
        return replace(settings, methods=tuple(str(method(name)) for name in settings.methods))
    if isinstance(settings, runs.TrainSettings):
        chosen = method(settings.method)
        named = replace(settings, method=str(chosen), sync=str(find_sync(settings.sync)))
        return with_optimizer(named, [chosen])
    return settings


def with_optimizer(settings: S, methods: Sequence[Method]) -> S:
    """Choose the optimizer that all methods require, if they require the same one and it was left open."""
    required = {chosen.cure.optimizer for chosen in methods}
    built_on = required.pop() if len(required) == 1 else None
    if settings.optimizer != "auto" or built_on is None:
        return settings
    return replace(settings, optimizer=built_on.lower())


def prepare(settings: runs.TrainSettings, timeout: float = 600) -> Prepared:
    """Build data, model, stages and trainer of a resolved run; `timeout` is the trainer's, in seconds."""
    loaded = dataset(settings)
    batch_size = runs.known(settings.batch_size)
    if batch_size > len(loaded.train):
        raise UsageError(
            f"batch_size={batch_size}, but {loaded.name} has {len(loaded.train)} training examples: "
            f"use at most {len(loaded.train)}"
        )
    if loaded.text is not None:
        find_bleu()
    model = build_model(settings, settings.seed)
    example = loaded.train.x[:batch_size]
    trainer = Trainer(
        stages_of(settings, model, example),
        model.loss,
        optimizer(settings),
        settings.method,
        example=example,
        scheduler=scheduler(settings),
        clip=settings.clip,
        workers=settings.stage_workers,
        mesh=settings.mesh,
        sync=settings.sync,
        seed=settings.seed,
        precision=None if settings.precision == "float32" else settings.precision,
        timeout=timeout,
    )
    pieces, replicas = trainer.schedule.per_turn, settings.data_parallel
    if batch_size < pieces * replicas:
        of_replicas = f" for each of {replicas} replicas" if replicas > 1 else ""
        raise UsageError(
            f"method {settings.method} cuts a minibatch into {pieces} micro-batches{of_replicas}, and "
            f"batch_size={batch_size}: use --batch-size {pieces * replicas} or more, or fewer microbatches="
        )
    return Prepared(settings, loaded, model, trainer)


def stages_of(settings: runs.TrainSettings, model: models.Model, example: torch.Tensor) -> list[nn.Module]:
    """The model, cut at the settings' bounds, or into even stages. Raises UsageError for bounds that do not fit."""
    if settings.bounds is None:
        return divide(model.layers, runs.known(settings.stages), example=example)
    bounds, blocks = settings.bounds, len(model.layers)
    rising = all(after > before for before, after in pairwise(bounds))
    if len(bounds) != runs.known(settings.stages) + 1 or bounds[0] != 0 or bounds[-1] != blocks or not rising:
        raise UsageError(
            f"bounds={list(bounds)} for {settings.stages} stages of {blocks} blocks: give 0, where each further stage "
            f"begins, and {blocks}, each larger than the one before"
        )
    return [Chain(*model.layers[start:stop]) for start, stop in pairwise(bounds)]


def costs_of(prepared: Prepared) -> Costs:
    """The costs of a step of a prepared run, counted on its first batch."""
    x, y = prepared.dataset.train.x, prepared.dataset.train.y
    size = prepared.settings.batch_size
    return measure(prepared.trainer, x[:size], y[:size], prepared.settings.accounting)


def optimizer(settings: runs.TrainSettings) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """A function from the parameters of a stage to its optimizer."""
    lr, momentum = rate_and_momentum(settings)
    decay = settings.weight_decay
    if settings.optimizer in ("sgd", "lars"):
        momentum_class: Any = torch.optim.SGD if settings.optimizer == "sgd" else LARS
        return lambda params: momentum_class(params, lr=lr, momentum=momentum, weight_decay=decay)
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam,
                             "lamb": LAMB}  # fmt: skip
    kind = kinds[settings.optimizer]
    return lambda params: kind(params, lr=lr, betas=(momentum, 0.999), weight_decay=decay)


def rate_and_momentum(settings: runs.TrainSettings) -> tuple[float, float]:
    """Learning rate and momentum at the run's batch size, scaled from the reference batch if there is one."""
    lr, momentum, size = map(runs.known, (settings.lr, settings.momentum, settings.batch_size))
    if settings.reference_batch is None:
        return lr, momentum
    return scale_for_batch(lr, momentum, settings.reference_batch, to=int(size), rule=settings.lr_scaling)


def scheduler(settings: runs.TrainSettings) -> Callable[[Any], Any] | None:
    """A function from the optimizer of a stage to its learning-rate scheduler, which counts the stage's updates."""
    steps = runs.known(settings.steps) * find_sync(settings.sync).updates(settings.data_parallel)
    if settings.lr_warmup:
        updates = round(settings.lr_warmup * steps)
        start = min(runs.known(settings.lr) / rate_and_momentum(settings)[0], 1) if settings.reference_batch else 0.0
        return warmup(updates, start=start, then=cosine(steps - updates) if settings.schedule == "cosine" else None)
    if settings.schedule == "constant":
        return None
    return lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
