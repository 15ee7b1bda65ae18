"""Wrong calls of the Python API: a call that works, with one or two arguments replaced. It works, or StrettoError."""

import contextlib
import os
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import stretto
from attack.protocol import Outcome
from stretto import collectives, cost, data, heads, models, optim, parallel, schedule

SHARE = 250

SYNCHRONOUS = ["backprop", "gpipe(microbatches=2)", "1f1b(microbatches=2)", "zb-h1(microbatches=2)"]
DELAYED = ["pb", "pb-lwp-sc", "pipedream", "pipedream-2bw(microbatches=3)", "paci", "pipemare(reschedule=9)"]
LOCAL = ["greedy", "overlapping", "overlapping(delay=1)", "chunked"]
METHODS = [*SYNCHRONOUS, *DELAYED, *LOCAL]
SYNCS = ["all-reduce", "fully-shard", "local-sgd(every=2)", "diloco(every=2)", "parameter-server(staleness=2)"]


def raising(*_: Any, **__: Any) -> Any:
    """A function of a user's that fails."""
    raise IndexError("mine")


# What is put in an argument's place. Each is made anew: a generator is used up, and a tensor may be changed.
WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "5": lambda: 5,
    "1": lambda: 1,
    "0": lambda: 0,
    "-1": lambda: -1,
    "10**30": lambda: 10**30,
    "2**63": lambda: 2**63,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "True": lambda: True,
    "False": lambda: False,
    "'text'": lambda: "text",
    "''": lambda: "",
    "'a\\0b'": lambda: "a\0b",
    "b''": lambda: b"",
    "()": lambda: (),
    "[]": lambda: [],
    "{}": lambda: {},
    "[None]": lambda: [None],
    "(1, 2)": lambda: (1, 2),
    "['a']": lambda: ["a"],
    "{'a': 1}": lambda: {"a": 1},
    "{1: None}": lambda: {1: None},
    "set()": lambda: set(),
    "object()": lambda: object(),
    "len": lambda: len,
    "int": lambda: int,
    "a class": lambda: type("Mine", (), {}),
    "a module of Python's": lambda: os,
    "an exception": lambda: ValueError("text"),
    "lambda: None": lambda: lambda: None,
    "lambda *a: None": lambda: lambda *a, **k: None,
    "a generator": lambda: (each for each in [1, 2]),
    "range(3)": lambda: range(3),
    "Path('/')": lambda: Path("/"),
    "Path('missing')": lambda: Path("missing"),
    "'1f1b'": lambda: "1f1b",
    "nn.Linear(3, 3)": lambda: nn.Linear(3, 3),
    "nn.Linear(5, 2)": lambda: nn.Linear(5, 2),
    "nn.Linear on meta": lambda: nn.Linear(3, 3, device="meta"),
    "nn.Linear of float64": lambda: nn.Linear(3, 3, dtype=torch.float64),
    "nn.Identity()": nn.Identity,
    "nn.Module()": nn.Module,
    "nn.Linear": lambda: nn.Linear,
    "[nn.Linear(3, 3)]": lambda: [nn.Linear(3, 3)],
    "[nn.Linear(3, 3), None]": lambda: [nn.Linear(3, 3), None],
    "nn.ModuleDict()": nn.ModuleDict,
    "nn.Sequential()": nn.Sequential,
    "nn.LazyLinear(3)": lambda: nn.LazyLinear(3),
    "SGD": lambda: torch.optim.SGD,
    "an optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
    "a tensor [4, 3]": lambda: torch.ones(4, 3),
    "a tensor [2, 3]": lambda: torch.ones(2, 3),
    "a tensor [4, 5]": lambda: torch.ones(4, 5),
    "a tensor [4]": lambda: torch.ones(4),
    "a tensor []": lambda: torch.tensor(1.0),
    "a tensor [0, 3]": lambda: torch.ones(0, 3),
    "a tensor [0]": lambda: torch.ones(0),
    "a tensor of int64": lambda: torch.ones(4, 3, dtype=torch.int64),
    "a tensor of float64": lambda: torch.ones(4, 3, dtype=torch.float64),
    "a tensor of bool": lambda: torch.ones(4, 3, dtype=torch.bool),
    "a complex tensor": lambda: torch.ones(4, 3, dtype=torch.complex64),
    "a sparse tensor": lambda: torch.ones(4, 3).to_sparse(),
    "a tensor on meta": lambda: torch.ones(4, 3, device="meta"),
    "a tensor of nan": lambda: torch.full((4, 3), float("nan")),
    "targets [4] of 9": lambda: torch.full((4,), 9),
    "targets [4] on meta": lambda: torch.ones(4, dtype=torch.int64, device="meta"),
    "numpy [4, 3]": lambda: np.ones((4, 3), dtype=np.float32),
    "numpy of objects": lambda: np.array([None, "text"]),
    "numpy of text": lambda: np.array(["a", "b", "c", "d"]),
    "a numpy number": lambda: np.float64(0.5),
    "torch.float32": lambda: torch.float32,
    "torch.device('meta')": lambda: torch.device("meta"),
    "{'a': tensor}": lambda: {"a": torch.ones(4, 3)},
    "{'a': numpy}": lambda: {"a": np.ones((4, 3))},
    "{1: tensor}": lambda: {1: torch.ones(4, 3)},
    "(tensor, None)": lambda: (torch.ones(4, 3), None),
    "(tensor, tensor)": lambda: (torch.ones(4, 3), torch.ones(4, 3)),
    "[tensor, tensor of 2]": lambda: [torch.ones(4, 3), torch.ones(2, 3)],
    "[(x, y)]": lambda: [(torch.ones(4, 3), torch.ones(4, dtype=torch.int64))],
    "[(x, None)]": lambda: [(torch.ones(4, 3), None)],
    "[x]": lambda: [torch.ones(4, 3)],
    "a Mesh": lambda: stretto.Mesh(data=2),
    "a Method": lambda: stretto.method("greedy"),
    "an Action": lambda: schedule.Action("F", 0, 0),
    "a Schedule": lambda: schedule.Schedule(((schedule.Action("F", 0, 0), schedule.Action("B", 0, 0)),)),
    "a Reach": lambda: schedule.Reach((None, 1)),
}


@dataclass
class Call:
    """A call that works: a function, its arguments by name, and others that may be added."""

    name: str
    function: Callable[..., Any]
    given: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    positional: int = 0  # the first so many arguments go by position
    spared: tuple[str, ...] = ()  # arguments that are never replaced
    lets_out: tuple[str, ...] = ()  # functions whose own errors are let out as they are, and tensors as torch's
    documented: tuple[type[Exception], ...] = ()  # beside StrettoError

    def made(self, values: dict[str, Any]) -> Any:
        """What it returns."""
        names = list(self.given)[: self.positional]
        rest = {key: value for key, value in values.items() if key not in names}
        return self.function(*(values[name] for name in names), **rest)


class Draws:
    """Kinds of calls, and what is put in their arguments' places."""

    def __init__(self, wrong: dict[str, Callable[[], Any]]) -> None:
        self.kinds: list[Callable[[random.Random], Call]] = []
        self._wrong = wrong

    def call(self, make: Callable[[random.Random], Call]) -> Callable[[random.Random], Call]:
        """Add one kind of call."""
        self.kinds.append(make)
        return make

    def attack(self, seed: int, kind: Callable[[random.Random], Call] | None = None) -> Outcome:
        """One call, of any kind unless one is given, in a folder of its own, with one or two arguments replaced."""
        draw = random.Random(seed)
        with folder_of_its_own(seed):
            return self._tried(draw, draw.choice(self.kinds) if kind is None else kind)

    def unspoiled(self, seed: int, kind: Callable[[random.Random], Call]) -> None:
        """Make a call of a kind as it is, with each of its further arguments."""
        with folder_of_its_own(seed):
            chosen = kind(random.Random(seed))
            chosen.made({**chosen.given, **chosen.more})

    def _tried(self, draw: random.Random, kind: Callable[[random.Random], Call]) -> Outcome:
        # Draws a call, spoils it and makes it.
        chosen = kind(draw)
        values = {**chosen.given, **{key: value for key, value in chosen.more.items() if draw.random() < 0.3}}
        places = [name for name in {**chosen.given, **chosen.more} if name not in chosen.spared]
        told = []
        for place in draw.sample(places, min(len(places), draw.choice([1, 1, 1, 2]))):
            name = draw.choice(list(self._wrong))
            values[place] = self._wrong[name]()
            told.append(f"{place}={name}")
        line = f"{chosen.name}({', '.join(told)})"
        try:
            chosen.made(values)
        except (stretto.StrettoError, *chosen.documented) as error:
            return Outcome(line, passed="refused") if str(error) else Outcome(line, "an error without a message")
        except Exception as error:  # noqa: BLE001 (what the attack looks for)
            own = [values[name] for name in chosen.lets_out if name in values]
            if any(isinstance(value, torch.Tensor) or is_function(value) for value in own):
                return Outcome(line, passed="the function's own error")
            return Outcome(line, f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}")
        return Outcome(line, passed="succeeded")


DRAWS = Draws(WRONG)
call = DRAWS.call


# -- what calls are made with ---------------------------------------------------------------------------------------


def stages() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3)]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, 3), torch.tensor([0, 1, 2, 0])


cross_entropy = nn.functional.cross_entropy


def trainer(draw: random.Random) -> stretto.Trainer:
    mesh = stretto.Mesh(data=2) if draw.random() < 0.3 else None
    method = draw.choice(METHODS)
    precision = draw.choice([None, None, None, "bf16"])
    return stretto.Trainer(
        stages(), cross_entropy, sgd, method, example=batch()[0], mesh=mesh, device="cpu", precision=precision
    )


# -- the Trainer ----------------------------------------------------------------------------------------------------


@call
def constructor(draw: random.Random) -> Call:
    def make(**given: Any) -> Any:
        made = stretto.Trainer(**given)
        made.step(*batch())
        made.step(*batch())
        made.flush()
        return made.evaluate([batch()])

    more = {
        "example": batch()[0],
        "heads": None,
        "scheduler": None,
        "clip": 1.0,
        "workers": 2,
        "device": "cpu",
        "seed": 3,
        "precision": None,
        "mesh": stretto.Mesh(),
        "sync": draw.choice(SYNCS),
        "timeout": 60,
    }
    given = {"stages": stages(), "loss": cross_entropy, "optimizer": sgd, "method": draw.choice(METHODS)}
    return Call("Trainer", make, given, more)


@call
def step(draw: random.Random) -> Call:
    made = trainer(draw)
    before = draw.random() < 0.5

    def run(x: Any, y: Any) -> Any:
        if before:
            made.step(*batch())
        made.step(x, y)
        return made.flush()

    x, y = batch()
    return Call(f"Trainer({made.method}, {made.mesh}).step", run, {"x": x, "y": y})


@call
def evaluate(draw: random.Random) -> Call:
    made = trainer(draw)
    x, y = batch()
    if draw.random() < 0.5:
        return Call("Trainer.evaluate", made.evaluate, {"batches": [batch()]})
    return Call("Trainer.evaluate of (x, y)", lambda x, y: made.evaluate([(x, y)]), {"x": x, "y": y})


@call
def saving(draw: random.Random) -> Call:
    made = trainer(draw)
    if draw.random() < 0.5:
        return Call("Trainer.save", made.save, {"path": "saved"}, {"extra": {"a": 1}})
    made.save("there")
    return Call("Trainer.load", made.load, {"path": "there"})


@call
def looking(draw: random.Random) -> Call:
    made = trainer(draw)

    def run(minibatches: Any) -> Any:
        observer = made.observe(minibatches)
        for _ in range(8):
            made.step(*batch())
        return observer.figures() if observer.done else None

    return Call("Trainer.observe", run, {"minibatches": 1})


# -- models ---------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x if scale is None else x * scale


@call
def split(draw: random.Random) -> Call:
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    model = draw.choice([layers, layers, list(layers), nn.ModuleList(layers), Blocks()])
    more = {"example": batch()[0], "path": None, "by": "parameters", "tied": "together"}
    return Call("split", stretto.split, {"model": model, "num_stages": draw.choice([2, [0, 1, len(layers)]])}, more, 2)


@call
def model_state(draw: random.Random) -> Call:
    made = stretto.split(Blocks(), 2, example=batch()[0])
    state = {f"{i}.{key}": value for i, stage in enumerate(made) for key, value in stage.state_dict().items()}
    return Call("Stages.model_state", made.model_state, {"gathered": state}, {}, 1)


@call
def group_norm(draw: random.Random) -> Call:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    return Call("group_norm", stretto.group_norm, {"module": model}, {"group_size": 2}, 1)


@call
def scaling(draw: random.Random) -> Call:
    given = {"lr": 0.1, "momentum": 0.9, "batch_size": 32, "to": 64}
    return Call("scale_for_batch", stretto.scale_for_batch, given, {"rule": "linear"}, 3)


@call
def landscape(draw: random.Random) -> Call:
    batches = [batch(), batch()]
    which = draw.randrange(4)
    model = nn.Sequential(*stages())
    if which == 0:
        return Call("noise_scale", stretto.noise_scale, {"model": model, "loss": cross_entropy, "batches": batches})
    if which == 1:
        more = {"tolerance": 0.1, "products": 3, "seed": 1}
        given = {"model": model, "loss": cross_entropy, "batches": batches}
        return Call("sharpness", stretto.sharpness, given, more)
    if which == 2:
        return Call("probes", stretto.probes, {"stages": stages(), "train": batch(), "test": batch()})
    reach = schedule.Reach((None, 1))
    given = {"stages": stages(), "heads": [None, None], "reach": reach, "loss": cross_entropy, "batches": batches}
    return Call("alignment", stretto.alignment, given)


# -- methods, schedules ---------------------------------------------------------------------------------------------


@call
def method(draw: random.Random) -> Call:
    options = {
        "1f1b": {"microbatches": 3},
        "pb": {"spike": True, "predict": "weight", "horizon": 2, "stash": False, "warmup": 1, "finish": 9},
        "pipemare": {"reschedule": 5, "correct": False, "microbatches": 2},
        "overlapping": {"combine": "mean", "delay": 1, "head": "linear"},
        "chunked": {"chunks": 1},
        "paci": {"every": 2},
        "pipedream-2bw": {"microbatches": 3},
        "gpipe": {"microbatches": 2, "recompute": True},
        "spectrain": {"warmup": 2},
        "greedy": {"head": "linear"},
    }
    name = draw.choice(list(options))

    def make(name: Any, **chosen: Any) -> Any:
        made = stretto.method(name, **chosen)
        laid, rules = made.plan(3)
        schedule.check(laid, rules)
        return str(made)

    return Call("method", make, {"name": name}, options[name], 1)


@call
def planning(draw: random.Random) -> Call:
    made = stretto.method(draw.choice(METHODS))
    which = draw.choice(["plan", "synchronous_plan", "homes", "lag", "delays", "versions"])
    if which in ("delays", "versions"):
        return Call(f"{made}.{which}", getattr(made, which), {"schedule": made.plan(3)[0]}, {}, 1)
    more = {"num_workers": 2} if which != "lag" else {}
    if "plan" in which:
        more |= {"reduce": True, "ties": [(0, 2)], "agreement": "A"}
    return Call(f"{made}.{which}", getattr(made, which), {"num_stages": 3}, more, 1)


@call
def schedules(draw: random.Random) -> Call:
    laid, rules = stretto.method(draw.choice(METHODS)).plan(3)
    Action = schedule.Action
    body = ((Action("F", 0, 0), Action("B", 0, 0), Action("U", 0, 0)),)
    return draw.choice(
        [
            Call("Schedule", schedule.Schedule, {"body": body}, {"per_turn": 1}),
            Call("Schedule of (action,)", lambda action: schedule.Schedule(((action,),)), {"action": body[0][0]}),
            Call(
                "Schedule of Action",
                lambda k, s, m: schedule.Schedule(((Action(k, s, m),),)),
                {"k": "F", "s": 0, "m": 0},
            ),
            Call("check", schedule.check, {"schedule": laid, "rules": rules}, {"turns": 3}, 2),
            Call("Reach", schedule.Reach, {"hops": (None, 1)}, {}, 1),
            Call("Reach of (hop,)", lambda hop: schedule.Reach((0, hop)), {"hop": 1}),
            Call("Rules.of", schedule.Rules.of, {"schedule": laid, "reach": rules.reach}, {"ties": ()}, 2),
            Call("Delays", schedule.Delays, {"schedule": laid}, {"buffered": True}, 1),
            Call("Schedule.unroll", laid.unroll, {"worker": 0, "turns": 2}),
        ]
    )


# -- replicas -------------------------------------------------------------------------------------------------------


@call
def meshes(draw: random.Random) -> Call:
    mesh = stretto.Mesh(data=2)
    return draw.choice(
        [
            Call("Mesh", stretto.Mesh, {}, {"data": 2, "tensor": 2, "space": (1, 2)}),
            Call("Mesh.pipeline", mesh.pipeline, {"processes": 4}, {}, 1),
            Call("AllReduce", stretto.AllReduce, {}, {"hook": "bf16", "algorithm": None}),
            Call("FullyShard", stretto.FullyShard, {}, {"reshard": True, "min_block": 9}),
            Call("LocalSGD", stretto.LocalSGD, {}, {"every": 2, "start": 3}),
            Call("DiLoCo", stretto.DiLoCo, {}, {"every": 2, "outer_lr": 0.5, "outer_momentum": 0.5}),
            Call("ParameterServer", stretto.ParameterServer, {}, {"staleness": 2, "order": None}),
        ]
    )


# -- on processes, here one -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone(axis: str) -> Iterator[Any]:
    """A process group of one, and a mesh with one axis."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=(axis,))
    finally:
        dist.destroy_process_group()


@call
def all_reduce(draw: random.Random) -> Call:
    def run(**given: Any) -> Any:
        with alone("data"):
            return collectives.all_reduce(**given)

    more = {"group": None, "algorithm": "auto", "per_node": 1, "calibration": None}
    return Call("collectives.all_reduce", run, {"tensor": torch.ones(3)}, more)


@call
def reductions(draw: random.Random) -> Call:
    three = {"latency": 1e-4, "seconds_per_byte": 1e-9, "reduction_seconds_per_byte": 1e-10}
    name = draw.choice(list(collectives.ALGORITHMS))
    rows = {"bytes": 64, "seconds": {"ring": 0.1}}
    made = collectives.Calibration.of({"workers": 2, "per_node": 1, **three, "all_reduce": [rows]})
    Path("calibration.toml").write_text(made.to_toml())
    return draw.choice(
        [
            Call("collectives.plan", collectives.plan, {"algorithm": name, "rank": 1, "size": 4, "length": 9}),
            Call("collectives.plans", collectives.plans, {"algorithm": name, "size": 4, "length": 9}),
            Call("collectives.formula", collectives.formula, {"algorithm": name, "P": 4, "N": 9.0}, {"blocks": 1}),
            Call("collectives.Link", collectives.Link, three),
            Call(
                "collectives.price",
                collectives.price,
                {"plans": collectives.plans(name, 4, 9)},
                {"latency": 1, "per_element": 0.1, "reduction": 0.1},
            ),
            Call("collectives.traffic", collectives.traffic, {"plan": collectives.plans(name, 4, 9)[0]}),
            Call("Calibration.read", collectives.Calibration.read, {"file": "calibration.toml"}),
        ]
    )


@call
def inside(draw: random.Random) -> Call:
    """Of stretto.parallel; the mesh is made with the call, since it needs a process group."""
    axis = draw.choice(["tensor", "height"])
    others = ["spatial", "scatter", "collect"]
    absent, without = object(), object()  # the axis's own mesh, and none at all

    def run(function: Callable[..., Any], mesh: Any = absent, **given: Any) -> Any:
        with alone(axis) as real:
            return function(**given, **({} if mesh is without else {"mesh": real if mesh is absent else mesh}))

    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    image = torch.ones(1, 2, 4, 4)
    prepared = {
        "tensor": ({"module": net}, {"plan": {"0": "column"}, "parameters": "local", "sequence": False}),
        "spatial": ({"module": nn.Conv2d(2, 2, 3)}, {}),
        "scatter": ({"x": image}, {}),
        "collect": ({"slab": image}, {}),
    }
    name = draw.choice(others if axis == "height" else ["tensor", "gather"])
    if name == "gather":
        run_gather = lambda **given: run(parallel.gather, without, **given)  # noqa: E731
        return Call("parallel.gather", run_gather, {"module": net}, {"gradients": True})
    given, more = prepared[name]
    function = getattr(parallel, name)
    if draw.random() < 0.3:  # the mesh itself is wrong
        return Call(f"parallel.{name}", lambda **k: run(function, **k), {**given, "mesh": absent}, more)
    return Call(f"parallel.{name}", lambda **k: run(function, **k), given, more)


# -- optimizers, heads, data, models, costs -------------------------------------------------------------------------


def stepped(kind: Any) -> Any:
    def run(params: Any, **given: Any) -> Any:
        made = kind(params, **given)
        for group in made.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        return made.step()

    return run


@call
def optimizers(draw: random.Random) -> Call:
    def scheduled(**given: Any) -> Any:
        made = optim.warmup(**given)(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
        for _ in range(3):
            made.step()

    weights = [nn.Parameter(torch.ones(2, 2))]
    return draw.choice(
        [
            Call("LARS", stepped(optim.LARS), {"params": weights, "lr": 0.1}, {"momentum": 0.9, "weight_decay": 0.1}),
            Call("LAMB", stepped(optim.LAMB), {"params": weights, "lr": 0.1}, {"betas": (0.9, 0.99), "eps": 1e-6}),
            Call("warmup", scheduled, {"updates": 3}, {"start": 0.5, "then": optim.cosine(5)}),
            Call("cosine", lambda updates: optim.cosine(updates)(2), {"updates": 3}),
        ]
    )


@call
def libraries(draw: random.Random) -> Call:
    features = (torch.ones(4, 3),)
    given = {"name": "linear", "stage": 0, "features": features, "output": torch.ones(4, 3)}
    return draw.choice(
        [
            Call("heads.build", heads.build, given),
            Call("data.load", data.load, {"name": "digits"}, {"random_labels": 0.5}, 1),
            Call("data.load", data.load, {"name": "number-words"}, {"examples": 9, "limit": 5}, 1),
            Call("models.build", models.build, {"name": "mlp", "dataset": DIGITS}, {"width": 4, "depth": 2}, 2),
        ]
    )


DIGITS = data.load("digits")


@call
def costs(draw: random.Random) -> Call:
    made = cost.layer_costs(stages(), batch()[0])
    cluster = cost.find_cluster(CLUSTERS[0])
    cost.write_cluster(cluster, Path("cluster.toml"))
    return draw.choice(
        [
            Call("cost.layer_costs", cost.layer_costs, {"layers": stages(), "example": batch()[0]},
                 {"names": ["a", "b"], "loss": cross_entropy, "target": batch()[1], "fake": True}),
            Call("cost.find_cluster", cost.find_cluster, {"name": CLUSTERS[0]}),
            Call("cost.read_cluster", cost.read_cluster, {"file": Path("cluster.toml")}),
            Call("cost.write_cluster", cost.write_cluster, {"cluster": cluster, "file": Path("cluster.toml")}),
            Call("cost.stage_times", cost.stage_times,
                 {"costs": made, "bounds": [0, 1, 2], "cluster": cluster, "examples": 4}, {"optimizer": "adam"}),
            Call("ModelCosts.stages", made.stages, {"bounds": [0, 1, 2]}),
            Call("cost.measure", cost.measure, {"trainer": trainer(draw), "x": batch()[0], "y": batch()[1]},
                 {"accounting": "paper"}),
        ]
    )  # fmt: skip


CLUSTERS = ["8-a100", "wide-area"]


# -- one case -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder_of_its_own(seed: int) -> Iterator[None]:
    """A temporary folder to work in, and torch's generator, seeded, as it was afterwards."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, PreservedState():
        os.chdir(folder)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            os.chdir(here)


def is_function(value: Any) -> bool:
    """Whether a value is a function, or a list of one."""
    return callable(value) or (isinstance(value, list) and len(value) == 1 and callable(value[0]))


class PreservedState:
    """Leaves torch's generator and default settings as they were."""

    def __enter__(self) -> None:
        self._generator = torch.get_rng_state()

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._generator)


def attack(seed: int) -> Outcome:
    """One call in a folder of its own, with one or two arguments replaced."""
    return DRAWS.attack(seed)
