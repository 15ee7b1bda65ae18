"""Which of a model's modules can be trained with which weights, and what else will bite: `stretto doctor --model`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stretto.doctor import objections as weights
from stretto.doctor.objections import MECHANISMS, concerns, left_alone, survey
from stretto.errors import UsageError
from stretto.methods import METHODS, Method, method
from stretto.nn import tied_weights
from stretto.nn.batch import call, inputs_on, like
from stretto.nn.shapes import describe, trace
from stretto.splitting import Stages, divide
from stretto.splitting.lists import whole_list
from stretto.stage.arguments import wake
from stretto.stage.stage import begins_in_place, leaf

MEANING = {
    "live": "the backward reads the weights as they stand by then",
    "predicted": "forward or backward read predicted or corrected weights",
    "stash": "the backward reads the weights that its forward read",
}


@dataclass(frozen=True)
class Finding:
    """A module with weights of its own, or one that something stands in the way of."""

    stage: int
    name: str
    kind: str
    parameters: int
    live: bool
    predicted: bool
    stash: bool


@dataclass(frozen=True)
class Objection:
    """Why mechanisms cannot be guaranteed for a module, and what to do about it."""

    module: str
    kind: str
    mechanisms: tuple[str, ...]
    reason: str
    remedy: str


@dataclass(frozen=True)
class Remark:
    """Something that works, but not as one may think."""

    module: str
    kind: str
    remark: str


@dataclass(frozen=True)
class Diagnosis:
    """What was found in a model cut into so many stages."""

    num_stages: int
    example: str
    modules: tuple[Finding, ...]
    objections: tuple[Objection, ...]
    remarks: tuple[Remark, ...]
    shares: tuple[float, ...] = ()  # of the cost, by stage, where the model was split
    uneven: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"ok": not self.objections, "mechanisms": methods_of(), **asdict(self)}


def diagnose(model: nn.Module, stages: Sequence[nn.Module], example: Any) -> Diagnosis:
    """Look at every stage as a trainer would run it. Modules are named as in `model`, whose parts the stages hold.

    Raises UsageError for stages that do not fit the example.
    """
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    names = {id(part): name for name, part in model.named_modules()}
    wake(stages)
    given = [inputs_on(example, device), *trace(stages, example, device)]
    modules: list[Finding] = []
    objections: list[Objection] = []
    for index, (stage, inputs) in enumerate(zip(stages, given, strict=False)):
        found, against = look_at(index, stage, inputs, names)
        modules += found
        objections += against
    remarks = (*norms(model), *in_place(stages, names), *shared(stages))
    balance = (tuple(stages.shares), stages.uneven) if isinstance(stages, Stages) else ()
    return Diagnosis(len(stages), describe(given[0]), tuple(modules), tuple(objections), remarks, *balance)


def look_at(
    index: int, stage: nn.Module, inputs: Sequence[Tensor], names: Mapping[int, str]
) -> tuple[list[Finding], list[Objection]]:
    """One stage: its modules that have weights, and what stands in the way of some."""
    found = survey(stage, like(inputs, [leaf(tensor, index > 0) for tensor in inputs]))
    if not begins_in_place(stage) and changes_input(stage, inputs):
        found.append(weights.Objection("", MECHANISMS, *IN_PLACE))
    parts = dict(stage.named_modules())

    def called(name: str) -> tuple[str, str]:
        own = names.get(id(parts[name]), f"stage {index}{name and ': '}{name}")
        return own or "the model", type(parts[name]).__name__

    modules = []
    for name, own in owners(stage).items():
        against = {mechanism for each in found if concerns(each.module, name) for mechanism in each.mechanisms}
        sure = {mechanism: mechanism not in against for mechanism in MECHANISMS}
        where, kind = called(name)
        modules.append(Finding(index, where, kind, own, **sure))
    return modules, [Objection(*called(each.module), each.mechanisms, each.reason, each.remedy) for each in found]


IN_PLACE = (
    "it changes its input in place, which belongs to the stage before it: no method takes such a stage",
    "begin it with an operation that does not work in place, or with x.clone()",
)


def changes_input(stage: nn.Module, inputs: Sequence[Tensor]) -> bool:
    """Whether a stage works in place on what it is given."""
    given = [tensor.clone() for tensor in inputs]
    before = [tensor._version for tensor in given]
    with torch.no_grad(), left_alone(stage):
        call(stage, like(inputs, given))
    return before != [tensor._version for tensor in given]


def owners(stage: nn.Module) -> dict[str, int]:
    """The submodules that hold trainable parameters, by name, with how many; a parametrization's are its module's."""
    found: dict[str, int] = {}
    for name, parameter in stage.named_parameters():
        if parameter.requires_grad:
            owner = name.rpartition(".")[0].partition("parametrizations")[0].rstrip(".")
            found[owner] = found.get(owner, 0) + parameter.numel()
    return found


def methods_of() -> dict[str, list[str]]:
    """The methods that want each mechanism: as they are by default, and with options that change it."""
    table: dict[str, list[str]] = {mechanism: [] for mechanism in MECHANISMS}
    for name in (*METHODS, "pb(stash=True)", "overlapping(delay=1)"):
        wanted = mechanism_of(method(name))
        if wanted is not None:
            table[wanted].append(name)
    return table


def mechanism_of(chosen: Method) -> str | None:
    """The mechanism that a method's stages with delay want; None if no weights change under its backward."""
    if chosen.weights == "current":
        return None
    if chosen.weights != "live":
        return "stash"
    return "live" if chosen.cure.forward is None and chosen.cure.backward is None else "predicted"


def norms(model: nn.Module) -> Iterator[Remark]:
    """Norms over the batch see one micro-batch at a time."""
    for name, part in model.named_modules():
        if isinstance(part, _BatchNorm):
            yield Remark(
                name,
                type(part).__name__,
                "normalises each micro-batch by itself, so a minibatch in micro-batches does not train as the whole "
                "one; GroupNorm does",
            )


def in_place(stages: Sequence[nn.Module], names: Mapping[int, str]) -> Iterator[Remark]:
    """First layers that work in place get a copy of their input, which belongs to the stage below."""
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
    """Tied weights on different stages."""
    for tied in tied_weights.find(stages):
        yield Remark(
            tied.name,
            f"Parameter {list(tied.parameter.shape)}",
            f"is shared by stages {', '.join(map(str, (tied.owner, *tied.users)))}: pipelines train it on the first; "
            "local methods (greedy, overlapping, chunked) by that stage's losses alone",
        )


def cut(model: nn.Module, num_stages: int | None, path: str | None, example: Any) -> Sequence[nn.Module]:
    """The stages to look at: as many as wanted, else one for each layer of a list, else the model as one."""
    if num_stages is not None:
        return divide(model, num_stages, example=example, path=path)
    if path is not None:
        raise UsageError(f"path={path!r} says where the model can be cut: say in how many stages, too")
    if isinstance(model, nn.Sequential | nn.ModuleList) and whole_list(model):
        return list(model)
    return [model]


def example_of(shape: Sequence[int], model: nn.Module) -> Tensor:
    """An input batch of that shape, in the dtype of the model's first parameter."""
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    return torch.randn(*shape, dtype=None if first is None else first.dtype)
