"""Right steps: a trainer, a network, a dtype, a seed, and the options that describe them to `stretto.diagnose`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import trainers as one
import two_processes as two
from torch.optim import SGD, AdamW

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
ALL = (F64, F32, BF16)
MEANS, STATISTICS, SCALED, DROPOUT = "mean-of-means", "statistics-by-microbatch", "scaled", "dropout-differs"


@dataclass(frozen=True, kw_only=True)
class Right:
    """A right step. `group` is what diagnose should say: equal, or the name of what the trainer does by design."""

    name: str
    trainer: Callable[..., dict[str, Any]]
    network: str
    dtype: torch.dtype
    seed: int
    how: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    group: str = "equal"
    processes: int = 1


def several(
    name: str,
    trainer: Callable[..., dict[str, Any]],
    networks: Sequence[str],
    dtypes: Sequence[torch.dtype] = ALL,
    seeds: Sequence[int] = (1,),
    **rest: Any,
) -> Iterator[Right]:
    """The same trainer on several networks, in several dtypes, with several seeds."""
    for network in networks:
        for dtype in dtypes:
            for seed in seeds:
                yield Right(name=name, trainer=trainer, network=network, dtype=dtype, seed=seed, **rest)


def on_one() -> Iterator[Right]:
    """Loops in one process."""
    every = ("mlp", "cnn", "gpt", "keys", "recurrent", "deep", "unpadded", "settled")
    losses = ("summed", "weighted", "smoothed", "regression")
    yield from several("plain", one.plain, (*every, *losses, "gpt2", "llama"))
    yield from several("plain", one.both_names, ("gpt", "gpt2"))
    for parts, networks in (
        (2, ("mlp", "gpt", "keys")),
        (3, ("mlp", "gpt")),
        (8, ("gpt", "deep", "hollow", "settled")),
    ):
        yield from several("accumulation", one.plain, networks, how={"parts": parts}, options={"accumulation": parts})
    how, options = {"parts": 4}, {"accumulation": 4}
    yield from several("accumulation", one.plain, (*losses, "gpt2", "llama"), how=how, options=options)
    yield from several(
        "checkpoints", one.checkpointed, ("mlp", "gpt"), (F32,), how={"parts": 2}, options={"microbatches": 2}
    )
    yield from several("fourth step", one.plain, ("mlp", "gpt", "cnn"), (F32, BF16), how={"steps": 4})
    for by, bound in (("torch", 0.1), ("hand", 0.1), ("torch", 100.0), ("torch", 1e-4), ("hand", 1e-4)):
        how, options = {"clip": (by, bound), "parts": 4}, {"clip": bound, "microbatches": 4}
        yield from several(f"clip by {by}", one.plain, ("mlp", "gpt"), how=how, options=options)
        yield from several(
            f"clip by {by}", one.plain, ("cnn",), (F32,), how={"clip": (by, bound)}, options={"clip": bound}
        )
    amp = {"amp": BF16}
    yield from several("autocast bf16", one.plain, every, (F32,), (1, 2), how=amp, options={"precision": BF16})
    options = {"precision": BF16, "accumulation": 4, "clip": 0.1}
    how = {**amp, "parts": 4, "clip": ("torch", 0.1)}
    yield from several("autocast bf16", one.plain, ("mlp", "gpt", "deep"), (F32,), how=how, options=options)
    fp16 = {"amp": torch.float16, "scaler": 1024.0, "parts": 2}
    options = {"precision": torch.float16, "accumulation": 2, "loss_scale": 1024.0}
    yield from several("autocast fp16, scaled", one.plain, ("mlp", "gpt"), (F32,), how=fp16, options=options)
    for make in (partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1), partial(AdamW, lr=1e-3)):
        how, options = {"parts": 2, "optimizer": make}, {"accumulation": 2}
        title = f"weights after {make.func.__name__}"
        yield from several(title, one.weights_after, ("mlp", "gpt", "keys"), (F64, F32), how=how, options=options)
        third = {**how, "steps": 3}
        yield from several(title, one.weights_after, ("mlp", "gpt", "keys"), (F64, F32), how=third, options=options)
    yield from several("dropout", one.plain, ("dropping",), (F32,), (1, 2), group=DROPOUT)


def in_frameworks() -> Iterator[Right]:
    """Lightning, transformers, accelerate."""
    for parts in (1, 4):
        how, options = {"parts": parts}, {"accumulation": parts}
        yield from several("Lightning", one.lightning, ("mlp", "unpadded"), (F32,), (1, 2), how=how, options=options)
        clipped = {**how, "clip": 0.1}, {**options, "clip": 0.1}
        yield from several("Lightning", one.lightning, ("mlp",), (F32,), how=clipped[0], options=clipped[1])
        yield from several("accelerate", one.accelerate, ("mlp", "unpadded"), (F32,), (1, 2), how=how, options=options)
        yield from several("accelerate", one.accelerate, ("mlp",), (F32,), how=clipped[0], options=clipped[1])
        mixed = {**how, "bf16": True}, {**options, "precision": BF16}
        yield from several("accelerate", one.accelerate, ("mlp", "unpadded"), (F32,), how=mixed[0], options=mixed[1])
        for clip in (0.0, 1.0, 0.1):
            how, options = {"parts": parts, "clip": clip}, {"accumulation": parts, **({"clip": clip} if clip else {})}
            yield from several(
                "transformers", one.transformers, ("llama", "told"), (F32,), (1, 2), how=how, options=options
            )
        mixed = {"parts": parts, "bf16": True}, {"accumulation": parts, "precision": BF16}
        yield from several("transformers", one.transformers, ("llama", "told"), (F32,), how=mixed[0], options=mixed[1])
        how, options = {"parts": parts}, {"accumulation": parts}
        yield from several("transformers", one.transformers, ("gpt2",), (F32,), how=how, options=options, group=SCALED)
    how, options = {"parts": 2, "precision": "bf16-mixed"}, {"accumulation": 2, "precision": BF16}
    yield from several("Lightning", one.lightning, ("mlp", "unpadded"), (F32,), how=how, options=options)
    how, options = {"parts": 2, "precision": "64-true"}, {"accumulation": 2}
    yield from several("Lightning", one.lightning, ("mlp",), (F64,), how=how, options=options)
    yield from several("Lightning", one.lightning, ("cnn",), (F32,), how={"parts": 1})
    for trainer, name in ((one.lightning, "Lightning"), (one.accelerate, "accelerate")):
        how, options = {"parts": 4}, {"accumulation": 4}
        yield from several(name, trainer, ("gpt",), (F32,), how=how, options=options, group=MEANS)
        yield from several(name, trainer, ("cnn",), (F32,), how=how, options=options, group=STATISTICS)


def replicated() -> Iterator[Right]:
    """DDP and FSDP2."""
    for parts in (1, 2, 4):
        how, options = {"parts": parts}, {"replicas": 2, "accumulation": parts}
        weighed = {**how, "weigh": True}
        for name, trainer, dtypes in (("DDP", two.ddp, ALL), ("FSDP2", two.fsdp, (F64, F32, BF16))):
            common: dict[str, Any] = {"options": options, "processes": 2}
            yield from several(name, trainer, ("mlp", "unpadded"), dtypes, how=how, **common)
            yield from several(name, trainer, ("gpt",), dtypes, how=weighed, **common)
            yield from several(name, trainer, ("gpt",), (F32,), how=how, group=MEANS, **common)
        yield from several("DDP", two.ddp, ("keys",), (F32,), how=how, options=options, processes=2)
        yield from several("DDP", two.ddp, ("cnn",), (F32,), how=how, options=options, processes=2, group=STATISTICS)
    common = {"processes": 2, "options": {"replicas": 2, "accumulation": 2, "clip": 0.1}}
    how = {"parts": 2, "clip": ("torch", 0.1), "weigh": True}
    yield from several("DDP", two.ddp, ("mlp", "gpt"), how=how, **common)
    yield from several("FSDP2", two.fsdp, ("mlp", "gpt"), how={**how, "clip": 0.1}, **common)
    common = {"processes": 2, "options": {"replicas": 2, "precision": BF16}}
    yield from several("DDP", two.ddp, ("mlp", "unpadded"), (F32,), how={"amp": BF16}, **common)
    yield from several("DDP", two.ddp, ("mlp", "unpadded"), (F32,), how={"compressed": True}, **common)
    yield from several("FSDP2", two.fsdp, ("mlp", "unpadded"), (F32,), how={"mixed": True}, **common)


def pipelined() -> Iterator[Right]:
    """torch.distributed.pipelining."""
    for schedule, (_, stages) in two.SCHEDULES.items():
        for parts in (2, 4):
            name = f"pipelining, {schedule}"
            how = {"schedule": schedule, "parts": parts}
            weighed = {**how, "weigh": True}
            common: dict[str, Any] = {"processes": 2, "options": {"microbatches": parts, "stages": stages}}
            yield from several(name, two.pipelining, ("mlp",), ALL, how=how, **common)
            yield from several(name, two.pipelining, ("unpadded",), (F32,), how=how, **common)
            yield from several(name, two.pipelining, ("gpt",), (F64, F32, BF16), how=weighed, **common)
            yield from several(name, two.pipelining, ("gpt",), (F32,), how=how, group=MEANS, **common)
            yield from several(name, two.pipelining, ("cnn",), (F32,), how=how, group=STATISTICS, **common)
            clipped = {**common, "options": {**common["options"], "clip": 0.1}}
            yield from several(name, two.pipelining, ("mlp", "gpt"), (F32,), how={**weighed, "clip": 0.1}, **clipped)


CASES: tuple[Right, ...] = (*on_one(), *in_frameworks(), *replicated(), *pipelined())
