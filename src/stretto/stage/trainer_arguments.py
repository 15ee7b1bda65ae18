"""A Trainer's arguments: what is checked and built of them before anything is trained, and their `Specification`."""

import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stretto.errors import UsageError
from stretto.losses import Loss
from stretto.mesh import Mesh
from stretto.methods import Method
from stretto.nn.layer_recompute import RECOMPUTE
from stretto.nn.seeding import PreservedGenerator, derive
from stretto.options.checks import is_number, is_whole, one_of, refuse, shown
from stretto.options.user_errors import called
from stretto.replicas import Sync
from stretto.schedule import Reach
from stretto.stage.precision import Precision


@dataclass(frozen=True, kw_only=True, eq=False)
class Specification:
    """The arguments of `Trainer` that hold for all its stages.

    `loss` is what `stretto.losses.understand` returned for the user's. `optimizer` and `scheduler` are the user's
    functions, called once a stage. `recompute` is a member of `stretto.nn.layer_recompute.RECOMPUTE`.
    """

    method: Method
    loss: Loss
    optimizer: Callable[..., Any]
    scheduler: Callable[..., Any] | None = None
    clip: float | None = None
    precision: Precision
    device: torch.device
    seed: int = 0
    mesh: Mesh
    sync: Sync
    recompute: str = "none"


StageLike = nn.Module | Callable[[], nn.Module]


def check_kinds(stages: Any, loss: Any, scheduler: Any, heads: Any, workers: Any, seed: Any, clip: Any) -> None:
    if isinstance(stages, nn.Module) and not isinstance(stages, nn.Sequential | nn.ModuleList):
        raise UsageError(
            f"stages is one {type(stages).__name__}: give a list, such as stretto.split(model, 4, example=x) makes"
        )
    made = f", or an object of this class, {loss.__name__}()" if isinstance(loss, type) else ""
    for name, value, fits, expected in (
        ("stages", stages, is_list(stages), "a list of modules, such as stretto.split(model, 4, example=x) makes"),
        (
            "loss",
            loss,
            callable(loss) and not isinstance(loss, type),
            f"a function (output, target) -> mean loss{made}",
        ),
        ("scheduler", scheduler, scheduler is None or callable(scheduler), "a function of the optimizer"),
        ("heads", heads, heads is None or isinstance(heads, Sequence | nn.ModuleList), "a list, one entry a stage"),
        ("workers", workers, workers is None or is_whole(workers), "a whole number, or None"),
        ("seed", seed, is_whole(seed), "a whole number"),
        ("clip", clip, clip is None or (is_number(clip) and clip > 0), "a positive number, or None"),
    ):
        if not fits:
            refuse(name, value, expected)


def check_number(stages: Sequence[StageLike], workers: int | None) -> None:
    if not stages:
        raise UsageError("stages is empty: give at least one nn.Module")
    if workers is not None and not 1 <= workers <= len(stages):
        raise UsageError(f"workers={workers} for {len(stages)} stages: choose between 1 and {len(stages)}")


def check_mesh(mesh: Mesh, sync: Sync, recompute: Any) -> None:
    if mesh.inside > 1 and mesh.data > 1 and sync.serving is not None:
        raise UsageError(
            f"{mesh}: {sync} updates each process by itself, but processes that share a stage must update together: "
            "use tensor=1, space=(1, 1), or sync='all-reduce'"
        )
    if mesh.tensor > 1 and mesh.data > 1 and sync.sharding is not None:
        raise UsageError(
            f"{mesh}: a stage's weights are cut (tensor) or shared out among replicas ({sync}), not both: use "
            "tensor=1, or sync='all-reduce'"
        )
    sync.check_replicas(mesh.data)
    one_of("recompute", recompute, RECOMPUTE)
    if recompute != "none" and mesh.space != (1, 1):
        raise UsageError(
            f"recompute={recompute!r} on {mesh}: layers that work on parts of images are not recomputed; leave "
            "recompute= out, or use space=(1, 1)"
        )


def check_prediction(specification: Specification, num_stages: int) -> None:
    """Raise UsageError where several processes would have to agree on what predicts a stage's gradient."""
    mesh, sync, method = specification.mesh, specification.sync, specification.method
    if not method.reach(num_stages).predicted:
        return
    if mesh.data > 1 or mesh.inside > 1 or sync.sharding is not None or sync.agreement != "A":
        raise UsageError(
            f"method {method} on {mesh} with {sync}: what predicts a stage's gradient learns in one process, and here "
            "several share a stage, or train replicas of it: use data=1, tensor=1, space=(1, 1) and "
            "sync='all-reduce', or another local method, such as greedy"
        )


def is_list(value: Any) -> bool:
    """Whether a value is an iterable that may hold stages: no text, mapping, tensor or ModuleDict."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | torch.Tensor | nn.ModuleDict)


def check_stage(stage: Any, index: int) -> None:
    if not isinstance(stage, nn.Module) and not callable(stage):
        raise UsageError(f"stage {index} is {type(stage).__name__}: give an nn.Module, or a function that builds one")


def build_stage(stage: StageLike, index: int, seed: int) -> nn.Module:
    """The stage as a module. A function is called here, with a generator seeded by `seed` and the stage's index."""
    if isinstance(stage, nn.Module):
        built = stage
    else:
        with PreservedGenerator(torch.device("cpu")) as generator:
            generator.seed(derive(seed, "stage", index))
            built = called(f"stage {index}", stage, wanted="an nn.Module, or a function that builds one")
    if not isinstance(built, nn.Module):
        raise UsageError(f"stage {index}: its function returned {type(built).__name__}, not an nn.Module")
    refuse_dtensors(built, index)
    refuse_meta(built, f"stage {index}")
    return built


def refuse_meta(module: nn.Module, what: str) -> None:
    """Raise UsageError for a parameter or buffer on the meta device. `what` is the module's name in the message."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise UsageError(
                f"{what}: {name} is on the meta device and holds no numbers: build the module on the CPU or a GPU, or "
                "give its weights values after module.to_empty(device='cpu')"
            )


def refuse_lazy(stages: Iterable[nn.Module]) -> None:
    """Raise UsageError for a lazy parameter or buffer: it has no shape yet."""
    for index, stage in enumerate(stages):
        if name := lazy_name(stage):
            raise UsageError(
                f"stage {index}: {name} is lazy and has no shape yet: run the model on a batch before, or give "
                "the Trainer one, example=x"
            )


def lazy_name(module: nn.Module) -> str | None:
    """The name of the first lazy parameter or buffer; None without one."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return next((name for name, tensor in tensors if is_lazy(tensor)), None)


def refuse_dtensors(stage: nn.Module, index: int) -> None:
    """Raise UsageError for DTensor parameters: a stash of their versions is wrong without an error (torch 2.13)."""
    dtensors = sys.modules.get("torch.distributed.tensor")
    if dtensors is None:  # without this import there is no DTensor
        return
    for name, parameter in stage.named_parameters():
        if isinstance(parameter.data, dtensors.DTensor):
            raise UsageError(
                f"stage {index}: {name} is a DTensor, whose storage cannot be exchanged for another version; "
                "stretto.parallel.tensor(module, mesh, parameters='local') makes plain parts of it"
            )


def check_sharing(
    stages: Sequence[nn.Module], heads: Sequence[nn.Module | None], borrowed: Container[int] = ()
) -> None:
    """Raise UsageError for a head that shares parameters with another stage or its head: each has its own optimizer.

    `borrowed` are the ids of those that heads send gradients of to their owner.
    """
    parts = [[part for part in pair if part is not None] for pair in zip(stages, heads, strict=True)]
    holders: dict[int, list[int]] = {}  # id of a parameter -> the stages whose module or head has it
    for stage, modules in enumerate(parts):
        for module in modules:
            for parameter in module.parameters():
                holders.setdefault(id(parameter), []).append(stage)
    for index, head in enumerate(heads):
        parameters = [] if head is None else head.named_parameters()
        names = {id(parameter): name for name, parameter in parameters if id(parameter) not in borrowed}
        others = {stage for parameter in names for stage in holders[parameter]} - {index}
        if others:
            other = min(others)
            shared = (parameter for module in parts[other] for parameter in module.parameters())
            name = next(names[id(parameter)] for parameter in shared if id(parameter) in names)
            raise UsageError(
                f"the head of stage {index} and stage {other} share the parameter {name!r}, but each is updated by "
                "its own optimizer: give the head its own"
            )


def check_heads(given: Sequence[nn.Module | None] | None, reach: Reach) -> list[nn.Module | None]:
    """The user's heads, one entry a stage. Raises UsageError for a head that no loss of the method would use."""
    if given is None:
        return [None] * reach.num_stages
    if len(given) != reach.num_stages:
        raise UsageError(f"heads has {len(given)} entries for {reach.num_stages} stages: give one (or None) for each")
    for stage, head in enumerate(given):
        if head is not None and not isinstance(head, nn.Module):
            raise UsageError(f"heads[{stage}] is {shown(head)}: give an nn.Module, or None to have it built")
        if head is not None:
            refuse_meta(head, f"heads[{stage}]")
        if head is not None and stage == reach.num_stages - 1:
            raise UsageError(
                f"heads[{stage}]: the last stage's output is the model's output; put the head into the stage"
            )
        if head is not None and reach.hops[stage] is None and stage not in reach.predicted:
            raise UsageError(f"heads[{stage}] is given, but the method has no loss there; heads go after {reach.heads}")
    return list(given)


def wholly_in_evaluation(stages: Sequence[nn.Module]) -> bool:
    modes = [layer.training for stage in stages for layer in stage.modules() if not any(True for _ in layer.children())]
    return bool(modes) and not any(modes)


def enable_training(stages: Sequence[nn.Module]) -> None:
    """Put the stages in training mode if all their layers are in evaluation mode; else leave every layer as it is.

    For those who write the loop; a Trainer trains modules in the modes that they have.
    """
    if wholly_in_evaluation(stages):
        for stage in stages:
            stage.train()


def build_scheduler(scheduler: Callable[[Any], Any], optimizer: torch.optim.Optimizer) -> Any:
    """The scheduler that the user's function makes. Raises UsageError if it has no step(), or needs a metric."""
    built = called("scheduler", scheduler, optimizer, wanted="a function of the optimizer that returns a scheduler")
    if isinstance(built, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau needs a metric, which a stage's update does not have: choose a scheduler "
            "that depends on the number of updates alone"
        )
    if not callable(getattr(built, "step", None)):
        raise UsageError(
            f"scheduler returned {type(built).__name__}, which has no step(): give a function of the optimizer"
        )
    return built


def check_stepped(optimizer: torch.optim.Optimizer, place: tuple[int, int], holders: Mapping[int, set[Any]]) -> None:
    """Raise UsageError for an optimizer that steps parameters of other stages than its own.

    `place` is its replica and stage, `holders` has the places of each parameter, by id.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            others = holders.get(id(parameter), {place})
            if place not in others:
                raise UsageError(
                    f"the optimizer of stage {place[1]} also steps a parameter {list(parameter.shape)} of stage "
                    f"{min(others)[1]}: each has its own optimizer, of the parameters that the function is given, "
                    "optimizer=lambda params: torch.optim.SGD(params, lr=0.1), not of model.parameters()"
                )
