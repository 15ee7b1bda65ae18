"""What a parameter is for: a label for each, which an optimizer function with an argument `labels` is given."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from stretto.errors import UsageError
from stretto.nn.deferred import RemoteStage
from stretto.options.checks import of_kind, one_of

ROLES = ("hidden", "embedding", "output")
MATRIX = 2  # dims from which on a parameter is a matrix or a kernel
EMBEDDED = ("embed", "position")  # parts of names of modules and parameters that are tables of vectors


@dataclass(frozen=True)
class Label:
    """What a parameter is for.

    `name` is that of `Trainer.gather`, "<stage>.<name>" or "heads.<stage>.<name>"; `module` the class that holds it,
    "Linear". `role` is "embedding" for a table of vectors, also where the output head shares it; "output" for the layer
    that makes the output of the network, or of an auxiliary head; else "hidden". `dims` is the number of dimensions of
    the parameter.
    """

    name: str
    module: str
    role: str = "hidden"
    dims: int = 2

    def __post_init__(self) -> None:
        """Raise UsageError for an unknown role."""
        one_of("role", self.role, ROLES)

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it is the matrix of a hidden layer: two dims, neither embedding nor output."""
        return self.role == "hidden" and self.dims == MATRIX


def labels_of(model: nn.Module) -> list[Label]:
    """The labels of a whole model's parameters, in the order of `model.parameters()`.

    The output layer is the last one, in the order in which modules were assigned, that has a matrix. A table of vectors
    is a parameter of nn.Embedding, nn.EmbeddingBag, of a class with "Embedding" in its name, or one with "embed" or
    "position" in its own. With another model, change labels: `dataclasses.replace(label, role="output")`.
    """
    of_kind("model", model, nn.Module, "an nn.Module")
    if any(map(is_lazy, model.parameters())):
        raise UsageError(
            "labels_of: the model has lazy parameters, which have no shapes yet: call it once on a batch first"
        )
    labels = stage_labels([model], prefix="")
    return [labels[name] for name, _ in model.named_parameters()]


def stage_labels(stages: Sequence[nn.Module], prefix: str | None = None) -> dict[str, Label]:
    """The labels of the parameters of all stages that are known here, by every name "<stage>.<name>" that they have.

    A parameter of several stages is an embedding if it is one of them. `prefix` replaces "<stage>.".
    """
    output = {id(parameter) for parameter in output_parameters(stages)}
    embeddings = {id(p) for stage in stages for _, holder, p in held(stage) if is_embedding(holder, p)}
    labels = {}
    for index, stage in enumerate(stages):
        for name, holder, parameter in held(stage):
            role = "output" if id(parameter) in output else "hidden"
            role = "embedding" if id(parameter) in embeddings else role
            full = (f"{index}." if prefix is None else prefix) + name
            labels[full] = Label(full, type(holder).__name__, role, parameter.dim())
    return labels


def head_labels(heads: Sequence[nn.Module | None]) -> dict[str, Label]:
    """The labels of the parameters of auxiliary heads, by "heads.<stage>.<name>". Each has an output layer."""
    labels: dict[str, Label] = {}
    for index, head in enumerate(heads):
        if head is not None:
            labels |= stage_labels([head], prefix=f"heads.{index}.")
    return labels


def held(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield every name of every parameter, the module that holds it, and the parameter."""
    for path, holder in module.named_modules(remove_duplicate=False):
        for name, parameter in holder.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{path}.{name}" if path else name, holder, parameter


def output_parameters(stages: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters of the last layer with a matrix, in the last stage that has one.

    Empty where that stage is built in another process. Raises UsageError where it cannot be known which stage it is.
    """
    for index, stage in reversed(list(enumerate(stages))):
        if isinstance(stage, RemoteStage):
            if index == len(stages) - 1:
                return []
            raise UsageError(
                f"stage {index + 1} has no matrix, so the output layer is in an earlier stage, which is built in "
                "another process from a function: give the stages as modules, or put both into one stage"
            )
        layers = [list(module.parameters(recurse=False)) for module in stage.modules()]
        found = next((layer for layer in reversed(layers) if any(p.dim() >= MATRIX for p in layer)), None)
        if found is not None:
            return found
    return []


def is_embedding(holder: nn.Module, parameter: nn.Parameter) -> bool:
    if isinstance(holder, nn.Embedding | nn.EmbeddingBag):
        return True
    names = [name for name, own in holder.named_parameters(recurse=False) if own is parameter]
    texts = [type(holder).__name__.lower(), *map(str.lower, names)]
    return parameter.dim() >= MATRIX and (
        "embedding" in texts[0] or any(part in text for text in texts[1:] for part in EMBEDDED)
    )


def takes_labels(function: Any) -> bool:
    """Whether an optimizer function has an argument `labels` that has not been given yet."""
    if isinstance(function, partial) and "labels" in function.keywords:
        return False
    try:
        parameter = inspect.signature(function).parameters.get("labels")
    except (TypeError, ValueError):  # no function, or one of C without a signature
        return False
    return parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY


def labelled(function: Callable[..., Any], labels: Sequence[Label]) -> Callable[..., Any]:
    """The function of the parameters alone, whose labels are these; itself if it takes none."""
    return partial(function, labels=list(labels)) if takes_labels(function) else function


def labelled_by(function: Callable[..., Any], layers: Sequence[nn.Module]) -> Callable[..., Any]:
    """The function of parameters of these layers, whose labels it is given; itself if it takes none.

    Parameters of no layer count as those of a hidden one.
    """
    if not takes_labels(function):
        return function
    labels = stage_labels(layers)
    known = {id(p): labels[f"{index}.{name}"] for index, layer in enumerate(layers) for name, _, p in held(layer)}

    def of(parameters: Sequence[nn.Parameter]) -> Any:
        own = [known.get(id(p)) or Label("", "", dims=p.dim()) for p in parameters]
        return function(parameters, labels=own)

    return of
