"""Settings of `stretto plan`: a model, a cluster, and what the search may choose from.

A field's docstring is its help text on the command line.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stretto.settings.command_line import FLAG, NUMBER, OPTIONS, PAIRS, PRODUCTS, TEXTS, WHOLE, WHOLES, Option

PLAN = Path("plan.toml")
EXPORTED, PAGE = (".csv", ".split.json"), ".html"  # the endings of torch's files, and of a page, beside the plan
LAYERS = ("auto", "measured", "counted")
SEQUENCE = {"yes": (True,), "no": (False,), "auto": (False, True)}
TWO_FILES = Parameter(
    consume_multiple=True, negative="", converter=lambda _, tokens: tuple(Path(token.value) for token in tokens)
)
TRY = Parameter(name="--try", converter=WHOLE.converter)


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """A network to plan for, the devices, and the goal of the plan."""

    workers: Annotated[int | None, WHOLE] = None
    """Devices of the cluster that may be used: its first ones, or any if they differ; all unless said otherwise. Fewer
    if that is better."""
    cluster: str | None = None
    """A cluster's name, or its file, which stretto calibrate writes."""
    model: str = "mlp"
    """Network that stretto train trains: mlp, cnn, transformer, ...; one without data, which is only planned for:
    decoder, encoder or vit, with options, or as published: gpt3-175b, resnet152, ...; or your own,
    path/to/file.py:function or package.module:function: a module or a list of layers, or (module, example) where no
    --data is given."""
    model_options: Annotated[dict[str, Option] | None, OPTIONS] = None
    """Its options: --model-options.width 256."""
    data: str | None = None
    """Data set of a network, or your own, path/to/file.py:function; an embedded one that suits a built-in network
    unless said otherwise."""
    data_options: Annotated[dict[str, Option] | None, OPTIONS] = None
    """Its options."""
    loss: str = "auto"
    """Loss, as stretto train takes it; for your own network its cost is counted where --data is given."""
    metric: Annotated[tuple[str, ...], TEXTS] = ()
    """Metrics, as stretto train takes them: of no cost, and part of the plan's command."""
    optimizer: str = "auto"
    """sgd, lars, adam, adamw, nadam or lamb; what suits the network unless said otherwise. For any other, or your own,
    the one of them is priced that keeps as much state."""
    batch_size: Annotated[tuple[int, ...] | None, WHOLES] = None
    """Examples of a step; several to choose from: 64,128."""
    dtype: str | None = None
    """Of the weights of a network without data; unless said otherwise bfloat16, or float16 on devices without it: with
    these two the optimizer keeps float32 copies; tfloat32 are float32 weights whose products take the tensor cores of a
    GPU; bfloat16-autocast and float16-autocast are float32 weights under torch.autocast, with operators in the types
    that these have on a GPU."""
    memory_format: str = "contiguous"
    """Of the images of a network without data: contiguous, as torch has them unless told otherwise, or channels_last,
    which tensor cores take without transposing them."""
    methods: Annotated[tuple[str, ...], TEXTS] = ("synchronous",)
    """Methods to choose from: names, or families of them: synchronous, asynchronous, local (here all that have losses
    of their own, not the advice that stretto train takes by this word), all. Synchronous ones, which are plain
    training, unless said otherwise, but all for --objective loss."""
    pipeline: Annotated[tuple[int, ...] | None, WHOLES] = None
    """Lengths of the pipeline to choose from, in workers: 1,2. Without a limit, any that fits."""
    data_parallel: Annotated[tuple[int, ...] | None, WHOLES] = None
    """Numbers of replicas to choose from."""
    tensor: Annotated[tuple[int, ...] | None, WHOLES] = None
    """Numbers of processes that share a stage's weights to choose from; 1, 2, 4, 8 and 16 within a node unless said
    otherwise."""
    space: Annotated[tuple[tuple[int, int], ...] | None, PAIRS] = None
    """Parts of images along height and width to choose from: 2,1 1,1. 1,1 leaves images whole."""
    sharding: Annotated[tuple[str, ...] | None, TEXTS] = None
    """What replicas may share out: none, shard-optimizer (the optimizer's state: ZeRO-1), fully-shard (weights and
    gradients, too), fully-shard(reshard=True)."""
    recompute: Annotated[tuple[str, ...] | None, TEXTS] = None
    """What a backward may compute again instead of keeping it: none; selective (marked modules, as the core of
    attention), full (each layer from its input), stage (whole stages, a method's option recompute=True). Any, unless
    said otherwise."""
    sequence_parallel: str = "auto"
    """Whether processes that share weights (--tensor) also divide the sequence among them, outside of cut layers: yes,
    no, or auto, what is better. Only for networks that are planned for without data."""
    program: Annotated[str | None, Parameter(parse=False)] = None
    """What trains a network without data (`stretto.plan.programs`): not asked for on the command line, but by
    benchmarks/published."""
    stages: Annotated[tuple[int, ...] | None, PRODUCTS] = None
    """Numbers of stages to choose from; 8x3 is three on each of eight workers."""
    begins: Annotated[tuple[int, ...] | None, WHOLES] = None
    """The first layer of each stage, 0 for the first: 0,4,8; else the plan chooses."""
    microbatches: Annotated[tuple[int, ...] | None, WHOLES] = None
    """Numbers of micro-batches to choose from."""
    layers: str = "auto"
    """Seconds of layers, and of whole steps on each axis: measured among processes of this machine, which takes half a
    minute, or counted, by the rates of a calibration. auto measures where the cluster is this machine, once for each
    calibration, and keeps it beside the cluster's file (cluster.layers.json, cluster.steps.json); measured does so
    anew."""
    objective: str = "step"
    """step (time an example), money or energy (of an example, by price_per_hour or watts in the cluster's file),
    memory, or loss (time to a loss: needs --critical-batch, or --measured)."""
    critical_batch: Annotated[float | None, NUMBER] = None
    """Examples: steps to a loss are least-steps x (1 + critical-batch / batch size) x penalty."""
    least_steps: Annotated[float | None, NUMBER] = None
    """Steps to the loss with an infinite batch; 1, or what --measured says."""
    penalties: Annotated[dict[str, Option] | None, OPTIONS] = None
    """How many times as many steps as backprop a method takes to a loss: --penalties.pb 1.2. Others are those of
    --measured, else those that Stretto's own studies found, else assumed."""
    measured: Path | None = None
    """Folder of a finished study that `stretto compare` wrote: penalties of its methods with their error over seeds,
    and the critical batch where it has several batch sizes. Methods that it lacks are left out; those named in
    --methods are tried all the same, under an assumed penalty."""
    target_loss: Annotated[float | None, NUMBER] = None
    """Train loss to aim at, with --measured; the hardest that most of its methods reach unless said otherwise."""
    all_workers: Annotated[bool, FLAG] = False
    """Use all workers, even if fewer were better."""
    tries: Annotated[int | None, TRY] = None
    """Train so many of the most promising plans, and the single worker, for some seconds each on this machine, by
    turns, and choose by what that measures. It is kept beside the cluster's file (cluster.tried.json), where later
    plans of the same problem find it."""


@dataclass(frozen=True, kw_only=True)
class FailureSettings:
    """How often workers fail, and what that costs."""

    mtbf_hours: Annotated[float | None, NUMBER] = None
    """Mean time between two failures of one worker, in hours; that of the cluster's file unless said otherwise. With
    the two below, plans and --scale tell goodput: the share of time that is useful work."""
    checkpoint_interval: str = "auto"
    """Seconds of work between two checkpoints; auto: those of the highest goodput."""
    checkpoint_seconds: Annotated[float | None, NUMBER] = None
    """Seconds of one checkpoint, in which nobody trains."""
    storage_bandwidth: Annotated[float | None, NUMBER] = None
    """Instead of those: bytes/s at which all workers together write weights and optimizer state, 20e9; the cluster's
    file may say."""
    restart_seconds: Annotated[float | None, NUMBER] = None
    """From a failure until all workers train on from the last checkpoint; the cluster's file may say."""


@dataclass(frozen=True, kw_only=True)
class PlanOutput:
    """What is written of a plan, and what is said beside it."""

    explain: Annotated[bool, FLAG] = False
    """Tell what every other choice would change."""
    frontier: Annotated[bool, FLAG] = False
    """List the plans that no other beats in time, memory, money and energy."""
    scale: Annotated[tuple[int, ...] | None, WHOLES] = None
    """Numbers of workers, 1,10,100,1000,10000: throughput and efficiency of data-parallel, pipeline and hybrid plans on
    each, the cluster with as many more nodes as it takes; and utilisation against the batch size on --workers. Where
    failures are known, goodput, too. Printed, and drawn into a page beside the plan."""
    per_worker: Annotated[bool, FLAG] = False
    """With --scale, the batch size is that of each worker and grows with their number."""
    diff: Annotated[tuple[Path, ...] | None, TWO_FILES] = None
    """Compare two plans instead: --diff A.toml B.toml."""
    export: str | None = None
    """torch: write the schedule as torch.distributed.pipelining reads it, and split points, beside the plan."""
    out: Path = PLAN
    """File for the plan."""
    json: Annotated[bool, FLAG] = False
    """Print one JSON object on stdout, nothing else."""
    quiet: Annotated[bool, FLAG] = False
    """Say nothing."""
