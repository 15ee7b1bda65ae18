"""From settings to a trainer with its data; all mistakes in the settings are reported here, before training."""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from stretto import data, models
from stretto.data.user_data import UserData, drawing_from, user_data
from stretto.errors import UsageError
from stretto.losses import Loss
from stretto.losses.value import AUTO, named_loss, suitable_loss
from stretto.measure import Costs, measure
from stretto.methods import Method, method
from stretto.methods.advice import advised
from stretto.methods.findings import works_with
from stretto.methods.table import is_advised
from stretto.models.encoder_decoder import find_bleu
from stretto.models.hugging_face import digest_of_folder
from stretto.models.published import refuse_planned_only
from stretto.models.user_model import build_folder_model, build_user_model
from stretto.nn import deferred
from stretto.nn.chain import Chain
from stretto.nn.deferred import RemoteStage
from stretto.nn.devices import EXAMPLES as DEVICES
from stretto.nn.devices import computing_with, pick_device
from stretto.nn.group_norm import has_batch_norm
from stretto.nn.input_errors import naming_rows
from stretto.optim import cosine, scale_for_batch, warmup
from stretto.optim.by_name import make_optimizer, name_of_setting, optimizer_row, usual_rate
from stretto.options.import_object import (
    call,
    import_object,
    is_function,
    is_given,
    is_model_folder,
    source_digest,
    unknown,
    version_of,
)
from stretto.replicas import find as find_sync
from stretto.report.record import Point, Record
from stretto.settings import runs
from stretto.settings.command_line import parse_metric
from stretto.splitting import Stages, divide, pieces
from stretto.stage.trainer_arguments import enable_training
from stretto.trainer.backend import in_one_process
from stretto.trainer.evaluate import Metric, named_metric
from stretto.trainer.microbatches import MinibatchCut
from stretto.trainer.trainer import Trainer

S = TypeVar("S", bound=runs.Settings)
EXAMPLES = 2  # of a batch on which a network is tried
TAKEN = {"frontier", *(field.name for field in fields(Record)), *(field.name for field in fields(Point))}
SAME_EXAMPLES = "Let it return the same at each call, drawing from a generator that it seeds"
TOKEN_OPTIMIZER = "adamw"
OWN_STAGES = 4  # of a user's module unless said otherwise


@dataclass(frozen=True, eq=False)
class Prepared:
    """A run that is ready to start: resolved settings, data set, model and trainer."""

    settings: runs.TrainSettings
    dataset: data.Dataset | UserData
    model: models.Model
    trainer: Trainer
    stages: Sequence[nn.Module]
    computing: AbstractContextManager[Any] = field(default_factory=nullcontext)  # in which the trainer computes

    @property
    def pieces(self) -> int:
        """How many parts a minibatch is cut into, replicas included."""
        return self.trainer.schedule.per_turn * self.trainer.mesh.data

    def named(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gathered weights under the names that `load_state_dict` of a user's own module takes, without heads.

        For a list of layers that is `nn.Sequential(*layers)`. Those of other networks keep their names.
        """
        if not self.is_users or not isinstance(self.stages, Stages):
            return dict(weights)
        return self.stages.model_state(weights)

    @property
    def is_users(self) -> bool:
        """Whether the network is the user's own, or a model's folder."""
        return is_function(self.settings.model)


@lru_cache(maxsize=4)
def load(name: str, options: tuple[tuple[str, object], ...], _source: str = "") -> data.Dataset | UserData:
    """Load a data set, or call the user's function for it; the last four are kept in memory.

    The function is called with seeded generators and on one thread: every process has to come to the same examples,
    and with several threads torch.sin of the same numbers may differ from process to process.
    """
    if is_function(name):
        with drawing_from(0), computing_with(1):
            return user_data(call(name, "data", dict(options)), name)
    return data.load(name, **dict(options))


def dataset(settings: runs.Settings) -> data.Dataset | UserData:
    """The data set that the settings name, with their options, or an embedded one that suits the network."""
    name = runs.defaults_of(settings.model).data if settings.data is None else settings.data
    source = version_of(name) if is_given(name) else source_digest(name, "data") if is_function(name) else ""
    return load(name, tuple(sorted(settings.data_options.items())), source)


def naming_first(loaded: data.Dataset | UserData, number: int) -> AbstractContextManager[None]:
    """A block in which the first training examples are tried."""
    return naming_rows(lambda: f"data {loaded.name}, train, rows 0 to {number - 1}")


def build_model(settings: runs.Settings, seed: int = 0) -> models.Model:
    """The network that the settings name, with their options; its weights are drawn with the seed."""
    options: dict[str, Any] = dict(settings.model_options)
    loaded = dataset(settings)
    if is_function(settings.model):
        build = build_folder_model if is_model_folder(settings.model) else build_user_model
        return build(settings.model, options, loss_of(settings, loaded), loaded.name, seed)
    if "seed" in options:
        raise UsageError("model_options: seed is no option of a network; the seed of a run decides its weights")
    suited = loaded.for_networks() if isinstance(loaded, UserData) else loaded
    refuse_planned_only(settings.model, options)
    if settings.model not in runs.DEFAULTS:
        raise unknown("model", settings.model, runs.DEFAULTS)
    if suited is None:
        raise UsageError(
            f"network {settings.model!r} takes classes [N] of numbers [N, ...], or tokens [N, T] with the next tokens; "
            f"{loaded.description} Give a network of your own, --model path/to/file.py:function"
        )
    model = models.build(settings.model, suited, seed=seed, **options)
    return model if settings.loss == AUTO else replace(model, loss=loss_of(settings, loaded))


def same_weights(settings: runs.Settings) -> bool:
    """Whether a network has the same initial weights under seeds 0 and 1."""
    if is_model_folder(settings.model):
        return not build_model(settings).drawn
    states = [[layer.state_dict() for layer in build_model(settings, seed).layers] for seed in (0, 1)]
    pairs = zip(tree_flatten(states[0])[0], tree_flatten(states[1])[0], strict=True)
    return all(torch.equal(one, other) for one, other in pairs if isinstance(one, Tensor))


def loss_of(settings: runs.Settings, loaded: data.Dataset | UserData) -> Loss:
    """The loss that the settings name; for a user's own network, if none is named, one that suits its targets."""
    if settings.loss != AUTO:
        loss = named_loss(settings.loss)
        return copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss  # each run trains its own
    return suitable_loss(*loaded.train.first(EXAMPLES), loaded.name, named=loaded.train.named)


def metrics_of(settings: runs.Settings) -> list[Metric]:
    """The user's metrics. Raises UsageError for a function that there is not, and for a name that is taken."""
    made: list[Metric] = []
    parsed = list(map(parse_metric, settings.metric))
    names = {name for name, *_ in parsed}
    for name, text, higher in parsed:
        if name in {metric.name for metric in made}:
            raise UsageError(f"metric {name!r} is given twice: choose another name for {text}")
        if name in TAKEN:
            raise UsageError(f"metric {name!r}: a run has a {name} of its own; choose another name")
        if f"test_{name}" in names:
            raise UsageError(f"metric 'test_{name}' is what {name!r} is called on the test split: rename one of them")
        made.append(named_metric(name, import_object(text, f"metric {name}"), higher=higher))
    return made


def resolve(settings: S) -> S:
    """Fill in every setting that was left open. Raises UsageError for settings that cannot work."""
    settings = with_methods(settings)
    if settings.data is None:
        if is_function(settings.model):
            raise UsageError(
                f"data is missing: {settings.model} is a network of your own; give --data path/to/file.py:function, "
                "which returns (train, validation), or the name of a data set"
            )
        if settings.model in runs.DEFAULTS:
            settings = replace(settings, data=runs.DEFAULTS[settings.model].data)
        else:
            settings = replace(settings, data="digits")  # an unknown network is refused below
    runs.check(settings)
    check_device(settings.device)
    metrics = metrics_of(settings)
    check_named(settings)
    settings = replace(settings, metric=tuple(map(runs.with_direction, settings.metric, (m.higher for m in metrics))))
    model, loaded = build_model(settings), dataset(settings)
    stages = number_of_stages(settings, model, loaded)
    mesh = settings.mesh
    most = stages * mesh.data * mesh.inside
    if settings.workers is not None and settings.workers > most:
        replicas = f" of each of {mesh.data} replicas" if mesh.data > 1 else ""
        shared = f", each shared by {mesh.inside}" if mesh.inside > 1 else ""
        raise UsageError(
            f"workers={settings.workers} for {stages} stages{replicas}{shared}: use at most {most} workers"
        )
    batch_size = loaded.batch_size if isinstance(loaded, UserData) else None
    if batch_size is None and isinstance(loaded, UserData):
        batch_size = min(runs.OWN.batch_sizes[0], len(loaded.train))
    if is_token_model(settings, model, loaded):
        settings = replace(settings, optimizer=TOKEN_OPTIMIZER)
    settings = with_advice(settings, stages, model)
    row = optimizer_row(runs.optimizer_name(settings))
    resolved = runs.with_defaults(replace(settings, stages=stages, sources=sources_of(settings)), row, batch_size)
    runs.check(resolved)  # what was chosen here fits what was given
    return resolved


def check_named(settings: runs.Settings) -> None:
    """Raise UsageError for a function, a loss or an optimizer that there is not: before models and data are made."""
    for name, text in settings.functions.items():
        if not is_model_folder(text):
            import_object(text, name)
    if settings.loss != AUTO and not is_function(settings.loss):
        named_loss(settings.loss)
    if settings.optimizer != AUTO:
        optimizer_row(settings.optimizer)


def check_rate(settings: runs.TrainSettings | runs.CompareSettings) -> None:
    """Raise UsageError for a rate, momentum or weight decay that an optimizer lacks, or does not take.

    Before models and data are made, of settings that have not been resolved.
    """
    if settings.optimizer == AUTO:
        return
    rates = settings.lr if isinstance(settings.lr, tuple) else (settings.lr,)
    usual = next(iter(optimizer_row(settings.optimizer).rates), None)
    rate = usual if rates[0] is None else rates[0]
    make_optimizer(settings.optimizer, rate, settings.momentum, settings.weight_decay)


def with_any_rate(settings: runs.TrainSettings) -> runs.TrainSettings:
    """Resolved settings with a rate, also of an optimizer that has no usual one: for what only times and prices."""
    return settings if settings.lr is not None else replace(settings, lr=usual_rate(settings.optimizer))


def is_token_model(settings: runs.Settings, model: models.Model, loaded: data.Dataset | UserData) -> bool:
    """Whether a user's own network embeds, or predicts several classes an example, where AdamW trains and SGD stalls.

    Only where nothing that was asked for goes by the optimizer: itself, momentum, a scaling of SGD, a method's cure.
    """
    asked = settings.optimizer != AUTO or settings.momentum is not None or settings.reference_batch is not None
    if asked or not is_function(settings.model):
        return False
    named = [name for name in methods_in(settings) if not is_advised(name)]
    if not all(works_with(name, TOKEN_OPTIMIZER) for name in named):
        return False
    _, y = loaded.train.first(1)
    several = isinstance(y, Tensor) and y.dtype == torch.int64 and y.dim() > 1
    return several or any(isinstance(part, nn.Embedding) for layer in model.layers for part in layer.modules())


def check_device(name: str) -> None:
    """Raise UsageError for a device that is not there, and for one that holds no numbers."""
    if pick_device(name).type == "meta":
        raise UsageError(f"device {name!r} holds shapes and no numbers: choose 'auto', or one such as {DEVICES}")


def number_of_stages(settings: runs.Settings, model: models.Model, loaded: data.Dataset | UserData) -> int:
    """The number of stages: as given, else one a block; four for a user's module, or one a worker if there are more."""
    if model.module is None:
        blocks = len(model.layers)
        if settings.stages is not None and settings.stages > blocks:
            deeper = f", or a deeper network (--model-options.depth {settings.stages})"
            remedy = "" if is_function(settings.model) else deeper
            raise UsageError(
                f"stages={settings.stages}, but {model.name} has {blocks} blocks: use at most {blocks} stages{remedy}"
            )
        return blocks if settings.stages is None else settings.stages
    if settings.stages is not None:
        return settings.stages
    with naming_first(loaded, EXAMPLES):
        layers = pieces(model.module, example=loaded.train.first(EXAMPLES)[0])
    return min(max(OWN_STAGES, settings.stage_workers or 1), len(layers))


def sources_of(settings: runs.Settings) -> dict[str, str]:
    """Digests of the user's functions and of the data that one of them returned."""
    digests = {
        name: digest_of_folder(text) if is_model_folder(text) else source_digest(text, name)
        for name, text in settings.functions.items()
    }
    loaded = dataset(settings)
    return digests | ({"examples": loaded.digest} if isinstance(loaded, UserData) else {})


def with_methods(settings: S) -> S:
    """Write each method's name as Stretto itself does: two spellings of one method are one.

    A single run takes the optimizer of its method.
    """
    settings = replace(settings, sync=str(find_sync(settings.sync)))
    if isinstance(settings, runs.CompareSettings):
        return replace(settings, methods=tuple(map(written, settings.methods)))
    if isinstance(settings, runs.TrainSettings) and not is_advised(settings.method):
        chosen = method(settings.method)
        return with_optimizer(replace(settings, method=str(chosen)), [chosen])
    return settings


def written(name: str) -> str:
    """A method's name as Stretto itself writes it; "async" and "local" stay, until the stages are known."""
    return name if is_advised(name) else str(method(name))


def with_advice(settings: S, stages: int, model: models.Model) -> S:
    """Write the methods that "async" and "local" stand for; two that stand for the same one count once."""
    if not any(map(is_advised, methods_in(settings))):
        return settings
    names = dict.fromkeys(str(each) for each in advised_in(methods_in(settings), settings, stages, model))
    if isinstance(settings, runs.CompareSettings):
        return replace(settings, methods=tuple(names))
    assert isinstance(settings, runs.TrainSettings), "other settings have no methods"
    return replace(settings, method=next(iter(names)))


def advice_in(asked: runs.Settings, resolved: runs.Settings) -> dict[str, Method]:
    """{"async" or "local", as it was asked for: the method that it stands for in the resolved settings}."""
    words = [name for name in methods_in(asked) if is_advised(name)]
    if not words:
        return {}
    chosen = advised_in(words, resolved, runs.known(resolved.stages), build_model(resolved))
    return dict(zip(words, chosen, strict=True))


def advised_in(names: Iterable[str], settings: runs.Settings, stages: int, model: models.Model) -> list[Method]:
    """The methods of these names, and what "async" and "local" stand for on these settings."""
    kind = name_of_setting(runs.optimizer_name(settings), settings.momentum, model.layers)
    return [advised(name, kind, stages, whole=has_batch_norm(model.layers)) for name in names]


def methods_in(settings: runs.Settings) -> tuple[str, ...]:
    """The methods that settings name, as they are written there."""
    if isinstance(settings, runs.CompareSettings):
        return settings.methods
    return (settings.method,) if isinstance(settings, runs.TrainSettings) else ()


def with_optimizer(settings: S, methods: Sequence[Method]) -> S:
    """Choose the optimizer that all methods require, if they require the same one and it was left open."""
    required = {chosen.cure.optimizer for chosen in methods}
    built_on = required.pop() if len(required) == 1 else None
    if settings.optimizer != "auto" or built_on is None:
        return settings
    return replace(settings, optimizer=built_on.lower())


def prepare_trial(settings: runs.TrainSettings, timeout: float = 600) -> Prepared:
    """As `prepare`, for a trainer that only shows what the run will be, and counts its FLOPs: in this process alone.

    Weights that have placeholders stay without values, so that there need be no room for them.
    """
    with in_one_process():
        return prepare(settings, timeout, trial=True)


def prepare(settings: runs.TrainSettings, timeout: float = 600, *, trial: bool = False) -> Prepared:
    """Build data, model, stages and trainer of a resolved run; `timeout` is the trainer's, in seconds."""
    loaded = dataset(settings)
    refuse_other_examples(settings, loaded, timeout)
    batch_size = runs.known(settings.batch_size)
    if batch_size > len(loaded.train):
        raise UsageError(
            f"batch_size={batch_size}, but {loaded.name} has {len(loaded.train)} training examples: "
            f"use at most {len(loaded.train)}"
        )
    if loaded.text is not None:
        find_bleu()
    model = build_model(settings, settings.seed)
    example, _ = loaded.train.first(batch_size)
    with naming_first(loaded, batch_size):
        stages = stages_of(settings, model, example)
    enable_training([stage for stage in stages if isinstance(stage, nn.Module)])
    computing = deferred.without_values(stages) if trial and deferred.placeholders(stages) else nullcontext()
    with computing, warnings.catch_warnings(), naming_first(loaded, batch_size):
        warnings.filterwarnings("ignore", "batch norms normalise each")  # a study says so once
        trainer = Trainer(
            stages,
            model.loss,
            optimizer(settings),
            settings.method,
            example=example,
            scheduler=scheduler(settings),
            clip=settings.clip,
            workers=settings.stage_workers,
            mesh=settings.mesh,
            sync=settings.sync,
            recompute=settings.recompute,
            seed=settings.seed,
            device=settings.device,
            precision=None if settings.precision == "float32" else settings.precision,
            timeout=timeout,
        )
    elsewhere = [own for own, there in zip(stages, trainer.stages, strict=True) if isinstance(there, RemoteStage)]
    deferred.forget_values(elsewhere, kept=[*trainer.stages, *filter(None, trainer.heads)])
    cut = MinibatchCut(trainer.method, trainer.schedule, settings.data_parallel)
    if batch_size < cut.parts:
        raise cut.too_few(
            batch_size,
            f"method {settings.method} cuts a minibatch into {cut}, and batch_size={batch_size}",
            f"--batch-size {cut.parts} or more",
        )
    return Prepared(settings, loaded, model, trainer, stages, computing)


def refuse_other_examples(settings: runs.TrainSettings, loaded: data.Dataset | UserData, timeout: float) -> None:
    """Raise UsageError if the user's data differ between two processes, or since the settings were resolved.

    On several processes a collective, which raises the same on all.
    """
    if not isinstance(loaded, UserData):
        return
    what = f"has other examples of data {loaded.name}"
    from stretto.trainer.distributed import find_backend  # slow to import

    find_backend(timeout, settings.mesh).compare({"digest": loaded.digest}, what, f"{SAME_EXAMPLES}.")
    resolved = settings.sources.get("examples")
    if resolved not in (None, loaded.digest):
        raise UsageError(
            f"data {loaded.name} gave other examples (digest {loaded.digest}) than where the run began ({resolved}). "
            f"{SAME_EXAMPLES}"
        )


def stages_of(settings: runs.TrainSettings, model: models.Model, example: Any) -> list[nn.Module]:
    """The model, cut at the settings' bounds, or into even stages. Raises UsageError for bounds that do not fit."""
    if settings.bounds is None:
        return divide(model.module or model.layers, runs.known(settings.stages), example=example)
    bounds = settings.bounds
    if len(bounds) != runs.known(settings.stages) + 1:
        raise UsageError(f"bounds={list(bounds)} for {settings.stages} stages: give one number more than stages")
    if model.module is not None:
        return divide(model.module, list(bounds), example=example)
    blocks = len(model.layers)
    rising = all(after > before for before, after in pairwise(bounds))
    if bounds[0] != 0 or bounds[-1] != blocks or not rising:
        raise UsageError(
            f"bounds={list(bounds)} for {settings.stages} stages of {blocks} blocks: give 0, where each further stage "
            f"begins, and {blocks}, each larger than the one before"
        )
    if is_function(settings.model):
        return divide(model.layers, list(bounds), example=example)
    return [Chain(*model.layers[start:stop]) for start, stop in pairwise(bounds)]


def costs_of(prepared: Prepared) -> Costs:
    """The costs of a step of a prepared run, counted on its first batch."""
    if is_model_folder(prepared.settings.model) and isinstance(prepared.computing, nullcontext):
        prepared = prepare_trial(prepared.settings)  # counting copies the stages: without values that takes no room
    size = runs.known(prepared.settings.batch_size)
    x, y = prepared.dataset.train.first(size)
    with prepared.computing, naming_first(prepared.dataset, size):
        return measure(prepared.trainer, x, y, prepared.settings.accounting)


def optimizer(settings: runs.TrainSettings) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """A function from the parameters of a stage to its optimizer."""
    return make_optimizer(settings.optimizer, *rate_and_momentum(settings), settings.weight_decay)


def rate_and_momentum(settings: runs.TrainSettings) -> tuple[float | None, float | None]:
    """Learning rate and momentum at the run's batch size, scaled from the reference batch if there is one.

    None for what an optimizer of the user's does not take, or has of its own.
    """
    lr, momentum, size = settings.lr, settings.momentum, runs.known(settings.batch_size)
    if settings.reference_batch is None:
        return lr, momentum
    if lr is None:
        raise UsageError(f"reference_batch={settings.reference_batch}: there is no learning rate to scale; give --lr")
    scaled = scale_for_batch(lr, momentum or 0.0, settings.reference_batch, to=size, rule=settings.lr_scaling)
    return scaled[0], None if momentum is None else scaled[1]


def scheduler(settings: runs.TrainSettings) -> Callable[[Any], Any] | None:
    """A function from the optimizer of a stage to its learning-rate scheduler, which counts the stage's updates."""
    steps = runs.known(settings.steps) * find_sync(settings.sync).updates(settings.data_parallel)
    if settings.lr_warmup:
        updates = round(settings.lr_warmup * steps)
        scaled = runs.known(rate_and_momentum(settings)[0]) if settings.reference_batch else 0.0
        start = min(runs.known(settings.lr) / scaled, 1) if settings.reference_batch else 0.0
        return warmup(updates, start=start, then=cosine(steps - updates) if settings.schedule == "cosine" else None)
    if settings.schedule == "constant":
        return None
    return lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
