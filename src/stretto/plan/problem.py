"""The problem that a plan solves: a model, a cluster, and the ways to train that may be tried."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from stretto.cost.cluster import Cluster
from stretto.cost.head_costs import HeadCosts
from stretto.cost.layer_table import LayerCost, ModelCosts
from stretto.errors import UsageError, nearest
from stretto.optimizers import optimizer_of
from stretto.options.checks import one_of, shown
from stretto.plan.planned_methods import FAMILIES, names_of, planned
from stretto.plan.programs import PROGRAMS, USUAL, ProgramTraits
from stretto.plan.split_layer_costs import too_few_rows

RECOMPUTE = ("none", "selective", "full", "stage")
SHARD_OPTIMIZER = "shard-optimizer"  # of what replicas have alike, only the optimizer's state is shared out
SHARDS = ("none", SHARD_OPTIMIZER, "fully-shard", "fully-shard(reshard=True)")
USUAL_TENSORS = (1, 2, 4, 8, 16)  # tried where a problem names none, within a node
USUAL_SPACES = ((1, 1), (2, 1), (4, 1), (2, 2))


class LayerForm(NamedTuple):
    """How layers are run: by how many processes each, on parts of the sequence or not, and what is recomputed of them.

    `recompute` is "none", "selective" or "full", layer by layer.
    """

    tensor: int = 1
    space: tuple[int, int] = (1, 1)
    sequence: bool = False
    recompute: str = "none"


def usual_tensors(cluster: Cluster) -> tuple[int, ...]:
    """The numbers of processes that may share a stage's weights where none are named: those within a node."""
    node_size = max(group.workers for group in cluster.groups)
    return tuple(tensor for tensor in USUAL_TENSORS if tensor <= node_size or tensor == 1)


def merged(layers: tuple[LayerCost, ...]) -> tuple[LayerCost, ...]:
    """The layers, with a loss merged into the last one."""
    *rows, last = layers
    return (*rows[:-1], rows[-1].then(last)) if last.type == "Loss" and rows else layers


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model to train on at most `workers` of a cluster, and the choices that a plan may make.

    `batch_sizes` are numbers of examples of a step. `methods` are names, families ("synchronous", "asynchronous",
    "local") or "all". `recompute`, `sequences` (whether processes that share weights divide the sequence outside cut
    layers), `shards` and `spaces` list the values to try. `pipelines` (workers of a replica's
    pipeline), `data_parallels` (replicas), `microbatches` and `stages` list the numbers allowed, None for any; `begins`
    has the first layer of each of so many stages, where that is given.
    `tensors` lists the numbers of processes that may share a stage's weights; None for USUAL_TENSORS that fit into a
    node. `heads[l]` is the cost of an auxiliary head behind layer l, chosen
    unasked, which local methods need; None where there can be none, so that no stage ends there. `named_heads` are the
    same of methods that name another, by its name; `no_heads` says by name why some cannot be priced. `sides[l]`
    is the number of rows (and columns) of layer l's input image, 0 for no image; space needs them. With `masters`, the
    optimizer keeps float32 copies of 2-byte weights, and float32 state. `tensor_costs[P]` are the costs to each of P
    processes that share weights, where they have been counted; others follow from `costs`. `form_costs` are those by
    (processes, whether they divide the sequence, "selective" or "none"), without which there are no plans with them.
    `ratios` are measured over predicted seconds of whole steps, by the ways to divide the work of
    `stretto.plan.ways`, `byte_ratios` measured over predicted bytes of the fullest worker, and `spreads` half the
    distance between the second slowest and the second fastest of the measured steps, as a share of their median.
    With `all_workers`, every plan uses all workers. With `trained`, there are only plans that `stretto train` can
    run. With `weight_products`, a W takes the products that give weights' gradients, which a backward has beside an
    I, as systems for large models run it; else it goes backward through the operators again, as autograd does. What
    else such systems do is the `program`'s. Where workers differ, plans choose among them and place processes,
    unless `places_workers` is false; else they take the
    first ones in their order. Raises UsageError for values that no plan can have.
    """

    costs: ModelCosts
    cluster: Cluster
    workers: int
    batch_sizes: tuple[int, ...]
    optimizer: str = "sgd"
    dtype: str | None = None
    methods: tuple[str, ...] = ("synchronous",)
    recompute: tuple[str, ...] = RECOMPUTE
    sequences: tuple[bool, ...] = (False, True)
    shards: tuple[str, ...] = SHARDS
    pipelines: tuple[int, ...] | None = None
    data_parallels: tuple[int, ...] | None = None
    tensors: tuple[int, ...] | None = None
    spaces: tuple[tuple[int, int], ...] = USUAL_SPACES
    microbatches: tuple[int, ...] | None = None
    stages: tuple[int, ...] | None = None
    begins: tuple[int, ...] | None = None
    heads: tuple[LayerCost | None, ...] | None = None
    named_heads: Mapping[str, HeadCosts] = field(default_factory=dict)
    no_heads: Mapping[str, str] = field(default_factory=dict)
    sides: tuple[int, ...] | None = None
    masters: bool = False
    tensor_costs: Mapping[int, ModelCosts] = field(default_factory=dict)
    form_costs: Mapping[tuple[int, bool, str], ModelCosts] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)
    byte_ratios: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, float] = field(default_factory=dict)
    all_workers: bool = False
    trained: bool = False
    weight_products: bool = False
    program: ProgramTraits = PROGRAMS[USUAL]
    places_workers: bool = True

    def __post_init__(self) -> None:
        optimizer_of(self.optimizer)
        names_of(self.methods)
        for name in (word for word in self.methods if word not in (*FAMILIES, "all")):
            optimizers = planned(name).optimizers
            if optimizers and self.optimizer not in optimizers:
                raise UsageError(
                    f"method {name!r} is built on {' or '.join(optimizers)}, and the optimizer is "
                    f"{self.optimizer!r}: choose another method, or optimizer {optimizers[0]!r}"
                )
        for word in (word for word in self.methods if word != "all" and planned(names_of((word,))[0]).has_heads):
            reason = self.why_no_heads(names_of((word,))[0])
            if reason:
                raise UsageError(f"no plan can have the methods {word}: {reason}. Leave them out")
        if not 1 <= self.workers <= self.cluster.num_workers:
            raise UsageError(
                f"workers={self.workers} of cluster {self.cluster.name!r}, which has {self.cluster.num_workers}: "
                f"choose from 1 to {self.cluster.num_workers}, or another cluster"
            )
        for name in ("batch_sizes", "pipelines", "data_parallels", "tensors", "microbatches", "stages"):
            for value in getattr(self, name) or ():
                if value < 1:
                    raise UsageError(f"{name} lists {value}: whole numbers of at least 1")
        if self.whole_layers and max(self.tensors or (1,)) > 1:
            raise UsageError(
                f"tensors lists {max(self.tensors or ())}, but optimizer {self.optimizer!r} needs whole layers, of "
                "which each process would have a part: leave it out, or take an optimizer that works on each element"
            )
        self.check_whole_matrices()
        for space in self.spaces:
            if len(space) != 2 or min(space) < 1:
                raise UsageError(f"spaces lists {shown(space)}: give pairs of whole numbers of at least 1, such as 2,1")
        self.check_begins()
        for kind in self.recompute:
            one_of("recompute", kind, RECOMPUTE)
        for shard in self.shards:
            if shard not in SHARDS:
                raise UsageError(f"unknown sharding {shown(shard)}: {nearest(str(shard), SHARDS)}")

    def check_whole_matrices(self) -> None:
        """Raise UsageError where each of the processes that share a stage would have a part of a matrix to turn."""
        turning = [
            word for word in self.methods if word not in (*FAMILIES, "all") and planned(word).turns_whole_matrices
        ]
        if turning and min(self.tensors or (1,)) > 1:
            raise UsageError(
                f"tensors lists {min(self.tensors or ())}, but method {turning[0]!r} turns whole matrices, of which "
                "each process would have a part: leave tensors out, or take the method without rotate"
            )

    def check_begins(self) -> None:
        """Raise UsageError for stages that do not begin at layers of the model, one after the other."""
        if self.begins is None:
            return
        layers, given = len(self.layers), " ".join(map(str, self.begins))
        if self.begins[:1] != (0,) or self.begins[-1] >= layers or any(b <= a for a, b in pairwise(self.begins)):
            raise UsageError(
                f"begins lists {given}: give the first layer of each stage, 0 for the first, then larger ones, of the "
                f"model's layers 0 to {layers - 1}"
            )
        if self.stages != (len(self.begins),):
            numbers = " ".join(map(str, self.stages or ("any number",)))
            raise UsageError(f"begins lists {len(self.begins)} stages, and stages {numbers}: they must be the same")

    def heads_of(self, method: str) -> HeadCosts | None:
        """The costs of a method's heads behind each layer; None if they are not known."""
        head = planned(method).head
        return self._auto if head == "auto" else self.named_heads.get(head)

    @cached_property
    def _auto(self) -> HeadCosts | None:
        return None if self.heads is None else HeadCosts(rows=self.heads)

    def head_variant(self, method: str, stage: int, stages: int) -> Hashable:
        """What the costs of the heads behind a stage depend on, beside its last layer."""
        costs = self.heads_of(method)
        return None if costs is None else (costs.variant(stage, stages),)

    def why_no_heads(self, method: str) -> str:
        """Why there are no plans with a method that has auxiliary heads; empty if there are."""
        tried, costs = planned(method), self.heads_of(method)
        head, what = tried.method.head, "a predicted gradient" if tried.predicts_gradients else "an auxiliary head"
        if costs is None:
            reason = self.no_heads.get(tried.head, "there are no data, which say what it learns")
            return f"they need {what} behind each stage, and the cost of head={head} is not known: {reason}"
        return self.why_no_tied(head, costs) if self.costs.ties else ""

    def why_no_tied(self, head: str, costs: HeadCosts) -> str:
        """Why training refuses a kind of head where layers share weights; empty if it does not."""
        between = {layer for tie in self.costs.ties for layer in sorted(tie.layers)[1:]} - {len(self.layers) - 1}
        if costs.following and between:
            name = self.layers[min(between)].name
            return (
                f"head={head} reads the first layers of the next stage, and layer {name} has weights of an earlier "
                "layer (tied weights), which another stage trains: take another head"
            )
        if costs.read and costs.every > 1 and not costs.trains:
            return (
                f"head={head} reads weights after every {costs.every} updates, but layers share weights (tied "
                "weights), whose versions come after each update: take every=1"
            )
        return ""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The methods to try: those that work with the optimizer.

        Local methods only if the costs of heads are known, and training takes such heads where layers share weights.
        """
        fitting = (name for name in names_of(self.methods) if planned(name).drives(self.optimizer))
        return tuple(name for name in fitting if not planned(name).has_heads or not self.why_no_heads(name))

    @cached_property
    def plain(self) -> tuple[str, ...]:
        """The methods among `names` that are tried on a single worker."""
        return tuple(name for name in self.names if planned(name).suits(1))

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """The layers; the loss is merged into the last one."""
        return merged(self.costs.layers)

    def whole_costs(self, form: LayerForm) -> ModelCosts:
        """The costs of layers that no processes share."""
        selective = form.recompute == "selective"
        return self.form_costs.get((1, False, "selective"), self.costs) if selective else self.costs

    def counted_costs(self, form: LayerForm) -> ModelCosts | None:
        """The costs of layers to each of the processes that share them; None where they follow from `whole_costs`."""
        how = "selective" if form.recompute == "selective" else "none"
        if form.sequence or how != "none":
            return self.form_costs.get((form.tensor, form.sequence, how))
        return self.tensor_costs.get(form.tensor)

    def has(self, form: LayerForm) -> bool:
        """Whether the costs of a form are known."""
        if form.sequence:
            return form.tensor > 1 and self.counted_costs(form) is not None
        return form.recompute != "selective" or (1, False, "selective") in self.form_costs

    def too_small(self, space: tuple[int, int]) -> str:
        """The first layer whose image has too few rows for `space`, which training refuses; empty if there is none."""
        for layer, side in zip(self.layers, self.sides or (), strict=self.sides is not None):
            if side and any(too_few_rows(window, space) for window in layer.image_windows):
                return layer.name
        return ""

    def state(self, layer: LayerCost) -> float:
        """Bytes of optimizer state for a layer."""
        chosen = optimizer_of(self.optimizer)
        if self.masters:
            return 4 * (layer.trained + chosen.state_numbers(layer.trained, layer.matrices))
        return layer.state_bytes(chosen)

    @property
    def whole_layers(self) -> bool:
        """Whether the optimizer needs all of a layer's weights in one process, so that no tensor axis divides them."""
        return bool(optimizer_of(self.optimizer).whole)

    @property
    def state_of_repeated(self) -> float:
        """Bytes of optimizer state for each byte of weights that count more than once; their matrices count once."""
        states = optimizer_of(self.optimizer).states
        return 4 / 2 * (1 + states) if self.masters else float(states)

    def but(self, **changes: object) -> "Problem":
        """A copy of the problem with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]
