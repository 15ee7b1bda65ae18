"""Settings of runs and studies: defaults < TOML file < command line, every key checked, every value resolved.

A field's docstring is its help text on the command line.
"""

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar

from cyclopts import Parameter

from stretto.errors import UsageError, nearest
from stretto.mesh import Mesh
from stretto.optimizers import OPTIMIZERS, Optimizer
from stretto.options.checks import is_whole, of_fields, refuse_float16, shown
from stretto.options.import_object import is_function, refuse_functions
from stretto.options.kinds import check_values
from stretto.settings.command_line import (
    ANY_OPTIMIZER,
    NETWORK,
    NUMBER,
    NUMBERS,
    OPTIONS,
    OUTPUT,
    PROCESSES,
    SUITING,
    TEXTS,
    TRAINING,
    WHOLE,
    WHOLES,
    WORKERS,
    Option,
    parse_metric,
)
from stretto.system.path_names import words_in_path


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that a run and a study have in common."""

    # settings of later versions, with their values unused: folders that were written before lack them
    added: ClassVar[Mapping[str, Any]] = {"loss": "auto", "metric": [], "sources": {}, "recompute": "none"}
    # where a run computes and logs: not what it computes, and so no part of what makes it the same run
    where: ClassVar[tuple[str, ...]] = ("device", "threads", "log")

    model: Annotated[str, NETWORK] = "mlp"
    """mlp, cnn, alexnet, vgg, resnet, cifar-resnet, unet, transformer or encoder-decoder; or your own,
    path/to/file.py:function or package.module:function, which returns a module, a list of layers, or (module, example);
    or hf:FOLDER, a Hugging Face model."""
    model_options: Annotated[dict[str, Option], OPTIONS, NETWORK] = field(default_factory=dict)
    """Its options: --model-options.width 256 --model-options.depth 4."""
    data: Annotated[str | None, NETWORK] = None
    """digits, digit-masks, pydoc (text), number-words (translation); from files: mnist, fashion-mnist, cifar10,
    cifar100, imagenet, text, parallel, saved; or your own function, which returns (train, validation) or (train,
    validation, test). By default what suits the network."""
    data_options: Annotated[dict[str, Option], OPTIONS, NETWORK] = field(default_factory=dict)
    """Its options: --data-options.level word."""
    loss: Annotated[str, NETWORK] = "auto"
    """A name in torch.nn.functional, as mse_loss, or path/to/file.py:function, which takes (output, target) and returns
    a mean over examples or (sum, count). auto: the network's, or cross entropy of classes."""
    metric: Annotated[tuple[str, ...], TEXTS, NETWORK] = ()
    """Further measures, NAME=path/to/file.py:function, like a loss. Lower is better, unless :higher follows:
    f1=own.py:f1:higher."""
    stages: Annotated[int | None, WHOLE, WORKERS] = None
    """Stages; by default one for each block, four for your own module."""
    workers: Annotated[int | None, WHOLE, WORKERS] = None
    """Processes to train on; by default one, which emulates a worker a stage."""
    steps: Annotated[int | None, WHOLE, TRAINING] = None
    """Updates; by default mlp 600, transformers 300, others 200."""
    examples: Annotated[int | None, WHOLE, TRAINING] = None
    """Examples to train on instead of steps, whatever the batch size."""
    optimizer: Annotated[str, Parameter(help=f"{ANY_OPTIMIZER}. {SUITING}"), TRAINING] = "auto"
    momentum: Annotated[float | None, NUMBER, TRAINING] = None
    """Momentum, or first beta; by default 0.9, nadam 0.99, others as torch."""
    reference_batch: Annotated[int | None, WHOLE, TRAINING] = None
    """Batch size that rates and momentum are given for, and scaled from."""
    lr_scaling: Annotated[str, TRAINING] = "momentum"
    """momentum (sgd's rate and momentum), linear or sqrt (the rate)."""
    lr_warmup: Annotated[float, NUMBER, TRAINING] = 0.0
    """Share of a run in which the rate grows to its full value."""
    weight_decay: Annotated[float, NUMBER, TRAINING] = 0.0
    """Weight decay."""
    clip: Annotated[float | None, NUMBER, TRAINING] = None
    """Largest norm of the gradients of all stages together."""
    schedule: Annotated[str, TRAINING] = "constant"
    """Learning rate over time: constant, or cosine (to zero)."""
    evaluations: Annotated[int | None, WHOLE, OUTPUT] = None
    """How often a run is evaluated, closer together at its start."""
    precision: Annotated[str, TRAINING] = "float32"
    """float32, bf16 (float32 masters), or bf16-autocast (not with live weights)."""
    accounting: Annotated[str, OUTPUT] = "counted"
    """FLOPs: counted by torch, or paper: a backward is two forwards."""
    measure: Annotated[tuple[str, ...] | None, TEXTS, OUTPUT] = None
    """Four times in a run, beside training: sharpness, noise, cosine (of local and backprop gradients), probes,
    filters. stretto inspect draws the last three."""
    data_parallel: Annotated[int, WHOLE, WORKERS] = 1
    """Replicas of the pipeline; they share --workers."""
    tensor: Annotated[int, WHOLE, WORKERS] = 1
    """Processes that share the weights of each stage."""
    space: Annotated[tuple[int, ...], WHOLES, WORKERS] = (1, 1)
    """Processes that share each image: along height, along width."""
    sync: Annotated[str, WORKERS] = "all-reduce"
    """How replicas agree: all-reduce, "all-reduce(hook=bf16)", shard-optimizer, fully-shard,
    "local-sgd(every=8,start=100)", "diloco(every=8)", "parameter-server(staleness=4)"."""
    recompute: Annotated[str, WORKERS] = "none"
    """What a backward recomputes: none, full (every layer), or selective (marked modules, such as the scores of
    attention)."""
    device: Annotated[str, WORKERS] = "auto"
    """auto (an accelerator, else cpu), or as torch.device names it. Each process takes an accelerator of its own unless
    there is a number."""
    threads: Annotated[int, WHOLE, WORKERS] = 1
    """Threads of each process on the CPU."""
    log: Annotated[tuple[str, ...], TEXTS, OUTPUT] = ()
    """Trackers: tensorboard, wandb, mlflow, csv; "wandb(project=mine)"."""
    sources: Annotated[dict[str, str], Parameter(parse=False)] = field(default_factory=dict)
    """Digests of the user's functions, with what they import beside them, and of the user's data: what a setting names
    may have been edited since."""

    def __post_init__(self) -> None:
        of_fields("", self)

    @property
    def functions(self) -> dict[str, str]:
        """The functions of the user's that are called for these settings, by the names of the settings."""
        named = {"model": self.model, "data": self.data or "", "loss": self.loss, "optimizer": self.optimizer}
        named |= {f"metric {name}": text for name, text, _ in map(parse_metric, self.metric)}
        return {name: text for name, text in named.items() if is_function(text)}

    @property
    def mesh(self) -> Mesh:
        """The axes besides the pipeline. Raises UsageError for lengths that cannot be."""
        return Mesh(data=self.data_parallel, tensor=self.tensor, space=(self.space[0], self.space[-1]))

    @property
    def stage_workers(self) -> int | None:
        """The workers of one pipeline: the processes, divided by the replicas and by those that share a stage."""
        return None if self.workers is None else self.workers // (self.mesh.data * self.mesh.inside)

    def to_json(self) -> dict[str, Any]:
        """The settings as plain data, for JSON, but for `where` the run computes and unused ones of `added`."""
        values = as_lists(asdict(self))
        values = {key: value for key, value in values.items() if key not in self.where}
        return {key: value for key, value in values.items() if key not in self.added or value != self.added[key]}

    def to_show(self) -> dict[str, Any]:
        """As `to_json`, with `where` the run computes if that was said: settings that can be given back."""
        own = type(self)
        chosen = {name: getattr(self, name) for name in own.where if getattr(self, name) != getattr(own, name)}
        return self.to_json() | as_lists(chosen)

    @property
    def digest(self) -> str:
        """Eight characters that differ whenever a setting does, for the names of folders."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:8]

    @classmethod
    def from_json(cls, data: Mapping[str, Any], origin: str, *, trusted: Collection[str] = ()) -> Self:
        """Read what `to_json` wrote. Raises UsageError for unknown and missing keys and wrong values, naming `origin`.

        Functions that the settings name are refused, too, unless they are `trusted`: whoever reads settings calls them.
        """
        names = [field.name for field in fields(cls) if field.name not in cls.where]
        missing = [name for name in names if name not in data and name not in cls.added]
        if missing:
            raise UsageError(f"{origin} lacks {', '.join(missing)}: {NOT_RESOLVED}")
        for key in data:
            if key not in names:
                raise UsageError(f"{origin}: unknown key {key!r}: {nearest(key, names)}")
        check_values(origin, data, cls)
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        methods = values["methods"] if "methods" in values else (values.get("method"),)
        refuse_functions(origin, *(text for text in methods if isinstance(text, str) and text not in trusted))
        settings = cls(**values)
        untrusted = {name: text for name, text in settings.functions.items() if text not in trusted}
        if untrusted:
            refuse_named(origin, untrusted)
        unresolved = [name for name in RESOLVED if getattr(settings, name) is None]
        if unresolved or (settings.steps is None and settings.examples is None):
            raise UsageError(f"{origin} lacks a value of {', '.join(unresolved) or 'steps'}: {NOT_RESOLVED}")
        try:
            check(settings)
        except UsageError as error:
            raise UsageError(f"{origin}: {error}") from error
        return settings


def as_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with lists instead of tuples, as JSON and TOML have them."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def refuse_named(place: str, functions: Mapping[str, str]) -> NoReturn:
    """Refuse functions of the user's that a file names, by their settings: they would be called, and files are data."""
    listed = ", ".join(f"{name} = {text!r}" for name, text in functions.items())
    options = " ".join(
        f"--{name}={text}" if name.startswith("metric ") else f"--{name} {text}" for name, text in functions.items()
    )
    raise UsageError(
        f"{place} has {listed}, and would have that called: nothing that a file says is executed. If you trust it, say "
        f"so in the command: {options}"
    )


def with_direction(text: str, higher: bool) -> str:
    """A metric's setting with its direction, which its function may say: f1=own.py:f1 becomes f1=own.py:f1:higher."""
    name, function, _ = parse_metric(text)
    return f"{name}={function}:higher" if higher else f"{name}={function}"


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """The settings of one run."""

    where: ClassVar[tuple[str, ...]] = (*Settings.where, "placement")

    method: Annotated[str, TRAINING] = "backprop"
    """backprop, greedy, "overlapping(delay=1)", "chunked(chunks=4)", "greedy(head=two-layer)", "greedy(share_top=2)",
    ...; async or local, first at a loss by simulated time in Stretto's studies, or 1f1b; or your own,
    path/to/file.py:function."""
    lr: Annotated[float | None, NUMBER, TRAINING] = None
    """Learning rate; by default 0.01 (sgd), 0.003 (adam, adamw), ..."""
    batch_size: Annotated[int | None, WHOLE, TRAINING] = None
    """Examples of an update; by default 32, transformer 16."""
    seed: Annotated[int, WHOLE, TRAINING] = 0
    """Decides initial weights, heads, the data's order, dropout."""
    bounds: Annotated[tuple[int, ...] | None, WHOLES, WORKERS] = None
    """Where stages begin, and the number of blocks: 0,2,5; by default even."""
    placement: Annotated[tuple[int, ...], WHOLES, WORKERS] = ()
    """Which of the cluster's unequal workers is process 0, 1, ...: 1,0."""
    checkpoint_every: Annotated[int | None, WHOLE, PROCESSES] = None
    """Steps between two checkpoints. The pipeline drains for each, which changes numbers where gradients are
    delayed."""

    @property
    def id(self) -> str:
        """A name for the run's folder, unique in a study."""
        rate = "" if self.lr is None else f"-lr{str(self.lr).removesuffix('.0')}"
        return f"{words_in_path(self.method)}{rate}-b{self.batch_size}-s{self.seed}"


@dataclass(frozen=True, kw_only=True)
class CompareSettings(Settings):
    """A study: every method over the same sweep of learning rates and batch sizes, with the same seeds."""

    added: ClassVar[Mapping[str, Any]] = {
        **Settings.added,
        "data_parallel": 1,
        "tensor": 1,
        "space": [1, 1],
        "sync": "all-reduce",
    }

    methods: Annotated[tuple[str, ...], TEXTS, TRAINING] = ("backprop", "greedy", "overlapping", "chunked(chunks=2)")
    """Methods, separated by commas or blanks; all: every one that can run; async and local: what was
    first at a loss by simulated time in Stretto's studies, or 1f1b."""
    lr: Annotated[tuple[float, ...] | None, NUMBERS, TRAINING] = None
    """Learning rates; by default 0.003,0.01,0.03,0.1 (sgd) or 0.001,0.003,0.01."""
    batch_size: Annotated[tuple[int, ...] | None, WHOLES, TRAINING] = None
    """Batch sizes; by default 32,128, transformer 16."""
    seeds: Annotated[int, WHOLE, TRAINING] = 2
    """Runs of each configuration, with seeds 0, 1, ..."""

    def runs(self) -> list[TrainSettings]:
        """Every run of the (resolved) study; one seed after the other, so that an early stop leaves whole sweeps."""
        swept = {"methods", "lr", "batch_size", "seeds"}
        shared = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in swept}
        return [
            with_steps(TrainSettings(**shared, method=method, lr=lr, batch_size=batch_size, seed=seed))
            for seed in range(self.seeds)
            for batch_size in known(self.batch_size)
            for lr in self.lr or (None,)
            for method in self.methods
        ]


CHOICES = {
    "lr_scaling": ("momentum", "linear", "sqrt"),
    "schedule": ("constant", "cosine"),
    "precision": ("float32", "bf16", "bf16-autocast"),
    "accounting": ("counted", "paper"),
    "recompute": ("none", "selective", "full"),
}


@dataclass(frozen=True)
class Defaults:
    """What suits a network on the embedded data; a single run takes the first of the batch sizes."""

    optimizer: str
    steps: int
    evaluations: int
    batch_sizes: tuple[int, ...]
    rate: int = 1  # index into the optimizer's rates, for a single run
    data: str = "digits"  # where a command has no default of its own


DEFAULTS = {
    "mlp": Defaults("sgd", 600, 40, (32, 128)),
    "cnn": Defaults("sgd", 200, 40, (32, 128)),
    "alexnet": Defaults("sgd", 200, 20, (32, 128)),
    "vgg": Defaults("sgd", 200, 20, (32, 128)),
    "resnet": Defaults("sgd", 200, 20, (32, 128)),
    "cifar-resnet": Defaults("sgd", 200, 20, (32, 128)),
    "unet": Defaults("sgd", 200, 20, (32, 128), data="digit-masks"),
    "transformer": Defaults("adamw", 300, 15, (16,), data="pydoc"),
    "encoder-decoder": Defaults("adamw", 300, 10, (32,), rate=0, data="number-words"),
}
OWN = Defaults("sgd", 200, 20, (32,))  # a network of the user's
RESOLVED = ("data", "stages", "evaluations", "batch_size")  # what no folder leaves open; nor steps, or examples
NOT_RESOLVED = "it is no resolved configuration"
MOST_THREADS = 1024  # more than a machine has cores
MOST_RUNS = 100_000  # of a study; more are taken for a mistyped number
MOST = 1e12  # more is mistyped
MEASURES = ("sharpness", "noise", "cosine", "probes", "filters")


def check(settings: Settings) -> None:
    """Raise UsageError for values that no run can have. Needs no network and no data."""
    for name in ("steps", "examples", "evaluations", "stages", "workers", "reference_batch"):
        if getattr(settings, name) is not None:
            at_least_one(name, getattr(settings, name))
    if not 1 <= settings.threads <= MOST_THREADS:
        raise UsageError(f"threads={settings.threads}: choose a whole number from 1 to {MOST_THREADS}")
    check_trackers(settings)
    refuse_float16(settings.precision)
    for name, choices in CHOICES.items():
        value = getattr(settings, name)
        if value not in choices:
            raise UsageError(f"unknown {name} {value!r}: {nearest(value, choices)}")
    if settings.momentum is not None and not 0 <= settings.momentum < 1:
        raise UsageError(f"momentum={settings.momentum}: choose a value from 0 up to, but not including, 1")
    if settings.clip is not None and not 0 < settings.clip < MOST:  # files hold no infinite numbers
        raise UsageError(f"clip={settings.clip}: choose a positive number below {MOST:g}; a large one only measures")
    if not 0 <= settings.weight_decay < MOST:
        raise UsageError(f"weight_decay={settings.weight_decay}: choose 0 or more, below {MOST:g}")
    check_large_batches(settings)
    check_replicas(settings)
    if isinstance(settings, CompareSettings):
        check_sweep(settings)
    elif isinstance(settings, TrainSettings):
        if settings.batch_size is not None:
            at_least_one("batch_size", settings.batch_size)
        if settings.checkpoint_every is not None:
            at_least_one("checkpoint_every", settings.checkpoint_every)
        check_placement(settings)
        positive_rates([] if settings.lr is None else [settings.lr])


def check_placement(settings: TrainSettings) -> None:
    """Raise UsageError for a placement that does not have another worker for each process."""
    placement = settings.placement
    listed = ",".join(map(str, placement))
    if placement and len(placement) != settings.workers:
        given = "no workers" if settings.workers is None else f"workers={settings.workers}"
        raise UsageError(
            f"placement={listed} with {given}: it has the worker of each of {len(placement)} processes; give "
            f"--workers {len(placement)}, or another placement"
        )
    if min(placement, default=0) < 0 or len({*placement}) < len(placement):
        raise UsageError(f"placement={listed}: give another worker for each process, numbered from 0")


def check_trackers(settings: Settings) -> None:
    """Raise UsageError for a tracker that there is not, or whose package is not installed."""
    if settings.log:
        from stretto.trackers import find

        find(settings.log)


def check_replicas(settings: Settings) -> None:
    """Raise UsageError where processes or examples cannot be divided among replicas and axes."""
    from stretto.replicas import find  # it imports schedules and methods

    at_least_one("data_parallel", settings.data_parallel)
    at_least_one("tensor", settings.tensor)
    find(settings.sync).check_replicas(settings.data_parallel)
    if len(settings.space) != 2:
        raise UsageError(f"space={settings.space}: give two numbers, along height and width: --space 2,1")
    for length in settings.space:
        at_least_one("space", length)
    mesh = settings.mesh
    among = mesh.data * mesh.inside
    if mesh.inside > 1 and settings.workers is not None and settings.workers % among:
        height, width = mesh.space
        lengths = {"data-parallel": mesh.data, "tensor": mesh.tensor, "height": height, "width": width}
        axes = " x ".join(f"{axis} {length}" for axis, length in lengths.items() if length > 1)
        raise UsageError(
            f"workers={settings.workers} for {axes}: the axes, with the pipeline's, multiply to the number of "
            f"processes; choose workers={multiple(settings.workers, among)}"
        )
    if settings.workers is not None and settings.workers % settings.data_parallel:
        raise UsageError(
            f"workers={settings.workers} for data_parallel={settings.data_parallel}: each replica takes as many "
            f"processes as any other; choose workers={multiple(settings.workers, settings.data_parallel)}"
        )
    sizes = getattr(settings, "batch_size", None)  # of a run, or of all runs of a study
    for size in sizes if isinstance(sizes, tuple) else [] if sizes is None else [sizes]:
        if size < settings.data_parallel:
            raise UsageError(
                f"batch_size={size} for data_parallel={settings.data_parallel}: each replica needs an example of its "
                "own; use a larger batch, or fewer replicas"
            )


def multiple(number: int, of: int) -> int:
    """The multiple of `of` that is nearest to `number`, but at least `of`."""
    return max(1, round(number / of)) * of


def check_large_batches(settings: Settings) -> None:
    """Raise UsageError for steps beside examples, scaling without a reference batch, and unknown measurements."""
    if settings.steps is not None and settings.examples is not None:
        raise UsageError(f"steps={settings.steps}, examples={settings.examples}: give one of both")
    if settings.lr_scaling != "momentum" and settings.reference_batch is None:
        raise UsageError(
            f"lr_scaling={settings.lr_scaling}: give the batch size that rates are scaled from, reference_batch"
        )
    if not 0 <= settings.lr_warmup <= 1:
        raise UsageError(f"lr_warmup={settings.lr_warmup}: choose a share of the run, from 0 to 1")
    for name in settings.measure or ():
        if name not in MEASURES:
            raise UsageError(f"cannot measure {name!r}: {nearest(name, MEASURES)}")


def check_sweep(settings: CompareSettings) -> None:
    """Raise UsageError for a sweep that is empty or runs something twice."""
    at_least_one("seeds", settings.seeds)
    for name in ("methods", "lr", "batch_size"):
        values = getattr(settings, name)
        if values is not None and not values:
            raise UsageError(f"{name} is empty: give at least one value, or leave it out")
        twice = [value for value in values or () if list(values or ()).count(value) > 1]
        if twice:
            raise UsageError(f"{name} lists {twice[0]!r} twice: each run would be made twice")
    for size in settings.batch_size or ():
        at_least_one("batch_size", size)
    positive_rates(settings.lr or ())
    runs = (
        math.prod(len(each or (0,)) for each in (settings.methods, settings.lr, settings.batch_size)) * settings.seeds
    )
    if runs > MOST_RUNS:
        raise UsageError(
            f"seeds={settings.seeds} of {runs // settings.seeds} configurations are {runs:,} runs: choose fewer, "
            f"{MOST_RUNS:,} at most"
        )


def at_least_one(name: str, value: int) -> None:
    """Raise UsageError for a count below one."""
    if not is_whole(value) or value < 1:
        raise UsageError(f"{name}={shown(value)}: choose a whole number of at least 1")
    if value > MOST:
        raise UsageError(f"{name}={value}: choose a whole number of at most {MOST:,.0f}")


def check_jobs(settings: CompareSettings, jobs: int | None) -> None:
    """Raise UsageError for a number of jobs below one, or above one where runs have processes of their own."""
    if jobs is not None:
        at_least_one("jobs", jobs)
    if settings.workers is not None and jobs not in (None, 1):
        raise UsageError(
            f"jobs={jobs}, workers={settings.workers}: runs on several processes go one after the other, so that their "
            "times can be compared; leave --jobs out"
        )


def positive_rates(rates: Sequence[float]) -> None:
    """Raise UsageError for learning rates that are not above 0, infinite, or too large a whole number."""
    for rate in rates:
        if not 0 < rate < math.inf or (is_whole(rate) and rate > MOST):
            raise UsageError(f"lr={rate}: choose a positive number")


S = TypeVar("S", bound=Settings)
T = TypeVar("T")


def short(name: str) -> str:
    """The name of a network or a data set as a part of a folder's name: "build" for path/to/file.py:build."""
    return "".join(c if c.isalnum() else "-" for c in name.rpartition(":")[2]) if is_function(name) else name


def known(value: T | None) -> T:
    """A value of resolved settings, in which none of these is None."""
    assert value is not None, "these settings have not been resolved"
    return value


def defaults_of(model: str) -> Defaults:
    """What suits a network by its name, or one of the user's."""
    return OWN if is_function(model) else DEFAULTS[model]


def optimizer_name(settings: Settings) -> str:
    """The optimizer's name: the one that suits the network, if it was left open."""
    return defaults_of(settings.model).optimizer if settings.optimizer == "auto" else settings.optimizer


def with_defaults(settings: S, row: Optimizer | None = None, batch_size: int | None = None) -> S:
    """Fill in what depends on the network: optimizer, learning rates, batch sizes, steps, evaluations, momentum.

    `row` describes an optimizer outside the table, `batch_size` comes from the user's DataLoader.
    """
    suits = defaults_of(settings.model)
    name = optimizer_name(settings)
    optimizer = OPTIMIZERS[name] if row is None else row
    if settings.reference_batch is not None and settings.lr_scaling == "momentum" and name != "sgd":
        raise UsageError(
            f"reference_batch={settings.reference_batch}: rate and momentum are scaled for sgd, there is no such rule "
            f"for {name}: leave it out, choose optimizer=sgd, or lr_scaling=linear or sqrt, which scales the rate"
        )
    open_fields = ("steps", "evaluations", "lr", "batch_size", "momentum")
    explicit = {key: value for key in open_fields if (value := getattr(settings, key)) is not None}
    rates, sizes = optimizer.rates, suits.batch_sizes if batch_size is None else (batch_size,)
    single = isinstance(settings, TrainSettings)
    rate = rates[min(suits.rate, len(rates) - 1)] if rates else None
    filled = {
        "steps": suits.steps if settings.examples is None else settings.steps,
        "evaluations": suits.evaluations,
        "lr": rate if single else rates or None,
        "batch_size": sizes[0] if single else sizes,
        "momentum": optimizer.momentum if name in OPTIMIZERS else None,
    }
    data = suits.data if settings.data is None else settings.data
    return with_steps(replace(settings, optimizer=name, data=data, **{**filled, **explicit}))


def with_steps(settings: S) -> S:
    """A single run's settings with steps instead of examples; other settings as they are."""
    if not isinstance(settings, TrainSettings) or settings.examples is None:
        return settings
    return replace(settings, steps=-(-settings.examples // known(settings.batch_size)), examples=None)
