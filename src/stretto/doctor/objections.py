"""Every objection that one forward and a few backwards can find to a module: what `stretto doctor --model` lists.

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
from stretto.nn.batch import call, like
from stretto.weights import check, guard
from stretto.weights.origins import tensors_in
from stretto.weights.probe import changes_with
from stretto.weights.rules import CurrentRule, WeightPrediction
from stretto.weights.stash import Stash
from stretto.weights.substituted import Substituted

MECHANISMS = ("live", "predicted", "stash")
HIDDEN = "its backward reads a copy of {} that autograd does not know of", check.STASH
ELSEWHERE = (
    "with stashed weights the gradient of {} is not that of plain training: the module keeps the parameter in a place "
    "that torch.func.functional_call does not reach, or draws random numbers of its own",
    "make it a plain nn.Module that reads parameters as attributes of the module that they are registered on",
)


class Objection(NamedTuple):
    """Why mechanisms do not work for a submodule, and what to do about it; the whole module's name is ""."""

    module: str
    mechanisms: tuple[str, ...]
    reason: str
    remedy: str


def survey(module: nn.Module, inputs: Sequence[Any]) -> list[Objection]:
    """All objections to a module whose forward takes `inputs`; [] if every mechanism is sure of it.

    Runs the module in the mode it is in, and what is compiled as if it were not: up to torch 2.13 torch.compile gives
    up for good on what first ran under a dispatch mode. Inputs, parameters, buffers, gradients and random state are
    left as they were.
    """
    with left_alone(module), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        return [*copies(module, inputs), *substitution(module, inputs), *stashing(module, inputs)]


def copies(module: nn.Module, inputs: Sequence[Any]) -> list[Objection]:
    """What a forward copies weights into, seen by following it, and by changing weights that it keeps as they are."""
    found: dict[str, check.Objection] = {}
    _, read = check.watched(module, fresh(inputs), objections=found)
    parameters = dict(module.named_parameters())
    for name in read if guard.available() else ():
        owner, _, own = name.rpartition(".")
        known = any(concerns(each, owner) for each in found)
        if not known and parameters[name].ndim > 1 and not changes_with(module, inputs, name):
            found[owner] = (HIDDEN[0].format(own), HIDDEN[1])
    return [
        Objection(name, MECHANISMS if why == check.RECOMPUTED else ("live", "predicted"), *why)
        for name, why in found.items()
        if not any(concerns(other, name) and found[other] == why for other in found if other != name)
    ]


def concerns(objected: str, name: str) -> bool:
    """Whether what is said of one submodule is said of another one in it, too."""
    return not objected or name == objected or name.startswith(f"{objected}.")


def substitution(module: nn.Module, inputs: Sequence[Any]) -> list[Objection]:
    """What only the trial shows: weights that overlap, or that a backward reads in another shape or dtype."""
    try:
        Substituted(module, WeightPrediction(1), CurrentRule()).forward(fresh(inputs))
    except UsageError as error:
        if check.REFUSED not in str(error):  # those `copies` has by name
            return [Objection("", ("predicted",), str(error), check.STASH)]
    return []


def stashing(module: nn.Module, inputs: Sequence[Any]) -> list[Objection]:
    """Whether gradients on stashed weights are plain ones, after an update that they are not to notice."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    wanted = list(trained.values())
    with left_alone(module):
        plain = gradients(call(module, fresh(inputs)), wanted)
    kept = [parameter.data for parameter in wanted]
    weights = Stash(module)
    try:
        output, version = weights.forward(fresh(inputs))
        with torch.no_grad():
            weights.update(lambda: [parameter.add_(1) for parameter in wanted])
        stashed = gradients(output, weights.leaves(version))
    except UsageError:  # it recomputes, which `copies` has by name
        return []
    except RuntimeError as error:  # a graph holds a parameter itself: autograd has noticed the update
        return [Objection("", ("stash",), f"it fails with stashed weights: {error}", ELSEWHERE[1])]
    finally:
        for parameter, data in zip(wanted, kept, strict=True):
            parameter.data = data
    wrong = [name for name, one, other in zip(trained, stashed, plain, strict=True) if not same(one, other)]
    return [Objection(name.rpartition(".")[0], ("stash",), ELSEWHERE[0].format(name), ELSEWHERE[1]) for name in wrong]


def gradients(output: Any, leaves: Sequence[Any]) -> Sequence[Tensor | None]:
    """The gradients of a weighted sum of an output; None for leaves that it does not depend on."""
    roots = [tensor for tensor in tensors_in([output]) if tensor.requires_grad]
    if not roots or not leaves:
        return [None] * len(leaves)
    cotangents = [torch.arange(1.0, root.numel() + 1).cos().to(root).view_as(root) for root in roots]
    return torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)


def fresh(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Copies that a module may change in place, and through which gradients flow to the inputs."""
    return like(inputs, [value.clone() if isinstance(value, Tensor) else value for value in inputs])


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two gradients are equal, but for the order of sums."""
    if one is None or other is None:
        return one is other
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max()) if other.numel() else 0)


@contextmanager
def left_alone(module: nn.Module) -> Iterator[None]:
    """Give back buffers and random state as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
