"""How replicas stay together, as data: the values of `sync=`. No torch in here."""

from dataclasses import dataclass
from typing import ClassVar

from stretto.errors import UsageError, nearest
from stretto.methods.definition import Method
from stretto.options.checks import is_among, is_number, is_whole, shown
from stretto.options.named import choice_text, find_choice
from stretto.replicas.parameter_server.tickets import Order
from stretto.schedule.added_actions import Agreement

HOOKS = ("bf16", "fp16", "powersgd")


@dataclass(frozen=True, kw_only=True)
class Sync:
    """What replicas do to stay together. `agreement` is the kind of action with which they meet."""

    name: ClassVar[str]
    agreement: ClassVar[Agreement]

    def __str__(self) -> str:
        return choice_text(self.name, self)

    @property
    def action(self) -> Agreement | None:
        """The kind of action with which replicas meet in the schedule; None if their meeting is part of an update."""
        return self.agreement

    @property
    def reducing(self) -> "AllReduce | None":
        """This strategy if replicas sum gradients themselves (hook, algorithm, calibration); else None."""
        return None

    @property
    def sharding(self) -> "FullyShard | None":
        """This strategy if weights are sharded over the replicas; None where each replica has all of them."""
        return None

    @property
    def shares_optimizer(self) -> bool:
        """Whether each replica steps a share of the weights only, and keeps no more of the optimizer's state."""
        return False

    @property
    def serving(self) -> "ParameterServer | None":
        """This strategy if servers hold the weights; None without servers."""
        return None

    def checkpoint_name(self, replicas: int) -> str:
        """The name of this strategy in the manifest of a checkpoint of `replicas` replicas."""
        return self.name

    def check(self, method: Method, precision: str | None) -> None:
        """Raise UsageError if replicas cannot train with this method or precision under this strategy."""

    def check_replicas(self, replicas: int) -> None:
        """Raise UsageError if this strategy does not work with `replicas` replicas."""

    def lag(self, replicas: int) -> int:
        """How many minibatches later than without replicas a step returns a loss."""
        return 0

    def updates(self, replicas: int) -> int:
        """How many updates of each stage a minibatch makes, as the stage's scheduler counts them."""
        return 1


@dataclass(frozen=True, kw_only=True)
class AllReduce(Sync):
    """Replicas have equal weights: before each update of a stage its gradients are summed over all replicas.

    The sum is the gradient of the whole minibatch, however its examples are divided among replicas. `hook` compresses
    the gradients sent, as torch's communication hook of that name does: bf16, fp16, powersgd (Vogels et al. 2019).
    `algorithm` is one of `stretto.collectives.all_reduce`; by default torch's own. "auto" takes for each message the
    fastest algorithm according to the file `calibration`, or else to what `stretto calibrate --collectives` measured on
    this machine, or else to built-in constants. The calibration of the first process counts for all of them.
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
                f"all-reduce: calibration={self.calibration!r} is for algorithm='auto' only: add it, or "
                "leave calibration= out"
            )

    @property
    def reducing(self) -> "AllReduce":
        """This strategy: hook, algorithm and calibration."""
        return self

    def checkpoint_name(self, replicas: int) -> str:
        """With the hook if it is PowerSGD: then each replica has a state of its own, the gradients not sent yet."""
        return f"{self.name}(hook=powersgd)" if self.hook == "powersgd" and replicas > 1 else self.name


@dataclass(frozen=True, kw_only=True)
class ShardOptimizer(Sync):
    """As AllReduce, but each replica updates its share of the weights, and keeps optimizer state of no others.

    ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054), Megatron's distributed optimizer: before an update each
    replica gets the sum of its share's gradients, and after it the weights of the other shares. Float32 masters
    (precision="bf16") are shared out as well. Shares have as many elements each, wherever they cut a tensor; an
    optimizer that looks at whole tensors (LAMB, LARS) gets whole ones, dealt out by size.
    """

    name: ClassVar[str] = "shard-optimizer"
    agreement: ClassVar[Agreement] = "A"

    @property
    def shares_optimizer(self) -> bool:
        """True: each replica keeps the state of its share of the parameters."""
        return True

    def check(self, method: Method, precision: str | None) -> None:
        """Raise UsageError for a method with several versions of the weights."""
        refuse_versions(method, self)


@dataclass(frozen=True, kw_only=True)
class FullyShard(Sync):
    """As AllReduce, but each replica keeps only its shard of weights, gradients and optimizer state.

    On processes this is torch's FSDP2 (ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054): a stage's weights are gathered
    for its first forward after an update, and its last backward before the next update gives each replica the sum of
    its shard's gradients. `reshard` frees the gathered weights after each forward and backward, and sums after each
    backward: least memory, and messages for each micro-batch. Each layer with at least `min_block` bytes of weights is
    gathered separately.
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
        """This strategy: `reshard` and `min_block`."""
        return self

    def check(self, method: Method, precision: str | None) -> None:
        """Raise UsageError for a method with several versions of the weights, or a precision with float32 masters."""
        refuse_versions(method, self)
        if precision == "bf16":
            raise UsageError(
                f"precision='bf16' steps float32 masters, which {self.name} does not shard: use "
                "precision='bf16-autocast', or sync='all-reduce'"
            )


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Sync):
    """Replicas train by themselves; after every `every` updates of a stage its weights are averaged (Stich 2018).

    With `start`, the first `start` updates use the mean of the replicas' gradients: post-local SGD (Lin et al. 2018,
    arXiv 1808.07217), torch's `post_localSGD_hook` and `PostLocalSGDOptimizer`. (torch first averages weights after the
    first local update, this after `every` local updates.)
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

    def checkpoint_name(self, replicas: int) -> str:
        """The strategy's name; that of `AllReduce` for one replica, which trains alike under both."""
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

    Stale synchronous training with a bound on staleness instead of clocks (after Ho et al. 2013; Li et al. 2014). Each
    stage has one sequence of updates. An update's *staleness* is the number of updates by other replicas since its
    replica last took the weights. A replica waits where its update would force another replica beyond the bound
    `staleness`. With R replicas the smallest possible bound is R - 1.

    The servers are the replicas' own processes: each keeps a shard of every stage's weights, with the user's optimizer
    and scheduler for it, and answers while it computes. A minibatch makes R updates of each stage, one by each replica
    with the gradient of its own part's mean loss: the scheduler counts all of them, and `clip` limits each. Sparse
    gradients (`nn.Embedding(sparse=True)`) are sent as the rows they touch, and so are the weights sent back.

    `Trainer.step` returns losses `staleness` minibatches later than it would otherwise, since a replica may be that far
    behind another. A pause needs all replicas: `evaluate`, `gather`, `save`, `load`, `record` flush first, and a script
    that stops stepping in one process must call `flush` there.

    The order of the replicas' updates is not determined beforehand. `Trainer.order()` returns it, and `order`, an
    `Order` or the path of a written one, makes another run follow it, on processes or on one device: to the same
    numbers, to the last bit. On one device replicas take turns where `order` does not say otherwise. A checkpoint keeps
    the order, so that it counts from the first update also in a resumed training.
    """

    name: ClassVar[str] = "parameter-server"
    agreement: ClassVar[Agreement] = "M"
    staleness: int = 4
    order: Order | str | None = None

    def __post_init__(self) -> None:
        check_whole(self, "staleness", 0)
        if not isinstance(self.order, Order | str | None):
            raise UsageError(f"parameter-server: order={self.order!r}: give what Trainer.order() returned, or its path")
        self.requested_order()

    def __str__(self) -> str:
        order = repr(self.order) if isinstance(self.order, str) else self.order
        return f"{self.name}(staleness={self.staleness}{'' if order is None else f', order={order}'})"

    @property
    def action(self) -> None:
        """None: an update is itself a push to the servers, and their answer."""
        return None

    @property
    def serving(self) -> "ParameterServer":
        """This strategy: the bound on staleness and the order of updates."""
        return self

    def requested_order(self) -> Order:
        """The order that replicas must follow; an empty one if `order` is None. Raises UsageError as `Order.read`."""
        return Order.read(self.order) if isinstance(self.order, str) else self.order or Order({}, {})

    def check_replicas(self, replicas: int) -> None:
        """Raise UsageError if `staleness` is below R - 1, the staleness of R replicas that take turns."""
        if self.staleness < replicas - 1:
            raise UsageError(
                f"parameter-server: staleness={self.staleness} with {replicas} replicas: even if they take turns, "
                f"{replicas - 1} updates of others come between a replica's weights and its own update; choose "
                f"staleness={replicas - 1} or more, or sync='all-reduce', where gradients are never stale"
            )

    def lag(self, replicas: int) -> int:
        """`staleness`: other replicas can be that many minibatches ahead."""
        return self.staleness if replicas > 1 else 0

    def updates(self, replicas: int) -> int:
        """One update by each replica."""
        return replicas


CHOICES: dict[str, type[Sync]] = {
    strategy.name: strategy for strategy in (AllReduce, ShardOptimizer, FullyShard, LocalSGD, DiLoCo, ParameterServer)
}


def find(sync: str | Sync) -> Sync:
    """The strategy that a text names, such as "all-reduce" or "local-sgd(every=8)". Raises UsageError if none."""
    if isinstance(sync, Sync):
        return sync
    if not isinstance(sync, str):
        raise UsageError(f"sync={shown(sync)}: give a name, such as 'all-reduce', or stretto.LocalSGD(every=8)")
    return find_choice(sync, "sync", CHOICES)


def check_algorithm(name: str) -> None:
    """Raise UsageError for an algorithm that `stretto.collectives.all_reduce` does not have."""
    from stretto.collectives.algorithms import ALGORITHMS  # it imports torch

    known = [*ALGORITHMS, "auto"]
    if not is_among(name, known):
        raise UsageError(f"all-reduce: unknown algorithm {shown(name)}: {nearest(str(name), known)}")


def refuse_versions(method: Method, sync: Sync) -> None:
    """Raise UsageError for a method with several versions of the weights."""
    if method.weights != "current" or method.cure.forward is not None or method.cure.backward is not None:
        raise UsageError(
            f"method {method} works with several versions of the weights, and {sync.name} gathers the current one: "
            "use sync='all-reduce', or a method whose passes see the current weights (1f1b, greedy, ...)"
        )


def check_whole(sync: Sync, name: str, least: int) -> None:
    """Raise UsageError unless the option `name` is a whole number of at least `least`."""
    value = getattr(sync, name)
    if not (is_whole(value) and value >= least):
        raise UsageError(f"{sync.name}: {name}={value!r}: choose a whole number of at least {least}")


ALIKE = (AllReduce.name, ShardOptimizer.name, FullyShard.name)  # a checkpoint has one optimizer state for all replicas


def refuse_other(place: str, saved: str | None, had: int, sync: Sync, replicas: int) -> None:
    """Raise UsageError if `replicas` replicas under `sync` cannot resume from the checkpoint at `place`.

    `had` and `saved` are its number of replicas and its sync (None: it is of format 2). Where all its replicas have the
    same optimizer state, any number of replicas can resume, also under another sync. The state of a single replica also
    serves any number: each starts with it. A parameter server needs its own sync and number of replicas.
    """
    name = sync.checkpoint_name(replicas)
    if saved is None and name not in ALIKE:
        raise UsageError(
            f"{place} was written by a version of Stretto that kept the optimizer of one replica for all, and "
            f"sync={name!r} needs each replica's: train anew, or go on with that version"
        )
    if saved is None or (saved in ALIKE and name != ParameterServer.name):
        return
    saved_mesh = f"mesh=Mesh(data={had}) (--data-parallel {had})"
    if saved != name:
        raise UsageError(
            f"{place} was saved with sync={saved!r}, whose optimizer states sync={name!r} cannot go on from: "
            f"go on with sync={saved!r} and {saved_mesh}"
        )
    if had != replicas and (had > 1 or name == ParameterServer.name):
        raise UsageError(
            f"{place} was saved with sync={saved!r} by {had} replicas, each with optimizer state of its own, and this "
            f"trainer has {replicas}: go on with {saved_mesh}"
        )
