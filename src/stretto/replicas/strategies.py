"""What a user can choose, as data. No torch in here."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from stretto.errors import UsageError, nearest
from stretto.methods.definition import Method
from stretto.options.checks import is_among, shown
from stretto.options.parse import WORDS, parse
from stretto.replicas.parameter_server.order import Order
from stretto.schedule.replicated import Agreement

HOOKS = ("bf16", "fp16", "powersgd")


@dataclass(frozen=True, kw_only=True)
class Sync:
    """What replicas do to stay together. `agreement` is the kind of action with which they meet."""

    name: ClassVar[str]
    agreement: ClassVar[Agreement]

    def __str__(self) -> str:
        given = [(field.name, getattr(self, field.name)) for field in fields(self)]
        told = ", ".join(f"{key}={written(value)}" for key, value in given if value is not None)
        return f"{self.name}({told})" if told else self.name

    @property
    def action(self) -> Agreement | None:
        """The kind of action with which replicas meet in the schedule; None if their meeting is part of an update."""
        return self.agreement

    @property
    def reducing(self) -> "AllReduce | None":
        """How gradients are added up by messages of our own; None where they are not."""
        return None

    @property
    def sharding(self) -> "FullyShard | None":
        """How replicas share out one set of weights; None where each has all of them."""
        return None

    @property
    def serving(self) -> "ParameterServer | None":
        """What servers of weights are to keep to; None without servers."""
        return None

    def kept(self, replicas: int) -> str:
        """What a checkpoint of so many replicas says of this choice."""
        return self.name

    def check(self, method: Method, precision: str | None) -> None:
        """Raise UsageError for training that replicas cannot share so."""

    def check_replicas(self, replicas: int) -> None:
        """Raise UsageError if so many replicas cannot stay together so."""

    def lag(self, replicas: int) -> int:
        """By how many minibatches more than without replicas the loss that a step returns is behind."""
        return 0

    def updates(self, replicas: int) -> int:
        """How often a minibatch updates each stage, as its scheduler counts."""
        return 1


@dataclass(frozen=True, kw_only=True)
class AllReduce(Sync):
    """Replicas update alike: before each update of a stage its gradients are added up over all replicas.

    The sum is the gradient of the whole minibatch, however its examples are dealt out. `hook` compresses gradients on
    their way, as torch's communication hooks of that name do: bf16, fp16, powersgd (Vogels et al. 2019). `algorithm`
    is one of `stretto.collectives.all_reduce`; by default torch's own. "auto" takes for each message the one that was
    fastest on this machine when `stretto calibrate --collectives` measured it, or was in the file `calibration`; where
    nothing has been measured, built-in constants decide. What the first process finds counts for all of them.
    """

    name: ClassVar[str] = "all-reduce"
    agreement: ClassVar[Agreement] = "A"
    hook: str | None = None
    algorithm: str | None = None
    calibration: str | None = None

    def __post_init__(self) -> None:
        if self.hook is not None and not is_among(self.hook, HOOKS):
            raise UsageError(f"all-reduce: unknown hook {shown(self.hook)}: {nearest(str(self.hook), HOOKS)}")
        if self.algorithm is not None:
            check_algorithm(self.algorithm)
        if self.hook is not None and self.algorithm is not None:
            raise UsageError(f"all-reduce: hook={self.hook} reduces with torch's own algorithm: leave algorithm= out")
        if self.calibration is not None and not isinstance(self.calibration, str):
            raise UsageError(f"all-reduce: calibration={self.calibration!r}: give the path of a file, as text")
        if self.calibration is not None and self.algorithm != "auto":
            raise UsageError(
                f"all-reduce: calibration={self.calibration!r} is for algorithm='auto', which goes by it: add it, or "
                "leave calibration= out"
            )

    @property
    def reducing(self) -> "AllReduce":
        """Hook, algorithm and calibration."""
        return self

    def kept(self, replicas: int) -> str:
        """With PowerSGD each replica has what it has not told the others yet."""
        return f"{self.name}(hook=powersgd)" if self.hook == "powersgd" and replicas > 1 else self.name


@dataclass(frozen=True, kw_only=True)
class FullyShard(Sync):
    """As AllReduce, but each replica keeps only its share of weights, gradients and optimizer state.

    On processes this is torch's FSDP2 (ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054): a stage's weights are gathered
    for its first forward after an update, and at its last backward before the next one each replica gets the sum of
    its share's gradients. `reshard` gives weights up after each pass and sums after each backward: least memory, and
    messages for each micro-batch. Layers of a stage with at least `min_block` bytes of weights go one by one.
    """

    name: ClassVar[str] = "fully-shard"
    agreement: ClassVar[Agreement] = "A"
    reshard: bool = False
    min_block: int = 1 << 20

    def __post_init__(self) -> None:
        check_whole(self, "min_block", 0)
        if not isinstance(self.reshard, bool):
            raise UsageError(f"fully-shard: reshard={self.reshard!r}: choose True or False")

    @property
    def sharding(self) -> "FullyShard":
        """When weights are given up, and which layers go alone."""
        return self

    def check(self, method: Method, precision: str | None) -> None:
        """One version of the weights, of one dtype."""
        if method.weights != "current" or method.cure.forward is not None or method.cure.backward is not None:
            raise UsageError(
                f"method {method} works with several versions of the weights, and {self.name} gathers the current one: "
                "use sync='all-reduce', or a method whose passes see the current weights (1f1b, greedy, ...)"
            )
        if precision == "bf16":
            raise UsageError(
                f"precision='bf16' steps float32 masters, which {self.name} does not share out: use "
                "precision='bf16-autocast', or sync='all-reduce'"
            )


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Sync):
    """Replicas train by themselves; after every `every` updates of a stage its weights are averaged (Stich 2018).

    With `start` the first so many updates are made together, with the mean of the replicas' gradients: post-local SGD
    (Lin et al. 2018, arXiv 1808.07217), torch's `post_localSGD_hook` and `PostLocalSGDOptimizer`. (torch averages first
    after the first local update, this after `every` of them.)
    """

    name: ClassVar[str] = "local-sgd"
    agreement: ClassVar[Agreement] = "M"
    every: int = 8
    start: int | None = None

    def __post_init__(self) -> None:
        check_whole(self, "every", 1)
        if self.start is not None:
            check_whole(self, "start", 0)
            object.__setattr__(self, "agreement", "AM")

    def kept(self, replicas: int) -> str:
        """One replica trains as it does under any choice."""
        return self.name if replicas > 1 else AllReduce.name


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Sync):
    """As LocalSGD, but the average is only the direction of an outer step with Nesterov momentum.

    Douillard et al. 2023, arXiv 2311.08105, algorithm 1: the outer gradient is the weights at the last meeting minus
    the average now.
    """

    name: ClassVar[str] = "diloco"
    agreement: ClassVar[Agreement] = "M"
    every: int = 8
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        check_whole(self, "every", 1)
        if not (is_number(self.outer_lr) and 0 < self.outer_lr < float("inf")):
            raise UsageError(f"diloco: outer_lr={self.outer_lr!r}: choose a positive number")
        if not (is_number(self.outer_momentum) and 0 <= self.outer_momentum < 1):
            raise UsageError(
                f"diloco: outer_momentum={self.outer_momentum!r}: choose from 0 up to, but not including, 1"
            )


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Sync):
    """Replicas never wait for each other's gradients: each pushes its own to servers and takes the newest weights.

    Stale synchronous training with a bound on staleness instead of clocks (after Ho et al. 2013; Li et al. 2014). Of
    each stage there is one sequence of updates. An update's *staleness* is how many others came between the weights
    that its replica last took and the update; a replica has to wait where one more update would leave another one no
    way to stay within `staleness`. With R replicas R - 1 is the least that can work.

    The servers are the replicas' own processes: each keeps a shard of every stage's weights, with the user's optimizer
    and scheduler for it, and answers while it computes. A minibatch makes R updates of each stage, one by each replica
    with the gradient of its own part's mean loss: the scheduler counts all of them, and `clip` limits each. Gradients
    that are sparse (`nn.Embedding(sparse=True)`) travel as the rows they touch, and so do the weights that come back.

    `Trainer.step` returns losses `staleness` minibatches later than it would otherwise; so far a replica may be behind
    another. Pauses need everybody: `evaluate`, `gather`, `save`, `load`, `record` flush first, and a script that stops
    stepping in one process only has to call `flush`.

    Which replica comes when is decided as it happens. `Trainer.order()` tells, and `order`, an `Order` or the path of a
    written one, makes another run go the same way, on processes or on one device: to the same numbers, to the last bit.
    On one device replicas take turns where `order` does not say otherwise. A checkpoint keeps the order, so that it
    counts from the first update also where training has gone on from one.
    """

    name: ClassVar[str] = "parameter-server"
    agreement: ClassVar[Agreement] = "M"
    staleness: int = 4
    order: Order | str | None = None

    def __post_init__(self) -> None:
        check_whole(self, "staleness", 0)
        if not isinstance(self.order, Order | str | None):
            raise UsageError(f"parameter-server: order={self.order!r}: give what Trainer.order() returned, or its path")
        self.given()

    def __str__(self) -> str:
        order = repr(self.order) if isinstance(self.order, str) else self.order
        return f"{self.name}(staleness={self.staleness}{'' if order is None else f', order={order}'})"

    @property
    def action(self) -> None:
        """An update is a push to the servers and what they answer."""
        return None

    @property
    def serving(self) -> "ParameterServer":
        """The bound on staleness and the order of updates."""
        return self

    def given(self) -> Order:
        """The order that replicas are to keep; without updates if none was given."""
        return Order.read(self.order) if isinstance(self.order, str) else self.order or Order({}, {})

    def check_replicas(self, replicas: int) -> None:
        """Every replica's update comes after one of each other: less staleness than that cannot be."""
        if self.staleness < replicas - 1:
            raise UsageError(
                f"parameter-server: staleness={self.staleness} with {replicas} replicas: even if they take turns, "
                f"{replicas - 1} updates of others come between a replica's weights and its own update; choose "
                f"staleness={replicas - 1} or more, or sync='all-reduce', where gradients are never stale"
            )

    def lag(self, replicas: int) -> int:
        """So many minibatches suffice for one replica to be outrun up to the bound."""
        return self.staleness if replicas > 1 else 0

    def updates(self, replicas: int) -> int:
        """One for each replica."""
        return replicas


CHOICES: dict[str, type[Sync]] = {
    each.name: each for each in (AllReduce, FullyShard, LocalSGD, DiLoCo, ParameterServer)
}


def find(sync: str | Sync) -> Sync:
    """The choice of that name, "all-reduce" or "local-sgd(every=8)". Raises UsageError if there is none."""
    if isinstance(sync, Sync):
        return sync
    if not isinstance(sync, str):
        raise UsageError(f"sync={shown(sync)}: give a name, such as 'all-reduce', or stretto.LocalSGD(every=8)")
    bare, options = parse(sync, "sync")
    if bare not in CHOICES:
        raise UsageError(f"unknown sync {bare!r}: {nearest(bare, CHOICES)}")
    known = [field.name for field in fields(CHOICES[bare])]
    for key in options:
        if key not in known:
            raise UsageError(f"sync {bare!r} has no option {key!r}: {nearest(key, known)}")
    return CHOICES[bare](**options)


def written(value: Any) -> str:
    """An option's value as `find` reads it again: in quotes if it is text that would be no word there."""
    is_word = isinstance(value, str) and value.replace("-", "_").isidentifier() and value.lower() not in WORDS
    return repr(value) if isinstance(value, str) and not is_word else str(value)


def check_algorithm(name: str) -> None:
    """Refuse a name that `stretto.collectives.all_reduce` does not know."""
    from stretto.collectives.algorithms import ALGORITHMS  # it imports torch

    known = [*ALGORITHMS, "auto"]
    if not is_among(name, known):
        raise UsageError(f"all-reduce: unknown algorithm {shown(name)}: {nearest(str(name), known)}")


def check_whole(sync: Sync, name: str, least: int) -> None:
    """Refuse what is no whole number of at least `least`."""
    value = getattr(sync, name)
    if not (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        raise UsageError(f"{sync.name}: {name}={value!r}: choose a whole number of at least {least}")


def is_number(value: Any) -> bool:
    """Whether a value is a number; True is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
