"""All objections to a module that one forward and a few backwards can find; `stretto doctor --model` lists them.

A trainer refuses a stage at the first objection; here all of them are collected, each for the mechanisms that it
concerns: *live* (`Live`: the backward reads the weights as they stand), *predicted* (`Substituted`: the two passes read
values that a rule gives) and *stash* (`Stash`: the backward reads what its forward read).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.nn.batch import call, with_names_of
from stretto.weights import saved_tensor_check
from stretto.weights.forward_backward_rules import Substituted
from stretto.weights.saved_tensor_check import backward_reads, tensors_in
from stretto.weights.stash import Stash
from stretto.weights.value_rules import CurrentRule, WeightPrediction

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
