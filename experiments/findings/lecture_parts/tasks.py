"""What processes of the launches of study 4 do: each function builds, and returns what measures."""

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness.examples import made_up, stages_of
from harness.launches import Measure
from harness.steps import seconds_a_step, slowest, together
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import stretto
from lecture_parts.launches import (
    AREA,
    BATCHES,
    BYTES_BATCH,
    CLASSES,
    HIDDEN,
    IMAGE,
    PREDICTED_FROM,
    SPATIAL_BATCH,
    WIDTH,
)
from stretto.measure import layer_costs, with_times
from stretto.models.images import cnn, imagenet_alexnet
from stretto.models.mlp import mlp

REPETITIONS = 10  # of the spatial table
GRIDS = {1: (1, 1), 2: (2, 1), 4: (2, 2)}  # height x width, by processes
BRIEF = 1.0  # seconds of steps at one batch size
TALK = 256  # bytes: smaller messages tell losses and counts, not activations or gradients


def alexnet() -> nn.Sequential:
    """AlexNet for images of 128 x 128; the same weights everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(make() for make in imagenet_alexnet(channels=IMAGE[0], area=AREA, hidden=HIDDEN, classes=CLASSES))
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """A rate at which nothing changes much."""
    return torch.optim.SGD(parameters, lr=1e-3)


def plain_step(model: nn.Module, x: Any, y: Tensor) -> Callable[[], None]:
    """A step of plain training on this minibatch."""
    optimizer = sgd(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def spatial(threads: int = 1, steps: int | None = None) -> Measure:
    """Seconds of a forward and of a step on slabs, medians; outputs are first compared with one process's."""
    torch.set_num_threads(threads)
    size = dist.get_world_size() if dist.is_initialized() else 1
    model = alexnet()
    x, y = torch.randn(SPATIAL_BATCH, *IMAGE), torch.randint(CLASSES, (SPATIAL_BATCH,))
    if size > 1:
        mesh = init_device_mesh("cpu", GRIDS[size], mesh_dim_names=("height", "width"))
        plain = copy.deepcopy(model)
        model = stretto.parallel.spatial(model, mesh)
        torch.testing.assert_close(model(stretto.parallel.scatter(x[:1], mesh)), plain(x[:1]), rtol=1e-3, atol=1e-3)
        x = stretto.parallel.scatter(x, mesh)
    step = plain_step(model, x, y)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def measure() -> dict[str, float]:
        return {name: _median(work, steps or REPETITIONS) for name, work in (("forward", forward), ("step", step))}

    return measure


def _median(work: Callable[[], object], repetitions: int) -> float:
    taken = []
    for turn in range(repetitions + 1):
        together()
        begin = time.perf_counter()
        work()
        if turn:  # the first one warms up
            taken.append(slowest(time.perf_counter() - begin))
    return statistics.median(taken)


def utilisation(network: str, steps: int | None = None) -> Measure:
    """Seconds of a whole step at every batch size, and those predicted from layers timed at two of them."""
    data = made_up((1, 28, 28), 10)
    recipe = mlp(data, width=1024) if network == "MLP 1024" else cnn(data)
    torch.manual_seed(0)
    layers = [make() for make in recipe]
    model = nn.Sequential(*layers)

    def measure() -> dict[str, float]:
        figures = {f"predicted, {batch}": seconds for batch, seconds in _predicted(layers, steps).items()}
        for batch in BATCHES:
            step = plain_step(model, torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,)))
            step()
            begin = time.perf_counter()
            step()
            number = max(5, min(200, math.ceil(BRIEF / (time.perf_counter() - begin))))
            figures[f"measured, {batch}"] = _median(step, steps or number)
        return figures

    return measure


def _predicted(layers: Sequence[nn.Module], repeats: int | None) -> dict[int, float]:
    """Lines t0 + b t1 of all layers, their updates, and what starts a backward and an update."""
    x, y = torch.randn(PREDICTED_FROM[-1], 1, 28, 28), torch.randint(10, (PREDICTED_FROM[-1],))
    costs = layer_costs(layers, x[:2], loss=cross_entropy, target=y[:2])
    costs = with_times(
        costs, layers, [x[:batch] for batch in PREDICTED_FROM], loss=cross_entropy,
        targets=[y[:batch] for batch in PREDICTED_FROM], optimizer=sgd, **({} if repeats is None else {"repeats": 1}),
    )  # fmt: skip
    rows = [row.measured for row in costs.layers if row.measured is not None]
    assert len(rows) == len(layers) + 1, "the loss is timed, too"
    apart = costs.start + costs.step + sum(row.update or 0.0 for row in rows)
    return {batch: apart + sum(row.forward.at(batch) + row.backward.at(batch) for row in rows) for batch in BATCHES}


class Counter(TorchDispatchMode):
    """Adds up the bytes that this process sends in collectives, as rings send them; small messages apart."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self.processes, self.bytes, self.talk = processes, 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a collective, and run it. Raises NotImplementedError for one of another kind."""
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.name().partition("::")[2].partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        share = (self.processes - 1) / self.processes
        if name in ("barrier", "wait_tensor"):
            return
        if name in ("allreduce_", "all_reduce", "allreduce_coalesced_"):
            sent = 2 * share * _bytes(args[0])
        elif name in ("allgather_", "_allgather_base_"):
            sent = share * _bytes(args[0])  # of what all gave, which has room in the first argument
        elif name == "all_gather_into_tensor":
            sent = (self.processes - 1) * _bytes(args[0])
        else:
            raise NotImplementedError(f"the counter of bytes knows no collective {name}")
        if sent < TALK:
            self.talk += sent
        else:
            self.bytes += sent


def _bytes(given: Any) -> int:
    if isinstance(given, Tensor):
        return given.nbytes
    return sum(_bytes(each) for each in given)


def sent(way: str, steps: int | None = None) -> Measure:
    """The bytes that a process sends in one step of AlexNet on two processes."""
    size = dist.get_world_size()
    x, y = torch.randn(BYTES_BATCH, *IMAGE), torch.randint(CLASSES, (BYTES_BATCH,))
    step = _data_parallel(x, y) if way == "data" else _operator_parallel(x, y, size, automatic=way != "operator")
    step()  # what is said once, before the first step

    def measure() -> dict[str, float]:
        with Counter(size) as counter:
            step()
        return {"bytes": counter.bytes, "small messages": counter.talk}

    return measure


def _data_parallel(x: Tensor, y: Tensor) -> Callable[[], object]:
    trainer = stretto.Trainer(
        [alexnet()], cross_entropy, sgd, "backprop", device="cpu", mesh=stretto.Mesh(data=dist.get_world_size())
    )
    return lambda: trainer.step(x, y)


def _operator_parallel(x: Tensor, y: Tensor, size: int, *, automatic: bool) -> Callable[[], object]:
    model = alexnet()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
    with_weights = [name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    plan = None if automatic else dict.fromkeys(with_weights, "column")
    return plain_step(stretto.parallel.tensor(model, mesh, plan=plan, parameters="local"), x, y)


def replicas(sync: str, every: int, steps: int | None = None) -> Measure:
    """Seconds a step of two replicas of the MLP of 256."""
    data = made_up((1, 28, 28), 10)
    x, y = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    trainer = stretto.Trainer(
        stages_of(mlp(data, width=WIDTH), 1, 0), cross_entropy, sgd, "backprop", device="cpu",
        mesh=stretto.Mesh(data=2), sync=sync,
    )  # fmt: skip

    def measure() -> dict[str, float]:
        figures = seconds_a_step(lambda: trainer.step(x, y), multiple=every, steps=steps)
        trainer.flush()  # the other one may still wait for this one's next update
        return figures

    return measure
