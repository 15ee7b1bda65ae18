"""Settings of runs and studies: defaults < TOML file < command line, every key checked, every value resolved.

A field's docstring is its help text on the command line.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Self, TypeVar

from cyclopts import Parameter, Token

from stretto.errors import UsageError, nearest
from stretto.methods.table import split_list

Option = str | int | float | bool


def comma_separated(type_: Any, tokens: Sequence[Token]) -> Any:
    """Let `--lr 0.1,0.3` and `--lr 0.1 0.3` mean the same; commas inside parentheses belong to a method's options."""
    convert = next((kind for kind in (int, float) if str(kind.__name__) in str(type_)), str)
    words = [word for token in tokens for word in split_list(str(token.value))]
    try:
        return tuple(convert(word) for word in words)
    except ValueError as error:
        name = tokens[0].keyword or "value"
        raise ValueError(f"{name}: {' '.join(words)!r} is no list of {convert.__name__} values") from error


LIST = Parameter(consume_multiple=True, converter=comma_separated, negative="")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run and a study have in common."""

    model: str = "mlp"
    """Network: mlp, cnn or transformer."""
    model_options: dict[str, Option] = field(default_factory=dict)
    """Its options: --model-options.width 256 --model-options.depth 4."""
    data: str = "digits"
    """Data set: digits (images) or pydoc (English text)."""
    data_options: dict[str, Option] = field(default_factory=dict)
    """Its options: --data-options.level word."""
    stages: int | None = None
    """Stages the network is cut into; one for each of its blocks unless said otherwise."""
    workers: int | None = None
    """Workers the schedule is laid out for; one a stage unless said otherwise. Changes costs, never numbers."""
    steps: int = 600
    """Updates of each stage."""
    optimizer: str = "auto"
    """sgd, adam or adamw; auto takes sgd for mlp and cnn, adamw for transformer."""
    momentum: float = 0.9
    """Momentum of sgd, first beta of adam and adamw."""
    weight_decay: float = 0.0
    """Weight decay."""
    schedule: str = "constant"
    """Learning rate over time: constant, or cosine (down to zero)."""
    evaluations: int = 40
    """How often a run is evaluated, closer together at its start."""
    accounting: str = "counted"
    """counted: FLOPs as torch counts them; paper: a backward is charged as two forwards."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, each value as it was resolved."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], origin: str) -> Self:
        """Read what `to_json` wrote. Raises UsageError for an unknown key, naming the nearest and `origin`."""
        known = [field.name for field in fields(cls)]
        for key in data:
            if key not in known:
                raise UsageError(f"{origin}: unknown key {key!r}: {nearest(key, known)}")
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """One run."""

    method: str = "backprop"
    """Method with its options: backprop, greedy, "overlapping(delay=1)", "chunked(chunks=4)"."""
    lr: float | None = None
    """Learning rate; unless said otherwise 0.01 for sgd, 0.001 for adam and adamw."""
    batch_size: int = 32
    """Examples of an update."""
    seed: int = 0
    """Decides initial weights, heads, the order of the data and dropout."""

    @property
    def id(self) -> str:
        """A name for the run's folder, unique in a study."""
        method = "-".join("".join(c if c.isalnum() else " " for c in self.method).split())
        return f"{method}-lr{self.lr:g}-b{self.batch_size}-s{self.seed}"


@dataclass(frozen=True, kw_only=True)
class CompareSettings(Settings):
    """A study: every method over the same sweep of learning rates and batch sizes, with the same seeds."""

    methods: Annotated[tuple[str, ...], LIST] = ("backprop", "greedy", "overlapping", "chunked(chunks=2)")
    """Methods with their options, separated by commas or blanks."""
    lr: Annotated[tuple[float, ...] | None, LIST] = None
    """Learning rates; unless said otherwise chosen for the optimizer."""
    batch_size: Annotated[tuple[int, ...], LIST] = (32, 128)
    """Batch sizes."""
    seeds: int = 2
    """Runs of each configuration, with seeds 0, 1, ..."""

    def runs(self) -> list[TrainSettings]:
        """Every run of the (resolved) study; one seed after the other, so that an early stop leaves whole sweeps."""
        assert self.lr is not None
        own = {"methods", "lr", "batch_size", "seeds"}
        shared = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        return [
            TrainSettings(**shared, method=method, lr=lr, batch_size=batch_size, seed=seed)
            for seed in range(self.seeds)
            for batch_size in self.batch_size
            for lr in self.lr
            for method in self.methods
        ]


OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine")
RATES = {"sgd": (0.003, 0.01, 0.03), "adam": (0.0003, 0.001, 0.003), "adamw": (0.0003, 0.001, 0.003)}


def check(settings: Settings) -> None:
    """Raise UsageError for values that no run could have, before anything is built."""
    for name in ("steps", "evaluations"):
        at_least_one(name, getattr(settings, name))
    for name in ("stages", "workers"):
        if getattr(settings, name) is not None:
            at_least_one(name, getattr(settings, name))
    if settings.optimizer not in (*OPTIMIZERS, "auto"):
        raise UsageError(f"unknown optimizer {settings.optimizer!r}: {nearest(settings.optimizer, OPTIMIZERS)}")
    if settings.schedule not in SCHEDULES:
        raise UsageError(f"unknown schedule {settings.schedule!r}: {nearest(settings.schedule, SCHEDULES)}")
    if not 0 <= settings.momentum < 1:
        raise UsageError(f"momentum={settings.momentum}: choose a value from 0 up to, but not including, 1")
    if settings.weight_decay < 0:
        raise UsageError(f"weight_decay={settings.weight_decay}: choose 0 or more")
    if isinstance(settings, CompareSettings):
        check_sweep(settings)
    elif isinstance(settings, TrainSettings):
        at_least_one("batch_size", settings.batch_size)
        positive_rates([] if settings.lr is None else [settings.lr])


def check_sweep(settings: CompareSettings) -> None:
    """Raise UsageError for a sweep that is empty or runs something twice."""
    at_least_one("seeds", settings.seeds)
    for name in ("methods", "lr", "batch_size"):
        values = getattr(settings, name)
        if values is not None and not values:
            raise UsageError(f"{name} is empty: give at least one value, or leave it out")
        twice = [value for value in values or () if values.count(value) > 1]
        if twice:
            raise UsageError(f"{name} lists {twice[0]!r} twice: each run would be made twice")
    for size in settings.batch_size:
        at_least_one("batch_size", size)
    positive_rates(settings.lr or ())


def at_least_one(name: str, value: int) -> None:
    """Refuse counts below one."""
    if value < 1:
        raise UsageError(f"{name}={value}: choose a whole number of at least 1")


def positive_rates(rates: Sequence[float]) -> None:
    """Refuse learning rates that do not train."""
    for rate in rates:
        if not 0 < rate < float("inf"):
            raise UsageError(f"lr={rate}: choose a positive number")


S = TypeVar("S", bound=Settings)


def with_optimizer(settings: S) -> S:
    """Resolve `optimizer="auto"` and the learning rates that go with it."""
    name = settings.optimizer
    if name == "auto":
        name = "adamw" if settings.model == "transformer" else "sgd"
    rates = RATES[name]
    if isinstance(settings, CompareSettings):
        return replace(settings, optimizer=name, lr=settings.lr or rates)
    return replace(settings, optimizer=name, lr=getattr(settings, "lr", None) or rates[1])
