"""Settings of `stretto plan`: a model, a cluster, and what the search may choose from.

A field's docstring is its help text on the command line.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stretto.settings.command_line import (
    ANY_OPTIMIZER,
    FLAG,
    NUMBER,
    OPTIONS,
    PAIRS,
    PRODUCTS,
    SUITING,
    TEXTS,
    WHOLE,
    WHOLES,
    Option,
)

PLAN = Path("plan.toml")
EXPORTED, PAGE = (".csv", ".split.json"), ".html"  # the endings of torch's files, and of a page, beside the plan
LAYERS = ("auto", "measured", "counted")
SEQUENCE = {"yes": (True,), "no": (False,), "auto": (False, True)}
TWO_FILES = Parameter(
    consume_multiple=True, negative="", converter=lambda _, tokens: tuple(Path(token.value) for token in tokens)
)
PRICED = "One that has no name here is priced as sgd or adam, which keeps as much state."
TRY = Parameter(name="--try", converter=WHOLE.converter)


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """A network to plan for, the devices, and the goal of the plan."""

    workers: Annotated[int | None, WHOLE] = None
    """Devices of the cluster that may be used: its first ones, or any if they differ; by default all. A plan may use
    fewer."""
    cluster: str | None = None
    """Cluster, by name, as 8-a100, or the file that stretto calibrate writes."""
    machines: Annotated[int | None, WHOLE] = None
    """So many machines, each like a node of the cluster, with an equal share of --workers."""
    link: str | None = None
    """Link between them, a bandwidth and a latency: 100Mbit,1ms; by default the cluster's between nodes."""
    model: str = "mlp"
    """Network of stretto train; one without data, which is only planned for: decoder, encoder, vit, gpt3-175b, ...; or
    your own, path/to/file.py:function."""
    model_options: Annotated[dict[str, Option] | None, OPTIONS] = None
    """Its options: --model-options.width 256."""
    data: str | None = None
    """Data set, or your own, path/to/file.py:function; by default what suits."""
    data_options: Annotated[dict[str, Option] | None, OPTIONS] = None
    """Its options."""
    loss: str = "auto"
    """Loss, as stretto train takes it; your own network's has costs with --data."""
    metric: Annotated[tuple[str, ...], TEXTS] = ()
    """Metrics, as stretto train takes them: free, and kept in the plan's command."""
    optimizer: Annotated[str, Parameter(help=f"{ANY_OPTIMIZER}. {SUITING} {PRICED}")] = "auto"
    batch_size: Annotated[tuple[int, ...] | None, WHOLES] = None
    """Examples of a step to choose from: 64,128."""
    dtype: str | None = None
    """Of a network without data: bfloat16, float16, tfloat32, float32, bfloat16-autocast or float16-autocast; by
    default the first of bfloat16, float16 and float32 that all devices have."""
    memory_format: str = "contiguous"
    """Of a network without data: contiguous or channels_last."""
    methods: Annotated[tuple[str, ...], TEXTS] = ("synchronous",)
    """Methods to choose from, or families: synchronous, asynchronous, local (all that have losses of their own), all;
    async: what stretto train takes by this word on up to so many workers. With --objective loss the default is all."""
    pipeline: Annotated[tuple[int, ...] | None, WHOLES] = None
    """Lengths of the pipeline to choose from, in workers: 1,2."""
    data_parallel: Annotated[tuple[int, ...] | None, WHOLES] = None
    """Numbers of replicas to choose from."""
    tensor: Annotated[tuple[int, ...] | None, WHOLES] = None
    """Numbers of processes that share a stage's weights to choose from."""
    space: Annotated[tuple[tuple[int, int], ...] | None, PAIRS] = None
    """Parts of images along height and width to choose from: 2,1 1,1."""
    sharding: Annotated[tuple[str, ...] | None, TEXTS] = None
    """What replicas may shard: none, shard-optimizer (ZeRO-1), fully-shard (weights and gradients, too),
    fully-shard(reshard=True)."""
    recompute: Annotated[tuple[str, ...] | None, TEXTS] = None
    """What a backward may recompute: none, selective (as the core of attention), full (every layer), stage (whole
    stages)."""
    sequence_parallel: str = "auto"
    """Whether --tensor also divides the sequence: yes, no, or auto. Only for networks without data."""
    program: Annotated[str | None, Parameter(parse=False)] = None
    """What trains a network without data (`stretto.plan.programs`): not asked for on the command line, but by
    benchmarks/published."""
    stages: Annotated[tuple[int, ...] | None, PRODUCTS] = None
    """Numbers of stages to choose from; 8x3: three on each of eight workers."""
    begins: Annotated[tuple[int, ...] | None, WHOLES] = None
    """First layer of each stage: 0,4,8; by default the plan chooses."""
    microbatches: Annotated[tuple[int, ...] | None, WHOLES] = None
    """Numbers of micro-batches to choose from."""
    layers: str = "auto"
    """Times of layers and steps: measured (anew), counted (by calibrated rates), or auto (measured once, where the
    cluster is this machine)."""
    objective: str = "step"
    """step (time an example), money, energy, memory, or loss (time to a loss: needs --critical-batch or --measured)."""
    critical_batch: Annotated[float | None, NUMBER] = None
    """Steps to a loss: least-steps x (1 + critical-batch / batch) x penalty."""
    least_steps: Annotated[float | None, NUMBER] = None
    """Steps to the loss with an infinite batch; by default 1."""
    penalties: Annotated[dict[str, Option] | None, OPTIONS] = None
    """Steps of a method to a loss over those of backprop, --penalties.pb 1.2; by default those of --measured or of
    Stretto's own studies, else assumed."""
    measured: Path | None = None
    """Finished study of stretto compare, for penalties and the critical batch. Methods that it lacks are left out
    unless --methods names them."""
    target_loss: Annotated[float | None, NUMBER] = None
    """Train loss to aim at, with --measured; else one that most methods reach."""
    all_workers: Annotated[bool, FLAG] = False
    """Use all workers, even if fewer were better."""
    tries: Annotated[int | None, TRY] = None
    """Train so many promising plans, and the single worker, for some seconds each on this machine, and take the best.
    Kept beside the cluster's file."""


@dataclass(frozen=True, kw_only=True)
class FailureSettings:
    """How often workers fail, and what that costs."""

    mtbf_hours: Annotated[float | None, NUMBER] = None
    """Mean time between two failures of one worker, in hours."""
    checkpoint_interval: str = "auto"
    """Seconds of work between two checkpoints; auto: what is best."""
    checkpoint_seconds: Annotated[float | None, NUMBER] = None
    """Seconds of one checkpoint, in which nobody trains."""
    storage_bandwidth: Annotated[float | None, NUMBER] = None
    """Instead of this: bytes/s at which all workers together write."""
    restart_seconds: Annotated[float | None, NUMBER] = None
    """Seconds from a failure until all workers train on."""


@dataclass(frozen=True, kw_only=True)
class PlanOutput:
    """What is written of a plan, and what is said beside it."""

    explain: Annotated[bool, FLAG] = False
    """Tell what every other choice would change."""
    frontier: Annotated[bool, FLAG] = False
    """List the plans that no other beats in time, memory, money and energy."""
    scale: Annotated[tuple[int, ...] | None, WHOLES] = None
    """How plans scale with the number of workers, 1,10,100: a table and a page."""
    per_worker: Annotated[bool, FLAG] = False
    """With --scale, the batch size is that of each worker."""
    roofline: Path | None = None
    """File for a picture (SVG): FLOP/s of each layer's passes against FLOPs a byte, under the bounds of the device."""
    diff: Annotated[tuple[Path, ...] | None, TWO_FILES] = None
    """Compare two plans instead: --diff A.toml B.toml."""
    export: str | None = None
    """torch: also write the schedule for torch.distributed.pipelining."""
    out: Path = PLAN
    """File for the plan."""
    json: Annotated[bool, FLAG] = False
    """Print one JSON object on stdout, nothing else."""
    quiet: Annotated[bool, FLAG] = False
    """Say nothing."""
