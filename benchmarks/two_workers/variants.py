"""The network, and every way to train it in two processes that main.py measures, grouped by axis."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import stretto

BLOCKS, WIDTH, CLASSES, BATCH = 8, 1024, 10, 256
ONE, TWO, THREADS = "one worker", "two one-worker loops", "one process, two threads"
Weights = dict[str, Tensor]  # by the names of nn.Sequential(*blocks())


@dataclass(frozen=True)
class Variant:
    """One way to train the network, as one of its two processes takes part in it.

    `weights` returns the trained weights, whole, that are to equal those of plain training. It is a collective.
    """

    step: Callable[[], object] | None  # None: this process has no part, and waits
    weights: Callable[[], Weights] = dict
    fill: int = 0  # steps until every stage is busy
    flush: Callable[[], object] = field(default=lambda: None)


class Case(NamedTuple):
    """How a variant is made, and the name of torch's one that it stands beside; None for what is not ours."""

    make: Callable[[], Variant]
    beside: str | None = None


def blocks() -> list[nn.Module]:
    """Eight one-layer blocks; the last also holds the output layer."""
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)]
    made[-1].append(nn.Linear(WIDTH, CLASSES))
    return list(made)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH, WIDTH), torch.randint(0, CLASSES, (BATCH,))


def half_batch() -> tuple[Tensor, Tensor]:
    x, y = (part.tensor_split(2)[dist.get_rank()] for part in batch())
    return x, y


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def loop(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    """The plain training loop."""
    made = optimizer(list(model.parameters()))

    def step() -> float:
        loss = cross_entropy(model(x), y)
        loss.backward()
        made.step()
        made.zero_grad()
        return loss.item()

    return step


def whole_weights(blocks: dict[int, nn.Module]) -> Weights:
    """The weights of these blocks, by index; shares and parts of both processes put together."""
    return {
        f"{index}.{name}": parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for index, block in blocks.items()
        for name, parameter in block.named_parameters()
    }


def one_worker(ranks: tuple[int, ...], num_threads: int = 1) -> Variant:
    """Each of `ranks` trains a network of its own."""
    if dist.get_rank() not in ranks:
        return Variant(None)
    torch.set_num_threads(num_threads)
    own = blocks()
    return Variant(loop(nn.Sequential(*own), *batch()), partial(whole_weights, dict(enumerate(own))))


def data_parallel() -> Variant:
    """Each process has half of the batch."""
    own = blocks()
    model = DistributedDataParallel(nn.Sequential(*own), process_group=dist.new_group())
    return Variant(loop(model, *half_batch()), partial(whole_weights, dict(enumerate(own))))


def sharded_by_hand(reshard: bool) -> Variant:
    """As torch's documentation has it: each block, then the model; each process has half of the batch."""
    mesh = init_device_mesh("cpu", (2,))
    own = blocks()
    model = nn.Sequential(*own)
    for part in (*own, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    return Variant(loop(model, *half_batch()), partial(whole_weights, dict(enumerate(own))))


def torch_styles() -> Variant:
    """The weights of layers cut by outputs and by inputs in turn; the output layer stays whole."""
    own = blocks()
    model = nn.Sequential(*own)
    plan = {f"{index}.0": RowwiseParallel() if index % 2 else ColwiseParallel() for index in range(BLOCKS)}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    return Variant(loop(model, *batch()), partial(whole_weights, dict(enumerate(own))))


def torch_schedule(kind: type, num_microbatches: int) -> Variant:
    """Each process has half of the blocks, and an optimizer for them."""
    rank, (x, y) = dist.get_rank(), batch()
    own = half(rank)
    module = nn.Sequential(*own.values())
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=dist.new_group())
    schedule = kind(stage, num_microbatches, loss_fn=cross_entropy)
    made = optimizer(list(module.parameters()))

    def step() -> float | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x, return_outputs=False)
        else:
            schedule.step(target=y, losses=losses, return_outputs=False)
        made.step()
        made.zero_grad()
        return sum(loss.item() for loss in losses) / num_microbatches if losses else None

    return Variant(step, partial(whole_weights, own))


def ours(method: str, num_stages: int = 1, mesh: stretto.Mesh | None = None, sync: str = "all-reduce") -> Variant:
    """The script of one process, unchanged. Weights that are not plain training's are not compared."""
    x, y = batch()
    whole = blocks()
    size = BLOCKS // num_stages
    stages = [nn.Sequential(*whole[at : at + size]) for at in range(0, BLOCKS, size)]
    mesh = stretto.Mesh() if mesh is None else mesh
    trainer = stretto.Trainer(stages, cross_entropy, optimizer, method, device="cpu", mesh=mesh, sync=sync)

    def weights() -> Weights:
        if trainer.lag:
            return {}
        names = list(nn.Sequential(*blocks()).state_dict())  # those of stages are others, in the same order
        gathered = trainer.gather()  # on rank 0
        return dict(zip(names, gathered.values(), strict=True)) if gathered else {}

    return Variant(lambda: trainer.step(x, y), weights, 2 * num_stages, trainer.flush)


def half(rank: int) -> dict[int, nn.Module]:
    return dict(list(enumerate(blocks()))[rank * BLOCKS // 2 : (rank + 1) * BLOCKS // 2])


def stages_of(count: int, *names: str, beside: str) -> dict[str, Case]:
    """Ours, on pipelines of `count` stages."""
    return {f"{name}, {count} stages": Case(partial(ours, name, count), beside) for name in names}


def same_microbatches(kind: str, *counts: int) -> dict[str, Case]:
    """Ours beside torch's schedule of that kind, cut alike."""
    return {
        f"{kind}(microbatches={count})": Case(
            partial(ours, f"{kind}(microbatches={count})", 2), torch_name(kind, count)
        )
        for count in counts
    }


def torch_name(kind: str, count: int) -> str:
    return f"torch {SCHEDULES[kind][0]}, {count} micro-batches"


REPLICAS, PARTS = stretto.Mesh(data=2), stretto.Mesh(tensor=2)
SCHEDULES: dict[str, tuple[str, type]] = {"gpipe": ("GPipe", ScheduleGPipe), "1f1b": ("1F1B", Schedule1F1B)}
BEST = "torch's best pipeline"
PIPELINES = {
    torch_name(kind, count): Case(partial(torch_schedule, schedule, count))
    for kind, (_, schedule) in SCHEDULES.items()
    for count in (2, 4)
}
DDP, SHARDED, RESHARDED = "DistributedDataParallel", "torch fully_shard", "torch fully_shard, gathered twice"
STYLES = "torch Colwise and RowwiseParallel"
AXES: dict[str, dict[str, Case]] = {
    "one machine": {
        ONE: Case(partial(one_worker, (0,))),
        TWO: Case(partial(one_worker, (0, 1))),
        THREADS: Case(partial(one_worker, (0,), 2)),
    },
    "replicas": {DDP: Case(data_parallel), "data=2": Case(partial(ours, "backprop", 1, REPLICAS), DDP)},
    "sharded replicas": {
        SHARDED: Case(partial(sharded_by_hand, False)),
        "data=2, fully-shard": Case(partial(ours, "backprop", 1, REPLICAS, "fully-shard"), SHARDED),
        RESHARDED: Case(partial(sharded_by_hand, True)),
        "data=2, fully-shard(reshard=True)": Case(
            partial(ours, "backprop", 1, REPLICAS, "fully-shard(reshard=True)"), RESHARDED
        ),
    },
    "tensor": {STYLES: Case(torch_styles), "tensor=2": Case(partial(ours, "backprop", 1, PARTS), STYLES)},
    "synchronous pipelines": {
        **PIPELINES,
        **same_microbatches("gpipe", 2),
        **same_microbatches("1f1b", 2, 4),
        **stages_of(2, "zb-h1(microbatches=2)", beside=BEST),
    },
    "asynchronous pipelines and local training": {
        **stages_of(2, "pb", "pipedream", "greedy", beside=BEST),
        **stages_of(8, "pb", "pipedream", "greedy", beside=BEST),
    },
}
CASES = {name: case for cases in AXES.values() for name, case in cases.items()}
