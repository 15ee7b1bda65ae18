"""`stretto doctor --model`: the weights that each module of a model can be trained with, and hints on it.

A trainer refuses a stage at the first objection; here all of them are collected, each for the mechanisms that it
concerns: *live* (`Live`: the backward reads the weights as they stand), *predicted* (`Substituted`: the two passes read
values that a rule gives) and *stash* (`Stash`: the backward reads what its forward read).
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stretto.errors import UsageError
from stretto.methods import METHODS, Method, method
from stretto.methods.advice import advised, meaning, pieces_on
from stretto.methods.table import ADVISED
from stretto.nn import deferred, tied_weights
from stretto.nn.batch import call, inputs_on, with_names_of
from stretto.nn.group_norm import has_batch_norm
from stretto.nn.preserve import device_of, undisturbed
from stretto.nn.shapes import describe, trace
from stretto.splitting import Stages, divide, pieces
from stretto.splitting.layer_lists import whole_list
from stretto.stage.stage import begins_in_place, leaf
from stretto.stage.trainer_arguments import enable_training
from stretto.weights import saved_tensor_check
from stretto.weights.forward_backward_rules import Substituted
from stretto.weights.saved_tensor_check import backward_reads, tensors_in
from stretto.weights.stash import Stash
from stretto.weights.value_rules import CurrentRule, WeightPrediction

USUAL_STAGES = 4
MECHANISMS = ("live", "predicted", "stash")
HIDDEN_COPY = "its backward reads a copy of {} that autograd does not know of", saved_tensor_check.STASH
NOT_REACHED = (
    "with stashed weights the gradient of {} is not that of plain training: the module keeps the parameter in a place "
    "that torch.func.functional_call does not reach, or draws random numbers of its own",
    "make it a plain nn.Module that reads parameters as attributes of the module that they are registered on",
)


class Objection(NamedTuple):
    """Why mechanisms do not work for a submodule, and what to do about it; `module` is "" for the whole module."""

    module: str
    mechanisms: tuple[str, ...]
    reason: str
    remedy: str


def survey(module: nn.Module, inputs: Sequence[Any]) -> list[Objection]:
    """All objections to a module whose forward takes `inputs`; [] if all mechanisms work.

    The module runs in its current mode, without compilation: up to torch 2.13 torch.compile never compiles what first
    ran under a dispatch mode. Inputs, parameters, buffers, gradients and random state stay as they were.
    """
    with restored(module), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        return [*find_copies(module, inputs), *try_substitution(module, inputs), *try_stashing(module, inputs)]


def find_copies(module: nn.Module, inputs: Sequence[Any]) -> list[Objection]:
    """Objections to submodules whose forward copies weights: seen in its operations, or by changing a weight."""
    objections: dict[str, saved_tensor_check.Objection] = {}
    _, read = saved_tensor_check.watched_call(module, fresh(inputs), objections=objections)
    parameters = dict(module.named_parameters())
    for name in read if saved_tensor_check.can_hide_changes() else ():
        owner, _, parameter = name.rpartition(".")
        known = any(concerns(submodule, owner) for submodule in objections)
        if not known and parameters[name].ndim > 1 and not backward_reads(module, inputs, name):
            objections[owner] = (HIDDEN_COPY[0].format(parameter), HIDDEN_COPY[1])
    return [
        Objection(name, MECHANISMS if why == saved_tensor_check.RECOMPUTED else ("live", "predicted"), *why)
        for name, why in objections.items()
        if not any(concerns(other, name) and objections[other] == why for other in objections if other != name)
    ]


def concerns(objected: str, name: str) -> bool:
    """Whether an objection to the submodule `objected` also concerns the submodule `name`: itself, or one inside."""
    return not objected or name == objected or name.startswith(f"{objected}.")


def try_substitution(module: nn.Module, inputs: Sequence[Any]) -> list[Objection]:
    """The objection to predicted weights that a trial raises: overlapping weights, or another shape or dtype."""
    try:
        Substituted(module, WeightPrediction(1), CurrentRule()).forward(fresh(inputs))
    except UsageError as error:
        if saved_tensor_check.REFUSED not in str(error):  # `find_copies` names those
            return [Objection("", ("predicted",), str(error), saved_tensor_check.STASH)]
    return []


def try_stashing(module: nn.Module, inputs: Sequence[Any]) -> list[Objection]:
    """Objections to parameters whose gradients with stashed weights differ from plain ones after an update."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    parameters = list(trained.values())
    with restored(module):
        plain = gradients(call(module, fresh(inputs)), parameters)
    kept = [parameter.data for parameter in parameters]
    weights = Stash(module)
    try:
        output, version = weights.forward(fresh(inputs))
        with torch.no_grad():
            weights.update(lambda: [parameter.add_(1) for parameter in parameters])
        stashed = gradients(output, weights.leaves(version))
    except UsageError:  # it recomputes: `find_copies` names it
        return []
    except RuntimeError as error:  # a graph holds a parameter itself: autograd has noticed the update
        return [Objection("", ("stash",), f"it fails with stashed weights: {error}", NOT_REACHED[1])]
    finally:
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data = data
    wrong = [name for name, one, other in zip(trained, stashed, plain, strict=True) if not same(one, other)]
    return [
        Objection(name.rpartition(".")[0], ("stash",), NOT_REACHED[0].format(name), NOT_REACHED[1]) for name in wrong
    ]


def gradients(output: Any, leaves: Sequence[Any]) -> Sequence[Tensor | None]:
    """The gradients of a weighted sum of an output; None for leaves that it does not depend on."""
    roots = [tensor for tensor in tensors_in([output]) if tensor.requires_grad]
    if not roots or not leaves:
        return [None] * len(leaves)
    cotangents = [torch.arange(1.0, root.numel() + 1).cos().to(root).view_as(root) for root in roots]
    return torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)


def fresh(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Clones of the inputs, which a module may change in place; gradients flow through them."""
    return with_names_of(inputs, [value.clone() if isinstance(value, Tensor) else value for value in inputs])


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two gradients are equal, apart from rounding."""
    if one is None or other is None:
        return one is other
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max()) if other.numel() else 0)


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Restore buffers and the CPU's random state at the end."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


MEANING = {
    "live": "the backward reads the weights as they stand by then",
    "predicted": "forward or backward read predicted or corrected weights",
    "stash": "the backward reads the weights that its forward read",
}


@dataclass(frozen=True)
class ModuleFinding:
    """A module with trainable parameters, and for each mechanism whether it works for it.

    `tied` of its parameters are also those of modules before it.
    """

    stage: int
    name: str
    kind: str
    parameters: int
    live: bool
    predicted: bool
    stash: bool
    tied: int = 0

    @property
    def good(self) -> bool:
        """Whether every method can train it."""
        return self.live and self.predicted and self.stash


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
    in_parts: str = ""  # why methods that cut minibatches cannot train it with its loss; empty if they can
    advice: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # what "async" and "local" stand for, and why

    @property
    def is_one_piece(self) -> bool:
        """Whether it was examined as one stage although a run may have several of it."""
        return self.num_stages == 1 and not self.shares and not self.whole

    @property
    def good(self) -> bool:
        """Whether every method can train the model."""
        return not (self.objections or self.whole or self.in_parts)

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
    seen = set[nn.Parameter]()
    first = inputs = inputs_on(example, device)
    for index, stage in enumerate(stages):
        with deferred.filled([stage]):  # one at a time
            (output,) = trace([stage], inputs, device, first=index, any_output=index == len(stages) - 1)
            stage_modules, stage_objections = examine_stage(index, stage, inputs, names, set(seen))
            seen.update(stage.parameters())
        modules += stage_modules
        objections += stage_objections
        inputs = output
    remarks = (*norms(model), *in_place(stages, names), *shared(stages), *own_output(model, example))
    balance = (tuple(stages.shares), stages.uneven) if isinstance(stages, Stages) else ()
    return Diagnosis(len(stages), describe(first), tuple(modules), tuple(objections), remarks, *balance)


def examine_stage(
    index: int, stage: nn.Module, inputs: Sequence[Tensor], names: Mapping[int, str], before: Set[nn.Parameter]
) -> tuple[list[ModuleFinding], list[ModuleObjection]]:
    """The modules of a stage that have trainable parameters, and the objections to them.

    `before` are the parameters of earlier stages.
    """
    objections = survey(stage, with_names_of(inputs, [leaf(tensor, index > 0) for tensor in inputs]))
    if not begins_in_place(stage) and changes_input(stage, inputs):
        objections.append(Objection("", MECHANISMS, *IN_PLACE))
    parts = dict(stage.named_modules())

    def name_and_kind(name: str) -> tuple[str, str]:
        in_model = names.get(id(parts[name]), f"stage {index}{name and ': '}{name}")
        return in_model or "the model", type(parts[name]).__name__

    modules, again = [], owners(stage, before)
    for name, parameters in owners(stage).items():
        about = [objection for objection in objections if concerns(objection.module, name)]
        failing = {mechanism for objection in about for mechanism in objection.mechanisms}
        works = {mechanism: mechanism not in failing for mechanism in MECHANISMS}
        named, kind = name_and_kind(name)
        modules.append(ModuleFinding(index, named, kind, parameters, **works, tied=again.get(name, 0)))
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


def owners(stage: nn.Module, among: Set[nn.Parameter] | None = None) -> dict[str, int]:
    """{submodule: number of its trainable parameters}, of these alone; those of a parametrization are its module's."""
    owned: dict[str, int] = {}
    for name, parameter in stage.named_parameters():
        if parameter.requires_grad and (among is None or parameter in among):
            owner = name.rpartition(".")[0].partition("parametrizations")[0].rstrip(".")
            owned[owner] = owned.get(owner, 0) + parameter.numel()
    return owned


def advice_for(stages: Sequence[nn.Module], optimizer: str) -> dict[str, dict[str, str]]:
    """{"async" or "local": {"method": what it stands for under an optimizer on these stages, "why": why}}.

    One stage counts as four, as `stretto train` cuts a user's module.
    """
    number = len(stages) if len(stages) > 1 else USUAL_STAGES
    chosen = {word: advised(word, optimizer, number, whole=has_batch_norm(stages)) for word in ADVISED}
    return {word: {"method": str(each), "why": meaning(each)} for word, each in chosen.items()}


def methods_of() -> dict[str, list[str]]:
    """{mechanism: the methods that need it}, with default options and with options that change it."""
    table: dict[str, list[str]] = {mechanism: [] for mechanism in MECHANISMS}
    for name in (*METHODS, "pb(stash=True)", "overlapping(delay=1)"):
        needed = mechanism_of(method(name))
        if needed is not None:
            table[needed].append(name)
    return table


def cutting_methods() -> list[str]:
    """The methods that cut a minibatch into micro-batches, by their defaults."""
    return [name for name in METHODS if (pieces_on(name, USUAL_STAGES) or 1) > 1]


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
            f"is shared by stages {', '.join(map(str, (tied.owner, *tied.users)))}: {tied_weights.TRAINED}",
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


OUTPUT = "the output"


def own_output(model: nn.Module, example: Any) -> Iterator[Remark]:
    """A remark on an output that auxiliary heads cannot be built like."""
    output = output_of(model, example)
    if isinstance(output, Mapping) and not hasattr(output, "to_tuple"):
        yield Remark(
            OUTPUT,
            type(output).__name__,
            "is not one tensor, so that no auxiliary heads can be built like it (greedy, overlapping, chunked, head=): "
            "return a tensor, or give such methods a head of your own, greedy(head=path/to/file.py:function)",
        )


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
