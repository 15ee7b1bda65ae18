"""The list of runs: what is trained, how, on how many processes, and the command lines."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recorded.plans import SETTINGS, published

STAGES = 4
SIZES = (16, 16, 17, 15, 16, 20, 16, 13, 16, 16)  # examples of each minibatch: uneven micro-batches, too


@dataclass(frozen=True)
class Run:
    """One training run. `options` are the Trainer's; `stops` what happens after half of the minibatches."""

    method: str
    network: str = "mlp"
    optimizer: str = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)
    scheduler: str | None = None
    data: int = 1
    tensor: int = 1
    space: tuple[int, int] = (1, 1)
    sync: str = "all-reduce"
    stops: str = "flush"  # flush, or reload: save, and go on in a Trainer that began with other weights
    source: str = "modules"  # modules, functions (each builds a stage) or split (of the whole network)
    processes: int = 1
    epochs: int = 1

    @property
    def name(self) -> str:
        """All that differs from a plain run."""
        plain = Run(self.method)
        keys = ("optimizer", "scheduler", "data", "tensor", "space", "sync", "stops", "source", "processes", "epochs")
        special = {key: getattr(self, key) for key in keys if getattr(self, key) != getattr(plain, key)}
        given = [f"{key} {value}" for key, value in [*special.items(), *self.options.items()]]
        return " | ".join([self.method, self.network, *given])


@dataclass(frozen=True)
class Command:
    """One command line; {out} is a folder of its own. Its JSON is recorded, and the weights it leaves there."""

    words: tuple[str, ...]
    alone: bool = False  # in a process of its own, as it starts others

    @property
    def name(self) -> str:
        """As a user types it."""
        return "stretto " + " ".join(f"'{word}'" if " " in word else word for word in self.words)


METHODS = (
    "backprop", "greedy", "overlapping", "chunked", "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2",
    "zb-v", "dualpipe-v", "pipedream", "pipedream-2bw", "paci", "pb", "pb-sc", "pb-lwp", "pb-lwpw", "pb-lwp-sc",
    "spectrain", "pipeoptim", "nesterov", "pipemare", "synthetic-gradients",
)  # fmt: skip
WITHOUT_REPLICAS = ("synthetic-gradients",)  # refused: what predicts gradients learns in one process
TWO_WORKERS = ("interleaved", "looped-bfs", "zb-v", "dualpipe-v")  # several stages a worker
SYNCS = (
    "all-reduce", "all-reduce(algorithm=ring)", "all-reduce(hook=bf16)", "all-reduce(hook=fp16)",
    "all-reduce(hook=powersgd)", "shard-optimizer", "fully-shard", "fully-shard(reshard=True, min_block=0)",
    "local-sgd(every=2)", "local-sgd(every=3, start=4)", "diloco(every=2)",
    "diloco(every=3, outer_lr=0.5, outer_momentum=0.5)",
    "parameter-server(staleness=1)", "parameter-server(staleness=3)",
)  # fmt: skip
ALGORITHMS = (
    "single-master", "parameter-server", "recursive-doubling", "rabenseifner", "double-tree", "hierarchical",
)  # fmt: skip


def plain(method: str, **others: Any) -> Run:
    """A run with the optimizer and the workers that the method takes."""
    bare = method.partition("(")[0]
    optimizer = others.pop("optimizer", {"nesterov": "nadam", "pipeoptim": "adam"}.get(bare, "sgd"))
    options = {"workers": 2} if bare in TWO_WORKERS else {}
    return Run(method, optimizer=optimizer, options={**options, **others.pop("options", {})}, **others)


def with_options() -> list[Run]:
    """Methods with their options."""
    mlp = [
        "overlapping(combine=mean)", "overlapping(delay=1)", "overlapping(combine=mean, delay=1)",
        "chunked(chunks=3)", "chunked(chunks=4)",
        "gpipe(microbatches=3)", "gpipe(microbatches=8, recompute=True)", "1f1b(microbatches=6)",
        "1f1b(microbatches=5, recompute=True)", "interleaved(microbatches=6)", "looped-bfs(microbatches=4)",
        "zb-h1(microbatches=6)", "zb-v(microbatches=6)", "csv(path=schedule.csv)", "pipedream(recompute=True)",
        "pipedream(warmup=3)", "pipedream(warmup=2, finish=7)", "pipedream-2bw(microbatches=4)",
        "pipedream-2bw(microbatches=6, recompute=True)", "paci(every=1)", "paci(every=3)",
        "paci(recompute=True)", "pb(stash=True)", "pb(recompute=True)", "pb(recompute=2)", "pb(warmup=3)",
        "pb(finish=6)", "pb(feedback=1)", "pipedream(feedback=delay, warmup=3)", "pipedream-2bw(feedback=1)",
        "paci(feedback=0.5)",
        "pb(spike=True, stash=True)", "pb(predict=velocity, horizon=2)", "pb(predict=velocity, horizon=decayed)",
        "pb(predict=weight, recompute=True)", "pb(predict=weight, spike=True, stash=True)", "pb(predict=step)",
        "pb-lwp-sc(horizon=decayed, warmup=2)", "spectrain(recompute=True)", "pipeoptim(warmup=2)",
        "nesterov(warmup=2)", "pipemare(reschedule=6)", "pipemare(correct=False)", "pipemare(warmup=3)",
        "pipemare(microbatches=2, reschedule=5)", "pipemare(recompute=True)",
    ]  # fmt: skip
    heads = {
        "mlp": ["linear", "two-layer", "two-layer(width=7)", "infopro", "auglocal", "man"],
        "cnn": ["pooled", "two-layer", "infopro", "auglocal", "man(depth=2)"],
        "transformer": ["language", "two-layer", "auglocal", "blocks", "segprop(layers=1)", "solo", "man(every=2)"],
    }
    return [
        *(plain(method) for method in mlp),
        *(plain(f"greedy(head={head})", network=name) for name, fitting in heads.items() for head in fitting),
        plain("overlapping(head=two-layer)", network="cnn"),
        plain("chunked(chunks=3, head=language)", network="transformer"),
        plain("overlapping(delay=1, share_top=1)", network="transformer"),
        plain("chunked(chunks=3, share_top=1)", network="transformer"),
        plain("greedy(head=sequence)", network="classifier"),
        plain("synthetic-gradients(head=mlp, labels=True, rate=2)"),
        plain("synthetic-gradients(delay=3)"),
        plain("synthetic-gradients(head=conv(hidden=2, width=5), labels=True)", network="cnn"),
        plain("synthetic-gradients(labels=True)", network="transformer"),
    ]


def with_trainer_options() -> list[Run]:
    """Optimizers, schedulers, clipping, precision, sources of stages, and networks of other forms."""
    some = ("gpipe(microbatches=3)", "pb", "pipedream", "greedy")
    optimizers = ("adam", "adamw", "lars", "lamb", "muon", "soap", "lion", "groups", "sgd-nesterov", "rmsprop")
    schedulers = ("step", "warmup", "cosine", "one-cycle")
    return [
        *(plain(method, optimizer=name) for method in some for name in optimizers),
        *(plain("pipeoptim", optimizer=name) for name in ("sgd", "adamw", "nadam", "muon", "soap", "lion")),
        *(plain(f"pipedream(rotate={sides}, refresh=3)", optimizer="adamw") for sides in ("True", "one-sided")),
        plain("pb(rotate=True)", optimizer="adam", options={"precision": "bf16"}),
        plain("pb(predict=step)", optimizer="adam"),
        plain("pb-lwpw", optimizer="adam"),
        *(plain(method, scheduler=name) for method in ("1f1b", "pb-lwp-sc", "pipemare") for name in schedulers),
        *(plain(method, options={"clip": 0.05}) for method in ("backprop", "zb-v", *METHODS[12:16], "greedy")),
        *(
            plain(method, options={"precision": "bf16"})
            for method in (*some, "pb-lwp-sc", "spectrain", "pipemare", "nesterov")
        ),
        *(plain(method, options={"precision": "bf16-autocast"}) for method in ("1f1b", "pipedream", "overlapping")),
        *(plain(method, network="cnn") for method in METHODS),
        *(plain(method, network="tied") for method in METHODS if method != "pb-lwpw"),
        *(plain(method, network="skipping") for method in METHODS if method not in ("greedy", "overlapping")),
        *(plain(method, network="mlp, squares") for method in some),
        *(plain(method, network="transformer, counted") for method in (*some, "zb-v", "pipedream-2bw", "chunked")),
        *(plain(method, source="functions") for method in ("1f1b", "pb", "greedy")),
        *(
            plain(method, source="split", network=name)
            for method in ("1f1b", "pb", "overlapping")
            for name in ("mlp", "cnn", "transformer")
        ),
        plain("1f1b", options={"workers": 1}),
        plain("greedy", options={"workers": 2}),
    ]


def with_replicas() -> list[Run]:
    """Replicas, emulated: every method, and every way to agree."""
    several = {
        "all-reduce": ("gpipe", "pipedream", "pb-lwp-sc", "greedy", "pipemare"),
        "shard-optimizer": ("1f1b", "zb-v", "greedy"),
        "fully-shard": ("1f1b", "zb-v", "overlapping"),
        "local-sgd": ("gpipe", "pipedream", "pb-lwp-sc", "greedy"),
        "diloco": ("gpipe", "pipedream", "pb-lwp-sc", "greedy"),
        "parameter-server": ("1f1b", "pipedream", "greedy"),
    }
    return [
        *(plain(method, data=2) for method in METHODS if method not in (*several["all-reduce"], *WITHOUT_REPLICAS)),
        *(
            plain(method, data=2, sync=sync)
            for sync in SYNCS
            if "powersgd" not in sync  # not emulated
            for method in several[sync.partition("(")[0]]
        ),
        *(plain("1f1b", data=2, sync=f"all-reduce(algorithm={name})") for name in ALGORITHMS),
        plain("gpipe(microbatches=2)", data=3, network="cnn"),
        plain("pb", data=2, network="tied"),
        plain("1f1b", data=2, network="transformer, counted", options={"clip": 0.05}),
        plain("pb-lwp-sc", data=2, options={"precision": "bf16"}),
        plain("pipedream", data=2, sync="local-sgd(every=2)", optimizer="adam", scheduler="step"),
        plain("1f1b", data=2, sync="parameter-server(staleness=2)", optimizer="adam", options={"clip": 0.05}),
    ]


def with_checkpoints() -> list[Run]:
    """Saved after half of the minibatches, and gone on in another Trainer."""
    replicas = ("all-reduce", "shard-optimizer", "fully-shard", "local-sgd(every=3, start=4)", "diloco(every=2)")
    return [
        *(plain(method, stops="reload") for method in METHODS),
        plain("pipemare(warmup=7, reschedule=9)", stops="reload", scheduler="cosine"),
        plain("pb(warmup=3, finish=8, recompute=True)", stops="reload", optimizer="adam"),
        plain("pb-lwp-sc", stops="reload", options={"precision": "bf16"}),
        plain("1f1b", stops="reload", network="tied", optimizer="lamb", options={"clip": 0.05}),
        plain("greedy(head=infopro)", stops="reload", network="cnn", optimizer="groups"),
        plain("synthetic-gradients(head=mlp, delay=2)", stops="reload", optimizer="adam", scheduler="cosine"),
        *(plain("1f1b", stops="reload", data=2, sync=sync) for sync in replicas),
        plain("pipedream", stops="reload", data=2, sync="parameter-server(staleness=3)"),
    ]


def on_processes() -> list[Run]:
    """The same on two real processes: stages, replicas, shared weights, shared images."""
    pipelines = [method for method in METHODS if method != "backprop"]
    emulated = [
        *(plain(method) for method in pipelines),
        plain("gpipe(microbatches=3, recompute=True)"),
        plain("pb(stash=True, warmup=3)"),
        plain("pipemare(reschedule=6, microbatches=2)"),
        plain("pb-lwp-sc", network="cnn"),
        plain("1f1b", network="tied", options={"clip": 0.05}),
        plain("pipedream", network="tied"),
        plain("zb-h1", network="transformer, counted"),
        plain("pb", network="skipping", scheduler="cosine"),
        plain("greedy(head=infopro)", network="cnn"),
        plain("spectrain", options={"precision": "bf16"}),
        plain("1f1b", source="functions"),
        plain("1f1b", source="split", network="transformer"),
        *(plain(method, stops="reload") for method in ("zb-v", "pb-lwp-sc", "pipedream-2bw", "overlapping")),
    ]
    replicas = [
        *(
            Run("pipedream" if sync.startswith("parameter") else "gpipe(microbatches=2)", data=2, sync=sync)
            for sync in SYNCS
            if "powersgd" not in sync
        ),
        *(Run("backprop", data=2, sync=f"all-reduce(algorithm={name})") for name in ALGORITHMS),
        *(Run(method, data=2) for method in ("pb-lwp-sc", "greedy", "pipemare")),
        Run("backprop", network="transformer, counted", data=2, options={"clip": 0.05}),
        *(
            Run("1f1b", data=2, sync=sync, stops="reload")
            for sync in ("shard-optimizer", "fully-shard", "local-sgd(every=3, start=4)", "diloco(every=2)")
        ),
        *(
            Run("1f1b", data=2, sync="all-reduce(hook=powersgd)", stops=stops, epochs=3)  # it begins after 10 updates
            for stops in ("flush", "reload")
        ),
        Run("pipedream", data=2, sync="parameter-server(staleness=3)", stops="reload"),
    ]
    shared = [
        Run("1f1b", tensor=2),
        Run("pb-lwp-sc", network="transformer", tensor=2),
        Run("pipedream", tensor=2, stops="reload"),
        Run("1f1b", network="images", space=(2, 1)),
        Run("pb", network="images", space=(1, 2)),
    ]
    on_two = [replace(run, options={**run.options, "workers": 2}) for run in emulated]
    return [replace(run, processes=2) for run in (*on_two, *replicas, *shared)]


def commands() -> list[Command]:
    """Command lines: what they train, and what they say on paper."""
    train = ("train", "--json", "--out", "{out}", "--steps", "6")
    small = ("--batch-size", "16", "--model-options.width", "8")
    two = ("--workers", "2", "--stages", "2")
    compare = ("compare", "--json", "--out", "{out}", "--steps", "3", "--lr", "0.01", *small)
    plan = ("plan", "--json", "--out", "{out}.toml", "--model", "mlp", "--cluster", "8-a100")
    return [
        Command((*train, *small, "--method", "pb-lwp-sc")),
        Command((*train, *small, "--model", "cnn", "--method", "chunked(chunks=3)", "--measure", "cosine,probes")),
        Command((*train, *small, "--model", "transformer", "--data", "pydoc", "--data-parallel", "2")),
        Command((*train, *small, "--model", "encoder-decoder", "--data", "number-words", "--method", "1f1b")),
        Command((*train, *small, "--measure", "sharpness,noise", "--optimizer", "lamb", "--lr-warmup", "0.5")),
        Command((*train, *small, *two, "--method", "pb", "--checkpoint-every", "2"), alone=True),
        Command((*train, *small, *two, "--data-parallel", "2", "--sync", "local-sgd(every=2)"), alone=True),
        Command((*compare, "--methods", "backprop,overlapping,1f1b,pipemare"), alone=True),
        *(Command(("show", method, "--stages", "4", "--json")) for method in METHODS),
        *(
            Command(("simulate", "--method", method, "--stages", "4", "--backward", "2", "--latency", "0.1", "--json"))
            for method in METHODS
        ),
        *(
            Command((*plan, "--batch-size", "64", "--methods", methods, *more))
            for methods, more in (
                ("synchronous", ()),
                ("asynchronous", ("--all-workers",)),
                ("all", ("--workers", "4", "--objective", "memory")),
            )
        ),
        *(Command(("plan", *words, "--json", "--out", "{out}.toml")) for words in (*SETTINGS, *published())),
    ]


RUNS: tuple[Run, ...] = (
    *(plain(method) for method in METHODS),
    *with_options(),
    *with_trainer_options(),
    *with_replicas(),
    *with_checkpoints(),
    *on_processes(),
)
COMMANDS = tuple(commands())
