"""Costs of the models that the command line plans for: built-in ones, published ones and the user's own."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from stretto.cost.attained import AUTOCAST, dtype_of_products
from stretto.cost.head_costs import HeadCosts
from stretto.cost.layer_table import ModelCosts, with_recomputed
from stretto.errors import UsageError
from stretto.losses.batch_means import halves
from stretto.losses.mean_check import is_trusted, refuse_parts
from stretto.losses.value import Loss, trial_of_stage
from stretto.measure.layer_counting import LayerCounting
from stretto.measure.layer_flops import layer_costs
from stretto.models.model import Model
from stretto.models.published import NETWORKS, is_planned_only, planned_network
from stretto.models.table import MODELS
from stretto.models.user_model import user_model
from stretto.nn import deferred
from stretto.nn.batch import Examples, as_tuple, first_size, inputs_of
from stretto.nn.layer_recompute import marked
from stretto.nn.nested import map_tensors
from stretto.nn.preserve import device_of, output_tensors, undisturbed
from stretto.optim.by_name import make_optimizer, usual_rate
from stretto.optim.parameter_labels import labelled_by
from stretto.optimizers import OPTIMIZERS
from stretto.options.checks import one_of
from stretto.options.import_object import is_function, unknown
from stretto.options.user_errors import explained
from stretto.settings.runs import TrainSettings, as_lists, known
from stretto.splitting import Stages, pieces
from stretto.splitting.structure import refuse_names
from stretto.study.counted_heads import UncutModel, costs_of_head
from stretto.study.prepare import Prepared, build_model, dataset, naming_first, resolve, with_any_rate

EXAMPLES = 2  # of the batch on which costs are counted
TARGETS = 16  # on which the loss is compared with those of its halves
NO_DATA = "there are no data, which say what it learns: add --data path/to/file.py:function"


DTYPES = ("float32", "tfloat32", "bfloat16", "float16", f"bfloat16{AUTOCAST}", f"float16{AUTOCAST}")
MEMORY_FORMATS = ("contiguous", "channels_last")


@dataclass(frozen=True)
class TensorFormat:
    """The dtype, one of DTYPES, and the memory format, one of MEMORY_FORMATS.

    tfloat32 are float32 tensors whose products run in TF32. With autocast weights are float32, and operators run in the
    types that torch.autocast gives them. Raises UsageError for others.
    """

    dtype: str = "float32"
    memory_format: str = "contiguous"

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("memory_format", self.memory_format, MEMORY_FORMATS)

    @property
    def weights(self) -> torch.dtype:
        """The type of weights and of floating-point inputs."""
        found: torch.dtype = getattr(torch, self.dtype if self.dtype in ("bfloat16", "float16") else "float32")
        return found

    @property
    def autocast(self) -> torch.dtype | None:
        """The type of products under autocast; None without it."""
        return getattr(torch, dtype_of_products(self.dtype)) if self.dtype.endswith(AUTOCAST) else None

    def converted(self, layers: list[nn.Module], example: Tensor, name: str) -> tuple[list[nn.Module], Tensor]:
        """The layers and an input batch in this format. Raises UsageError for channels last without images."""
        example = example.to(self.weights) if example.is_floating_point() else example
        layers = [layer.to(self.weights) for layer in layers]
        if self.memory_format == "contiguous":
            return layers, example
        if example.dim() != 4:
            raise UsageError(f"memory_format={self.memory_format!r}: network {name!r} takes no images; leave it out")
        for layer in layers:
            layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as torch's tutorial has it
        return layers, example.contiguous(memory_format=torch.channels_last)


FormCosts = Mapping[tuple[int, bool, str], ModelCosts]  # by processes, whether they divide the sequence, recomputation


@dataclass(frozen=True)
class CostRequest:
    """What is counted beside whole layers.

    `heads` by their names; parts to `sharing` numbers of processes that may share weights; layers whose marked modules
    are recomputed (`selective`), and those on parts of the `sequence`. `format` concerns networks without data only;
    others are as their modules are.
    """

    heads: Sequence[str] = ("auto",)
    sharing: Sequence[int] = ()
    selective: bool = False
    sequence: bool = False
    format: TensorFormat = TensorFormat()


USUAL = CostRequest()
NO_MARK = "no module of its layers is marked for it (recompute_selectively = True), as the core of attention is"
NOT_TRAINED = "stretto train cannot divide sequences among the processes that share weights"


@dataclass(frozen=True)
class Costed:
    """A model and its costs by layer.

    `heads` are the costs of auxiliary heads by their names; `no_heads` says why others cannot be priced. `sides` are
    the rows of the image that each layer takes, 0 for no image; `trained` the model's settings for `stretto train`,
    None if that cannot train it; `layers` the names of the layers; `positions` where they begin in a user's own model,
    as `stretto.split` counts, None for other models. `tensors` are the numbers of tensors that each layer hands on:
    several where branches cross its end; empty where they are not counted. `tensor_costs` are the costs to
    each of several processes that share weights, by their number, and `unshared` the reasons why others cannot share
    them; `resolved` are the settings, one stage, of a model that `stretto train` can train; `options` those of a
    network that is planned for without data. `form_costs` are those of layers that are recomputed, or on parts of the
    sequence, as `Problem` has them; `unformed` says why there are none with "selective" or with "sequence". `in_parts`
    says why methods that cut minibatches cannot train it with its loss; empty if they can.
    """

    name: str
    costs: ModelCosts
    heads: Mapping[str, HeadCosts]
    no_heads: Mapping[str, str]
    sides: tuple[int, ...]
    batch_size: int
    optimizer: str
    trained: Mapping[str, Any] | None
    layers: tuple[str, ...]
    positions: tuple[int, ...] | None = None
    tensors: tuple[int, ...] = ()
    tensor_costs: Mapping[int, ModelCosts] = field(default_factory=dict)
    unshared: Mapping[int, str] = field(default_factory=dict)
    resolved: TrainSettings | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    form_costs: FormCosts = field(default_factory=dict)
    unformed: Mapping[str, str] = field(default_factory=dict)
    in_parts: str = ""

    def passed(self, cut: Sequence[int]) -> list[dict[str, float]]:
        """What passes from each stage to the next, as plain data: tensors, and bytes an example, all tensors together.

        Branches that end behind the next stage pass through it, so that they are counted at every boundary.
        """
        return [
            {"tensors": self.tensors[end - 1], "bytes_per_example": self.costs.layers[end - 1].output.each}
            for end in (cut[1:-1] if self.tensors else ())
        ]

    def bounds(self, cut: Sequence[int]) -> list[int]:
        """Bounds of stages in layers as `stretto.split` and `stretto train` count them."""
        return [bound if self.positions is None else self.positions[bound] for bound in cut]


def costed(requested: TrainSettings, asked: CostRequest = USUAL) -> Costed:
    """Count the costs of a model on its data, of a network without data, or of the user's own (`file.py:function`).

    Of the settings those of the model, its data, loss and optimizer count; metrics cost nothing. Without data a user's
    own network is counted on its example, without a loss. Raises UsageError for an unknown name.
    """
    name = requested.model
    if is_planned_only(name, requested.model_options):
        return of_paper(requested, asked)
    if (is_function(name) and requested.data is not None) or name in MODELS:
        return trainable(requested, asked)
    if is_function(name):
        return of_user(requested, asked.heads)
    raise unknown("model", name, {*MODELS, *NETWORKS})


def trainable(requested: TrainSettings, asked: CostRequest) -> Costed:
    """Count the costs of a network that `stretto train` can train: its loss is known, too.

    Also to each process of several that share its weights, for each number of them that can, and of layers of which
    parts are recomputed.
    """
    from stretto.measure.tensor_costs import tensor_costs
    from stretto.plan.problem import merged

    settings, loaded, model, cut = build(requested)
    x, y = loaded.train.first(EXAMPLES)
    inputs = inputs_of(x)
    layers = model.layers if cut is None else cut
    counting = LayerCounting()
    costs = layer_costs(layers, inputs, loss=model.loss, target=y, fake=counting)

    def count(number: int, _: bool, how: str) -> ModelCosts:
        if number == 1:
            return layer_costs(layers, inputs, loss=model.loss, target=y, recompute=how, fake=counting)
        return tensor_costs(layers, inputs, number, loss=model.loss, target=y, recompute=how, fake=counting)

    parts, unshared = count_parts(asked.sharing, count)
    formed, unformed = count_forms(layers, replace(asked, sequence=False), count, {1: costs, **parts})
    features = outputs(layers, *inputs)
    uncut = UncutModel(layers, features, inputs, y, model.loss, merged(costs.layers), counting)
    chosen = ("model", "model_options", "data", "data_options", "loss", "metric", "optimizer")
    wanted = as_lists({key: getattr(requested, key) for key in chosen})
    return Costed(
        requested.model, costs, *heads_of(asked.heads, uncut), sides([inputs, *features[:-1]]),
        known(settings.batch_size), planned_optimizer(settings.optimizer),
        {key: value for key, value in wanted.items() if value not in ({}, [], "auto", None)},
        tuple(map(str, range(len(layers)) if cut is None else cut.bounds[:-1])),
        None if cut is None else tuple(cut.bounds), num_tensors(features),
        parts, unshared, settings, form_costs=formed, unformed={"sequence": NOT_TRAINED, **unformed},
        in_parts=why_not_in_parts(model.loss, loaded, features[-1]),
    )  # fmt: skip


def build(requested: TrainSettings) -> tuple[TrainSettings, Any, Model, Stages | None]:
    """The settings resolved, the data, the model, and its pieces where it is no list of layers."""
    settings = with_any_rate(resolve(replace(requested, stages=1)))  # more would be looked for in a cut of their own
    loaded, model = dataset(settings), build_model(settings)
    example = loaded.train.first(EXAMPLES)[0]
    if model.module is None and isinstance(example, Mapping):
        refuse_names(example)
    with naming_first(loaded, EXAMPLES):
        cut = None if model.module is None else pieces(model.module, example=example)
    return settings, loaded, model, cut


def count_parts(
    sharing: Sequence[int], count: Callable[[int, bool, str], ModelCosts]
) -> tuple[dict[int, ModelCosts], dict[int, str]]:
    """The costs to each of several processes that share weights, and why other numbers of processes cannot."""
    found, reasons = {}, {}
    for parts in sharing:
        try:
            found[parts] = count(parts, False, "none")
        except UsageError as error:  # too few heads for so many processes, say
            reasons[parts] = str(error)
    return found, reasons


def count_forms(
    layers: Sequence[nn.Module],
    asked: CostRequest,
    count: Callable[[int, bool, str], ModelCosts],
    whole: Mapping[int, ModelCosts],
) -> tuple[FormCosts, dict[str, str]]:
    """The costs of every form that was asked for and can be, and why others cannot.

    `count` counts one; `whole` are the costs to each of so many processes, without recomputation. Processes whose parts
    were not counted have no forms of their own.
    """
    found: dict[tuple[int, bool, str], ModelCosts] = {}
    reasons: dict[str, str] = {}
    has_marks = any(marked(layer) for layer in layers)
    if not has_marks:
        reasons["selective"] = NO_MARK
    for number, unchanged in whole.items():
        of_sequence = {False: unchanged}
        if asked.sequence and number > 1:
            try:
                of_sequence[True] = found[number, True, "none"] = count(number, True, "none")
            except UsageError as error:  # no transformer blocks, say
                reasons["sequence"] = str(error)
        for sequence, costs in of_sequence.items() if asked.selective and has_marks else ():
            again = count(number, sequence, "selective")
            rows = tuple(map(with_recomputed, again.layers, costs.layers))
            plain = dict(costs.read_rows)
            reading = tuple((i, with_recomputed(row, plain[i])) for i, row in again.read_rows if i in plain)
            found[number, sequence, "selective"] = replace(costs, layers=rows, read_rows=reading)
    return found, reasons


def planned_optimizer(name: str) -> str:
    """The optimizer of the table that keeps as much state as this one: itself, if it is there.

    Raises UsageError for a function of the user's that makes none of a single parameter.
    """
    if name in OPTIMIZERS:
        return name
    rate = usual_rate(name)
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    parameter.grad = torch.ones(4, 4)
    begin = f"optimizer {name} fails on a single parameter [4, 4], which tells how much it keeps:"
    with explained(begin, f". Plan with one of {', '.join(OPTIMIZERS)} instead", passing=()):
        made = labelled_by(make_optimizer(name, rate, None, 0.0), [])([parameter])
        made.step()
    states = sum(value.numel() for value in made.state[parameter].values() if isinstance(value, torch.Tensor))
    return "adam" if states > 1.5 * parameter.numel() else "sgd"


def of_paper(requested: TrainSettings, asked: CostRequest) -> Costed:
    """Count the costs of a network without data on the meta device, without memory for its parameters."""
    from stretto.measure.tensor_costs import published_tensor_costs
    from stretto.plan.problem import merged

    name, format, heads = requested.model, asked.format, asked.heads
    for key, usual in (("data", None), ("data_options", {}), ("metric", ()), ("loss", "auto")):
        value = getattr(requested, key)
        if value and value != usual:
            raise UsageError(
                f"{key}={value!r}: network {name!r} is planned for without data, and has its loss; leave it out"
            )
    network, places = planned_network(name, requested.model_options).condensed()
    counting = LayerCounting(on_meta=format.autocast is None)
    with torch.device("meta"), counting.mode if counting.on_meta else nullcontext():
        x, y = network.example(EXAMPLES), network.target(EXAMPLES)
        layers, x = format.converted(network.layers(), x, name)
    how_run: dict[str, Any] = {"autocast": format.autocast, "fake": counting}
    costs = replace(layer_costs(layers, x, loss=network.loss, target=y, **how_run), dtype=format.dtype)
    features = outputs(layers, x) if heads or x.dim() == 4 else []
    features = [features[place] for place in places] if features else []
    if heads:
        rows = merged(costs.spread(places).layers)
        uncut = UncutModel.spread(
            layers, places, features=features, inputs=(x,), target=y, loss=network.loss, rows=rows, counting=counting
        )

    def count(number: int, sequence: bool, how: str) -> ModelCosts:
        if number == 1:
            return layer_costs(layers, x, loss=network.loss, target=y, recompute=how, **how_run)
        return published_tensor_costs(
            network, layers, (x, y), number, costs, sequence=sequence, recompute=how, **how_run
        )

    parts, unshared = count_parts(asked.sharing if network.counts_parts else (), count)
    formed, unformed = count_forms(layers, asked, count, {1: costs, **parts})
    optimizer = network.optimizer if requested.optimizer == "auto" else requested.optimizer
    return Costed(
        name, costs.spread(places), *heads_of(heads, uncut) if heads else ({}, {}),
        sides([(x,), *features[:-1]] if features else []), network.batch_size,
        optimizer, None, tuple(map(str, range(len(places)))),
        tensors=num_tensors(features), tensor_costs={key: each.spread(places) for key, each in parts.items()},
        unshared=unshared, options=network.options,
        form_costs={key: each.spread(places) for key, each in formed.items()}, unformed=unformed,
    )  # fmt: skip


def of_user(requested: TrainSettings, heads: Sequence[str]) -> Costed:
    """Count the costs of a user's own network, a layer for each piece `stretto.split` can cut; without its loss."""
    name, optimizer = requested.model, requested.optimizer
    model, example = user_model(name, requested.model_options)
    if example is None:
        raise UsageError(
            f"{name} gives no example of its input: add --data path/to/file.py:function, or return (module, example) "
            "with one input batch"
        )
    inputs = inputs_of(example)
    layers = pieces(model, example=example)
    features = outputs(layers, *inputs)
    return Costed(
        name, layer_costs(layers, inputs), {}, dict.fromkeys(heads, NO_DATA), sides([inputs, *features[:-1]]),
        len(inputs[0]),
        "sgd" if optimizer == "auto" else planned_optimizer(optimizer), None, tuple(map(str, layers.bounds[:-1])),
        tuple(layers.bounds), num_tensors(features),
    )  # fmt: skip


def outputs(layers: Sequence[nn.Module], *inputs: Tensor) -> list[tuple[Any, ...]]:
    """The output of each layer, one after the other, a dict of the last one as it is; the layers stay as they are."""
    values: list[tuple[Any, ...]] = [inputs]
    with torch.no_grad(), undisturbed(layers, device_of(layers)), deferred.faked(layers):
        for layer in layers:
            values.append(as_tuple(layer(*values[-1])))
    return values[1:]


def why_not_in_parts(loss: Loss, loaded: Any, output: tuple[Any, ...]) -> str:
    """Why methods that cut minibatches cannot train with this loss; empty if they can.

    `output` is the last layer's for `EXAMPLES`. Tried with made-up outputs on the targets of the first `TARGETS`.
    """
    if is_trusted(loss):
        return ""
    target = loaded.train.first(TARGETS)[1]
    examples = first_size(target)
    if isinstance(target, Examples) or examples < 2:
        return ""
    real = map_tensors(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), output)  # of placeholders, too
    try:
        value = real[0] if len(real) == 1 else real
        refuse_parts(trial_of_stage(loss, 0), value, target, halves(examples), EXAMPLES, mark=True)
    except UsageError as error:
        return str(error)
    return ""


def refuse_loss_in_parts(prepared: Prepared) -> None:
    """Raise UsageError if a run cuts minibatches, and cannot with its loss. No step is taken."""
    loss, loaded = prepared.model.loss, prepared.dataset
    if prepared.pieces < 2 or is_trusted(loss):
        return
    *_, output = outputs(prepared.stages, *inputs_of(loaded.train.first(EXAMPLES)[0]))
    reason = why_not_in_parts(loss, loaded, output)
    if reason:
        raise UsageError(reason)


def num_tensors(features: Sequence[Any]) -> tuple[int, ...]:
    """How many tensors each of these outputs has."""
    return tuple(len(output_tensors(each)) for each in features)


def heads_of(names: Sequence[str], model: UncutModel) -> tuple[Mapping[str, HeadCosts], Mapping[str, str]]:
    """The costs of heads behind each layer by name, and by name why some cannot be priced."""
    known, reasons = {}, {}
    for name in names:
        costs, reason = costs_of_head(name, model)
        if costs is not None:
            known[name] = costs
        else:
            reasons[name] = reason
    return known, reasons


def sides(inputs: list[tuple[Tensor, ...]]) -> tuple[int, ...]:
    """The height of the image that each layer takes, in pixels; 0 for a layer that takes no image."""
    return tuple(int(x.shape[-2]) if x.dim() == 4 else 0 for x, *_ in inputs)
