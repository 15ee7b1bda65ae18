"""`stretto doctor --model`: which modules of a model can be trained with which weights, and what else to know of it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stretto.doctor.objections import MECHANISMS, Objection, concerns, restored, survey
from stretto.errors import UsageError
from stretto.methods import METHODS, Method, method
from stretto.nn import deferred, tied_weights
from stretto.nn.batch import call, inputs_on, with_names_of
from stretto.nn.preserve import device_of, undisturbed
from stretto.nn.shapes import describe, trace
from stretto.splitting import Stages, divide, pieces
from stretto.splitting.layer_lists import whole_list
from stretto.stage.stage import begins_in_place, leaf
from stretto.stage.trainer_arguments import enable_training

MEANING = {
    "live": "the backward reads the weights as they stand by then",
    "predicted": "forward or backward read predicted or corrected weights",
    "stash": "the backward reads the weights that its forward read",
}


@dataclass(frozen=True)
class ModuleFinding:
    """A module with trainable parameters, and for each mechanism whether it works for it."""

    stage: int
    name: str
    kind: str
    parameters: int
    live: bool
    predicted: bool
    stash: bool


@dataclass(frozen=True)
class ModuleObjection:
    """Why mechanisms do not work for a module, named as in the whole model, and what to do about it."""

    module: str
    kind: str
    mechanisms: tuple[str, ...]
    reason: str
    remedy: str


@dataclass(frozen=True)
class Remark:
    """A property of a module that works, but may surprise."""

    module: str
    kind: str
    remark: str


@dataclass(frozen=True)
class Diagnosis:
    """All findings on a model that is cut into `num_stages` stages."""

    num_stages: int
    example: str
    modules: tuple[ModuleFinding, ...]
    objections: tuple[ModuleObjection, ...]
    remarks: tuple[Remark, ...]
    shares: tuple[float, ...] = ()  # of the cost, by stage, where the model was split
    uneven: str = ""
    whole: str = ""  # why the model cannot be cut into stages; empty if it can, or was

    @property
    def good(self) -> bool:
        """Whether every method can train the model."""
        return not self.objections and not self.whole

    def to_json(self) -> dict[str, Any]:
        """The object that `stretto doctor --model --json` prints."""
        return {"ok": self.good, "mechanisms": methods_of(), **asdict(self)}


def diagnose(model: nn.Module, stages: Sequence[nn.Module], example: Any) -> Diagnosis:
    """Examine every stage as a trainer would run it. Modules are named as in `model`, of which the stages are parts.

    Raises UsageError for stages that do not fit the example.
    """
    device = device_of([model])
    names = {id(part): name for name, part in model.named_modules()}
    enable_training(stages)
    modules: list[ModuleFinding] = []
    objections: list[ModuleObjection] = []
    first = inputs = inputs_on(example, device)
    for index, stage in enumerate(stages):
        with deferred.filled([stage]):  # one at a time
            (output,) = trace([stage], inputs, device, first=index, any_output=index == len(stages) - 1)
            stage_modules, stage_objections = examine_stage(index, stage, inputs, names)
        modules += stage_modules
        objections += stage_objections
        inputs = output
    remarks = (*norms(model), *in_place(stages, names), *shared(stages))
    balance = (tuple(stages.shares), stages.uneven) if isinstance(stages, Stages) else ()
    return Diagnosis(len(stages), describe(first), tuple(modules), tuple(objections), remarks, *balance)


def examine_stage(
    index: int, stage: nn.Module, inputs: Sequence[Tensor], names: Mapping[int, str]
) -> tuple[list[ModuleFinding], list[ModuleObjection]]:
    """The modules of a stage that have trainable parameters, and the objections to them."""
    objections = survey(stage, with_names_of(inputs, [leaf(tensor, index > 0) for tensor in inputs]))
    if not begins_in_place(stage) and changes_input(stage, inputs):
        objections.append(Objection("", MECHANISMS, *IN_PLACE))
    parts = dict(stage.named_modules())

    def name_and_kind(name: str) -> tuple[str, str]:
        in_model = names.get(id(parts[name]), f"stage {index}{name and ': '}{name}")
        return in_model or "the model", type(parts[name]).__name__

    modules = []
    for name, parameters in owners(stage).items():
        about = [objection for objection in objections if concerns(objection.module, name)]
        failing = {mechanism for objection in about for mechanism in objection.mechanisms}
        works = {mechanism: mechanism not in failing for mechanism in MECHANISMS}
        named, kind = name_and_kind(name)
        modules.append(ModuleFinding(index, named, kind, parameters, **works))
    return modules, [ModuleObjection(*name_and_kind(o.module), o.mechanisms, o.reason, o.remedy) for o in objections]


IN_PLACE = (
    "it changes its input in place, which belongs to the stage before it: no method takes such a stage",
    "begin it with an operation that does not work in place, or with x.clone()",
)


def changes_input(stage: nn.Module, inputs: Sequence[Tensor]) -> bool:
    """Whether a stage works in place on its inputs."""
    clones = [tensor.clone() for tensor in inputs]
    before = [tensor._version for tensor in clones]
    with torch.no_grad(), restored(stage):
        call(stage, with_names_of(inputs, clones))
    return before != [tensor._version for tensor in clones]


def owners(stage: nn.Module) -> dict[str, int]:
    """{submodule: number of its trainable parameters}; those of a parametrization count as its module's."""
    owned: dict[str, int] = {}
    for name, parameter in stage.named_parameters():
        if parameter.requires_grad:
            owner = name.rpartition(".")[0].partition("parametrizations")[0].rstrip(".")
            owned[owner] = owned.get(owner, 0) + parameter.numel()
    return owned


def methods_of() -> dict[str, list[str]]:
    """{mechanism: the methods that need it}, with default options and with options that change it."""
    table: dict[str, list[str]] = {mechanism: [] for mechanism in MECHANISMS}
    for name in (*METHODS, "pb(stash=True)", "overlapping(delay=1)"):
        needed = mechanism_of(method(name))
        if needed is not None:
            table[needed].append(name)
    return table


def mechanism_of(chosen: Method) -> str | None:
    """The mechanism that a method's stages with delay need; None if its weights never change in between."""
    if chosen.weights == "current":
        return None
    if chosen.weights != "live":
        return "stash"
    return "live" if chosen.cure.forward is None and chosen.cure.backward is None else "predicted"


def norms(model: nn.Module) -> Iterator[Remark]:
    """A remark on every norm over the batch: it normalises one micro-batch at a time."""
    for name, part in model.named_modules():
        if isinstance(part, _BatchNorm):
            yield Remark(
                name,
                type(part).__name__,
                "normalises each micro-batch by itself, so a minibatch in micro-batches does not train as the whole "
                "one; GroupNorm does",
            )


def in_place(stages: Sequence[nn.Module], names: Mapping[int, str]) -> Iterator[Remark]:
    """A remark on every stage that begins in place: it copies its input, which belongs to the stage below."""
    for index, stage in enumerate(stages):
        if index and begins_in_place(stage):
            part = next(layer for layer in stage.modules() if not any(True for _ in layer.children()))
            yield Remark(
                names.get(id(part), f"stage {index}"),
                type(part).__name__,
                f"works in place on what stage {index - 1} gives, so stage {index} copies its input; inplace=False "
                "spares the copy",
            )


def shared(stages: Sequence[nn.Module]) -> Iterator[Remark]:
    """A remark on every parameter that several stages share."""
    for tied in tied_weights.find(stages):
        yield Remark(
            tied.name,
            f"Parameter {list(tied.parameter.shape)}",
            f"is shared by stages {', '.join(map(str, (tied.owner, *tied.users)))}: pipelines train it on the first; "
            "local methods (greedy, overlapping, chunked) by that stage's losses alone",
        )


def cut(model: nn.Module, num_stages: int | None, path: str | None, example: Any) -> Sequence[nn.Module]:
    """The stages to examine: `num_stages`, or else one for each layer of a list, or else the whole model."""
    if num_stages is not None:
        return divide(model, num_stages, example=example, path=path)
    if path is not None:
        raise UsageError(f"path={path!r} says where the model can be cut: say in how many stages, too")
    if isinstance(model, nn.Sequential | nn.ModuleList) and whole_list(model):
        return list(model)
    if example is not None and isinstance(output_of(model, example), Mapping):
        return divide(model, 1, example=example)  # the tensors in a ModelOutput
    return [model]


def why_whole(model: nn.Module, stages: Sequence[nn.Module], example: Any) -> str:
    """Why a model that is examined in one piece cannot be cut as a run cuts it; empty if it can."""
    if len(stages) > 1 or isinstance(model, nn.Sequential | nn.ModuleList):
        return ""
    try:
        pieces(model, example=example)
    except UsageError as error:
        return str(error)
    return ""


def output_of(model: nn.Module, example: Any) -> Any:
    """The model's output for an example, in evaluation; None where it cannot take it, which `diagnose` reports."""
    device = device_of([model])
    with torch.no_grad(), undisturbed([model], device), deferred.faked([model]), suppress(Exception):
        return call(model, inputs_on(example, device))
    return None


def example_of(shape: Sequence[int], model: nn.Module) -> Tensor:
    """A random input batch of this shape, in the dtype of the model's first floating-point parameter."""
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    return torch.randn(*shape, dtype=None if first is None else first.dtype)
