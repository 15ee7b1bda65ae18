"""What auxiliary heads cost: those of a trainer, and those of a name behind each layer of an uncut model."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stretto.cost.head_costs import HeadCosts
from stretto.cost.layer_table import Affine, LayerCost
from stretto.errors import UsageError
from stretto.heads import LocalLoss, build
from stretto.heads.auglocal import copied_stages, depth_at
from stretto.heads.head import HeadKind, Network, ReadingHead, Site
from stretto.heads.infopro import InfoPro, weight_at
from stretto.heads.segprop import SharedTop, top_layers
from stretto.heads.table import HEADS, build_head_at
from stretto.losses.minibatch_counts import Target
from stretto.measure.layer_flops import layer_costs
from stretto.methods.cure import read_in_plans
from stretto.nn.batch import as_tuple, first_size
from stretto.nn.memory_limit import bytes_of
from stretto.nn.nested import HeldTensors, map_tensors
from stretto.options.named import parse, resolve
from stretto.stage.gradient_predictor import squared_error
from stretto.stage.stage import head_loss

if TYPE_CHECKING:
    from stretto.losses import Loss
    from stretto.measure.layer_counting import LayerCounting

Tensors = tuple[Tensor, ...]


def counted_head(
    head: nn.Module,
    features: Tensors,
    loss: "Loss",
    inputs: Tensors,
    target: Any,
    counting: "LayerCounting | bool" = True,
) -> LayerCost:
    """The costs of a head with its loss behind a stage, for the `features` of a batch.

    Weights that another stage's optimizer steps have no state and no update here. A copy of them and their gradients
    take memory; the gradient counts as kept by the forward, as it is there when the backward's memory is at its peak.
    """
    if isinstance(head, InfoPro) and not head.weight:  # its decoder never gets a gradient
        head = copy.deepcopy(head)
        head.decoder.requires_grad_(False)
    row = with_loss(head, features, loss, inputs, target, counting)
    if not isinstance(head, SharedTop):
        return row
    stepped = copy.deepcopy(head)
    for parameter in stepped.shared:
        parameter.requires_grad_(False)
    own = with_loss(stepped, features, loss, inputs, target, counting)
    fewer = {key: getattr(own, key) for key in ("gradient_bytes", "parameter_tensors", "matrices", "matrix_shapes")}
    return replace(row, **fewer, activation=row.activation + Affine(row.gradient_bytes - own.gradient_bytes))


def with_loss(
    head: nn.Module, features: Tensors, loss: "Loss", inputs: Tensors, target: Any, counting: "LayerCounting | bool"
) -> LayerCost:
    """The row of a head and its loss, trained as its parameters say, with a gradient of what it is given."""
    before = Trained().to(features[0].device)
    if isinstance(head, LocalLoss):
        whole = HeadWithLoss(head, loss, inputs, target)
        return layer_costs([before, whole], features, fake=counting).layers[1]
    _, row, behind = layer_costs([before, head], features, loss=loss, target=target, fake=counting).layers
    return row.then(behind)


class Trained(nn.Module):
    """Stands for a trained stage in front of a head: what it gives wants a gradient, and its graph keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, *features: Tensor) -> Any:
        """The features."""
        values = tuple(x + self.shift.to(x.dtype) if x.is_floating_point() else x for x in features)
        return values if len(values) > 1 else values[0]


class PredictionError(nn.Module):
    """What predicts a gradient, with its squared error, as one layer, so that its costs can be counted.

    `target` is given to it, unless it is None.
    """

    def __init__(self, head: nn.Module, target: Tensor | None) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("target", target)

    def forward(self, *features: Tensor) -> Tensor:
        """The error of the features' examples, where all gradients are zero; targets are repeated to as many."""
        target = self.get_buffer("target") if "target" in dict(self.named_buffers()) else None
        given = {} if target is None else {"target": torch.cat([target] * (len(features[0]) // len(target)))}
        predicted = [part for part in as_tuple(self.head(*features, **given)) if part is not None]
        return torch.stack([squared_error(part, part, None) for part in predicted]).sum()


class HeadWithLoss(nn.Module):
    """A head that computes its own loss, as one layer, so that its costs can be counted."""

    def __init__(self, head: LocalLoss, loss: "Loss", inputs: Tensors, target: Any) -> None:
        super().__init__()
        self.head, self.loss = head, loss
        self.batch = HeldTensors((tuple(inputs), target))

    def forward(self, *features: Tensor) -> Tensor:
        """The loss of the features' examples; inputs and targets are repeated to as many."""
        batch = self.batch.value()
        inputs, target = map_tensors(lambda each: torch.cat([each] * (len(features[0]) // len(each))), batch)
        return head_loss(self.loss, self.head, features, features, Target(target, inputs=inputs))


@dataclass(frozen=True, eq=False)
class UncutModel:
    """A model's layers one by one, the output of each for one batch, and what its heads are counted with.

    `rows` are the costs of the layers, the loss in the last one.
    """

    layers: Sequence[nn.Module]
    features: Sequence[tuple[Any, ...]]
    inputs: Tensors
    target: Any
    loss: Any
    rows: Sequence[LayerCost]
    counting: "LayerCounting"
    _networks: dict[int, Network] = field(default_factory=dict)

    @classmethod
    def spread(cls, layers: Sequence[nn.Module], places: Sequence[int], **others: Any) -> "UncutModel":
        """The model whose layer i is like layers[places[i]], each a module of its own."""
        seen: set[int] = set()
        own = [copy.deepcopy(layers[p]) if p in seen or seen.add(p) else layers[p] for p in places]  # type: ignore[func-returns-value]
        return cls(own, **others)

    def network(self, index: int, kind: HeadKind) -> tuple[int, Network]:
        """The stage behind which a head behind layer `index` stands, and the network for it.

        All layers above are the next stage of a head that reads that; else each layer is a stage.
        """
        if kind.reads is None or kind.reads.of_readout:
            if -1 not in self._networks:
                self._networks[-1] = Network(self.layers, self.features, self.inputs)
            return index, self._networks[-1]
        halves = [nn.Sequential(*self.layers[: index + 1]), nn.Sequential(*self.layers[index + 1 :])]
        return 0, Network(halves, [self.features[index], self.features[-1]], self.inputs)


def counted_predictor(
    head: nn.Module, features: Tensors, target: Tensor | None, counting: "LayerCounting | bool" = True
) -> LayerCost:
    """The costs of what predicts the gradient of a batch's `features`, with its error; it reads a `target` if given."""
    return layer_costs([PredictionError(head, target)], features, fake=counting).layers[0]


def costs_of_predictor(name: str, model: UncutModel, *, labelled: bool) -> tuple[HeadCosts | None, str]:
    """As `costs_of_head`, of what predicts the gradient of a layer's output; from the targets, too, if `labelled`."""
    rows, reason = list[LayerCost | None](), "this model is a single piece, so that no stage stands below another"
    for index, features in enumerate(model.features[:-1]):
        row = None
        try:
            with torch.device(features[0].device):
                head = build_head_at(name, Site(index, features, model.features[-1][0], labelled=labelled), True)
            head = head.to(features[0].dtype)
            row = counted_predictor(head, features, model.target if labelled else None, model.counting)
        except UsageError as error:
            reason = str(error)
        rows.append(row)
    if not any(row is not None for row in rows):
        return None, reason
    return HeadCosts(rows=(*rows, rows[-1])), ""


def costs_of_head(name: str, model: UncutModel) -> tuple[HeadCosts | None, str]:
    """The costs of a head by its name in plans behind each layer of a model; or None, and why there are none.

    One whose first tensor is a table without examples, as of rotary positions, can have none.
    """
    for value in model.features[-1]:
        if not isinstance(value, Tensor):  # as a Trainer that makes heads refuses it
            return None, f"the model returns {type(value).__name__}: give a tensor or a tuple of tensors"
    name, predicts, labelled = read_in_plans(name)
    if predicts:
        return costs_of_predictor(name, model, labelled=labelled)
    bare, written = parse(name, "head")
    kind = HEADS.get(bare)
    options: dict[str, Any] = {} if kind is None else resolve(f"head {bare!r}", kind.build, written)
    if bare == "auglocal":
        copied = partial(copied_by_auglocal, depth=options["depth"], coefficient=options["coefficient"])
        return HeadCosts(rows=tuple(model.rows), copied=copied), ""
    rows, reason = list[LayerCost | None](), "this model is a single piece, so that no stage stands below another"
    spared, following = list[LayerCost | None](), list[float]()
    for index, feature in enumerate(model.features[:-1]):
        row = other = None
        num_bytes = 0.0
        try:
            head = head_behind(name, index, kind, model)
        except UsageError as error:
            reason = str(error)
        else:
            count = partial(
                counted_head,
                features=feature,
                loss=model.loss,
                inputs=model.inputs,
                target=model.target,
                counting=model.counting,
            )
            if isinstance(head, InfoPro):
                head.weight = 0.0
                other, head.weight = count(head), 1.0
            row = count(head)
            num_bytes = float(bytes_of(head.copied.parameters())) if isinstance(head, ReadingHead) else 0.0
        rows.append(row)
        spared.append(other)
        following.append(num_bytes)
    if not any(row is not None for row in rows):
        return None, reason
    costs = HeadCosts(rows=(*rows, rows[-1]))
    if bare == "infopro":
        spares = partial(spared_by_infopro, first=options["first"], last=options["last"])
        return replace(costs, spared_rows=(*spared, spared[-1]), spares=spares), ""
    return reading(costs, kind, options, following, model), ""


def head_behind(name: str, index: int, kind: HeadKind | None, model: UncutModel) -> nn.Module:
    """The head behind a layer. Raises UsageError where there can be none."""
    feature, output = model.features[index], model.features[-1][0]
    if len(feature[0]) != first_size(model.target):
        raise UsageError(f"the first tensor behind layer {index} has no rows of examples")
    place, network = model.network(index, kind) if kind is not None and kind.of_network else (index, None)
    with torch.device(feature[0].device):
        head = build(name, place, feature, output, network)
    return head if kind is not None and kind.shares is not None else head.to(feature[0].dtype)


def reading(
    costs: HeadCosts, kind: HeadKind | None, options: Mapping[str, Any], following: Sequence[float], model: UncutModel
) -> HeadCosts:
    """The costs with the bytes of weights that heads of a kind read of other stages."""
    if kind is not None and kind.shares is not None:
        read: dict[int, float] = {}
        for layer, module in top_layers(model.layers, options["layers"]):
            read[layer] = read.get(layer, 0.0) + bytes_of(module.parameters())
        return replace(costs, read=read, trains=True)
    if kind is None or kind.reads is None:
        return costs
    if kind.reads.of_readout:
        return replace(costs, read={len(model.layers) - 1: max(following)}, every=options["every"])
    return replace(costs, following=(*following, 0.0), every=options["every"])


def copied_by_auglocal(stage: int, stages: int, *, depth: int, coefficient: float) -> list[int]:
    """The stages whose copies are the head behind a stage."""
    return copied_stages(stage, stages, depth_at(stage, stages, depth, coefficient))


def spared_by_infopro(stage: int, stages: int, *, first: float, last: float) -> bool:
    """Whether the head behind a stage reconstructs nothing."""
    return not weight_at(stage, stages, first, last)
