"""Trainers on two processes: each takes a Setup and a rank, and gives what this process can tell `stretto.diagnose`."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from networks import Setup
from right_networks import count
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.optim import SGD
from trainers import CLIPS, RATE, Dumped, autocast, blocks, hooked

SIZE = 2


def share(s: Setup, y: Tensor, weigh: bool, parts: int) -> float:
    """What a part's mean is multiplied by, where the gradients of processes are averaged."""
    return count(y, s.loss) * SIZE / count(s.target, s.loss) if weigh else 1 / parts


def ddp(
    s: Setup,
    rank: int,
    *,
    parts: int = 1,
    clip: tuple[str, float] | None = None,
    amp: torch.dtype | None = None,
    weigh: bool = False,
    compressed: bool = False,
) -> Dumped:
    """Accumulates under no_sync. `weigh`: by counts of tokens, else the mean over processes of means."""
    model = nn.parallel.DistributedDataParallel(s.model, find_unused_parameters=hasattr(s.model, "unused"))
    if compressed:
        model.register_comm_hook(None, in_bf16)
    optimizer = SGD(s.model.parameters(), lr=RATE)
    found = hooked(optimizer, s.model)
    rows, targets = s.inputs.chunk(SIZE)[rank].chunk(parts), s.target.chunk(SIZE)[rank].chunk(parts)
    for number, (x, y) in enumerate(zip(rows, targets, strict=True)):
        with nullcontext() if number == parts - 1 else model.no_sync(), autocast(amp):
            loss = s.loss(model(x), y) * share(s, y, weigh, parts)
            loss.backward()
    if clip:
        CLIPS[clip[0]](list(s.model.parameters()), clip[1])
    optimizer.step()
    return found


def in_bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """As torch's bf16_compress_hook does it, which is refused without NCCL."""
    sent = bucket.buffer().to(torch.bfloat16).div_(SIZE)
    dist.all_reduce(sent)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer().copy_(sent))
    return done


def fsdp(
    s: Setup,
    rank: int,
    *,
    parts: int = 1,
    clip: float | None = None,
    mixed: bool = False,
    weigh: bool = False,
    reshard: bool = True,
) -> Dumped:
    """fully_shard of every block and of the rest; accumulates without synchronisation."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (SIZE,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=reshard, **({"mp_policy": policy} if policy else {}))
    for block in blocks(s.model):
        if any(True for _ in block.parameters()):
            shard(block)
    model = shard(s.model)
    assert isinstance(model, FSDPModule), "fully_shard changes the module's class"
    optimizer = SGD(s.model.parameters(), lr=RATE)
    found = hooked(optimizer, s.model)
    rows, targets = s.inputs.chunk(SIZE)[rank].chunk(parts), s.target.chunk(SIZE)[rank].chunk(parts)
    for number, (x, y) in enumerate(zip(rows, targets, strict=True)):
        model.set_requires_gradient_sync(number == parts - 1)
        (s.loss(model(x), y) * share(s, y, weigh, parts)).backward()
    if clip:
        nn.utils.clip_grad_norm_(s.model.parameters(), clip)
    optimizer.step()
    return found


class Piece(nn.Module):
    """Some blocks of the language model; the first piece has its embeddings, the last one its output."""

    def __init__(self, model: Any, first: int, last: int) -> None:
        super().__init__()
        self.blocks = model.blocks[first:last]
        self.words = self.places = self.norm = self.head = None
        if first == 0:
            self.words, self.places = model.words, model.places
        if last == len(model.blocks):
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """What the next piece takes, [rows, tokens, width]; of the last piece logits."""
        if self.words is not None and self.places is not None:
            x = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def pieces(model: Any, number: int) -> list[nn.Module]:
    """The model's stages, which have its very parameters."""
    if not isinstance(model, nn.Sequential):
        edges = [round(len(model.blocks) * place / number) for place in range(number + 1)]
        return [Piece(model, *edges[place : place + 2]) for place in range(number)]
    edges = [round(len(model) * place / number) for place in range(number + 1)]
    return [model[edges[place] : edges[place + 1]] for place in range(number)]


SCHEDULES = {
    "GPipe": (ScheduleGPipe, 2),
    "1F1B": (Schedule1F1B, 2),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, 4),
    "LoopedBFS": (ScheduleLoopedBFS, 4),
}


def pipelining(
    s: Setup, rank: int, *, schedule: str, parts: int, weigh: bool = False, clip: float | None = None
) -> Dumped:
    """torch.distributed.pipelining with tied weights summed by hand, as it does not.

    `weigh`: losses are summed, and the gradients divided by the count of all tokens; else micro-batches' means are
    averaged, as torch does by itself.
    """
    kind, number = SCHEDULES[schedule]
    modules = pieces(s.model, number)
    own = range(rank, number, SIZE)
    stages = [PipelineStage(modules[place], place, number, torch.device("cpu")) for place in own]
    parameters = list({id(p): p for place in own for p in modules[place].parameters()}.values())
    optimizer = SGD(parameters, lr=RATE)
    found = hooked(optimizer, s.model)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return s.loss(output, target) * (count(target, s.loss) if weigh else 1)

    made: Any = kind(stages if number > SIZE else stages[0], n_microbatches=parts, loss_fn=loss, scale_grads=not weigh)
    made.step(*([s.inputs] if rank == 0 else []), target=s.target if rank == SIZE - 1 else None)
    tied = getattr(s.model, "words", None)
    if tied is not None:
        dist.all_reduce(tied.weight.grad)
    if weigh:
        for p in parameters:
            p.grad.div_(count(s.target, s.loss))  # type: ignore[union-attr]
    if clip:
        clip_over_stages(parameters, clip, None if tied is None or rank else tied.weight)
    optimizer.step()
    return found


def clip_over_stages(parameters: list[nn.Parameter], bound: float, elsewhere: nn.Parameter | None) -> None:
    """By the length over all processes; a tied weight counts once."""
    squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None and p is not elsewhere]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    factor = min(1.0, bound / (float(total.sqrt()) + 1e-6))
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)
