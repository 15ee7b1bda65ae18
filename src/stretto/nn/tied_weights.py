"""Tied weights: a parameter that several stages use, such as an embedding that is the unembedding too.

The first stage that has the parameter owns it: its optimizer updates it with the gradients of all uses of a
micro-batch. Every other stage borrows it. A borrower computes with the version that the owner's forward of the same
micro-batch used, which arrives like an activation. Each forward gets a leaf of its own, which is never changed and
whose gradient goes back to the owner. The weight rules of a stage (stash, prediction) apply to its other parameters
only.

With local losses the last stage that has the parameter owns it: of an output layer the network's loss is there, and
without it a language model learns nothing. Borrowers below compute with older versions, one update for each stage
between, and send gradients, for which nobody waits. Behind a predicted gradient (synthetic gradients) the first stage
owns it, and a borrower whose loss does not reach the owner reads it and sends no gradient.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from stretto.nn.hooks import hooked

TRAINED = (
    "pipelines train it on the first of them, local methods (greedy, overlapping, chunked) on the last; the gradients "
    "of all go there. synthetic-gradients train it on the first, by the losses that reach it"
)


def entries(gradient: Tensor) -> Tensor:
    """A dense gradient as it is, a sparse one as its rows, each once: they have the same norm."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def plus(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients; torch adds a sparse one to a dense one, not the other way round."""
    return other + one if one.is_sparse else one + other


Values = Mapping[int, Tensor]  # by the number of the tied parameter


@dataclass(frozen=True, eq=False)
class Tied:
    """A tied parameter: its `name` in the `owner` stage, and the `users`, the stages that borrow it."""

    number: int
    name: str
    parameter: nn.Parameter
    owner: int
    users: tuple[int, ...]


def find(
    stages: Sequence[nn.Module], *, last_owns: bool = False, heads: Mapping[int, Iterable[nn.Parameter]] | None = None
) -> list[Tied]:
    """The trainable parameters that more than one stage has, numbered in order of appearance.

    `last_owns`: the last stage that has a parameter owns it, not the first. `heads` are the parameters of other stages
    that the head of a stage borrows, by the stage.
    """
    names: dict[nn.Parameter, dict[int, str]] = {}  # parameter -> {stage: its name there}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                names.setdefault(parameter, {})[index] = name
    users = {parameter: set(uses) for parameter, uses in names.items()}
    for index, borrowed in (heads or {}).items():
        for parameter in borrowed:
            if parameter.requires_grad:
                users[parameter].add(index)
    owners = {parameter: max(uses) if last_owns else min(uses) for parameter, uses in names.items()}
    shared = [parameter for parameter in names if len(users[parameter]) > 1]
    return [
        Tied(number, names[p][owners[p]], p, owners[p], tuple(sorted(users[p] - {owners[p]})))
        for number, p in enumerate(shared)
    ]


def of_copies(ties: Iterable[Tied], stages: Sequence[nn.Module]) -> list[Tied]:
    return [replace(tied, parameter=stages[tied.owner].get_parameter(tied.name)) for tied in ties]


def pairs(ties: Iterable[Tied]) -> tuple[tuple[int, int], ...]:
    """(owner stage, borrowing stage) of all tied parameters, each pair once."""
    return tuple(sorted({(tied.owner, user) for tied in ties for user in tied.users}))


@dataclass
class Lender:
    """The parameters that a stage owns and others use, by number; and the numbers that each of these stages uses."""

    parameters: Mapping[int, nn.Parameter]
    users: Mapping[int, Sequence[int]]

    def values(self) -> dict[int, dict[int, Tensor]]:
        """Copies of the parameters' current values, to send to each stage that uses them."""
        copies = {number: parameter.detach().clone() for number, parameter in self.parameters.items()}
        return {user: {number: copies[number] for number in numbers} for user, numbers in self.users.items()}

    def add(self, gradients: Iterable[Values]) -> None:
        """Add the gradients that borrowers sent to the parameters' gradients."""
        for by_number in gradients:
            for number in self.parameters.keys() & by_number.keys():
                parameter = self.parameters[number]
                gradient = hooked(parameter, by_number[number])
                parameter.grad = gradient if parameter.grad is None else plus(parameter.grad, gradient)


@dataclass
class Borrower:
    """The parameters that a stage borrows: `originals` in its `modules`, and their latest `values`, by number.

    `trained` has the owner of each parameter whose gradients go there.
    """

    modules: Sequence[nn.Module]
    originals: Mapping[int, nn.Parameter]
    trained: Mapping[int, int] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = {id(parameter): number for number, parameter in self.originals.items()}
        self._places = [
            (holder, name, numbers[id(parameter)])
            for module in self.modules
            for holder in module.modules()
            for name, parameter in holder._parameters.items()
            if parameter is not None and id(parameter) in numbers
        ]
        self.refresh()

    def not_borrowed(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters that this stage does not borrow, each once."""
        borrowed = set(self.originals.values())
        return [parameter for parameter in dict.fromkeys(parameters) if parameter not in borrowed]

    def refresh(self) -> None:
        """Copy the originals' values. Call it when no micro-batch is in flight: then they equal the owner's."""
        self.values = {number: parameter.detach().clone() for number, parameter in self.originals.items()}

    @torch.no_grad()
    def overwrite(self, values: Values) -> None:
        """Set the originals to the owner's `values`, where the owner lives in another process."""
        for number in self.originals.keys() & values.keys():
            self.originals[number].copy_(values[number])

    def receive(self, arrived: Iterable[Values]) -> None:
        """Replace the values by newer ones from the owner; the last of `arrived` counts."""
        for values in arrived:
            self.values.update({number: values[number] for number in self.originals.keys() & values.keys()})

    def leaves(self) -> dict[int, nn.Parameter]:
        """A new leaf for each parameter, for one forward; it shares storage with the values and is never changed."""
        return {
            number: nn.Parameter(value, requires_grad=number in self.trained) for number, value in self.values.items()
        }

    def placeholders(self) -> dict[int, nn.Parameter]:
        """Frozen stand-ins for the borrowed parameters; with them in place, only the stage's own are trainable."""
        return {number: nn.Parameter(value, requires_grad=False) for number, value in self.values.items()}

    @contextmanager
    def substituted(self, leaves: Mapping[int, nn.Parameter]) -> Iterator[None]:
        """In this block the modules hold these parameters in place of the originals."""
        try:
            for holder, name, number in self._places:
                holder._parameters[name] = leaves[number]
            yield
        finally:
            for holder, name, number in self._places:
                holder._parameters[name] = self.originals[number]

    def take_gradients(self, leaves: Mapping[int, nn.Parameter]) -> dict[int, dict[int, Tensor]]:
        """Remove and return the gradients of one forward's leaves, by owner and number.

        Leaves that the forward did not use are left out.
        """
        gradients: dict[int, dict[int, Tensor]] = {owner: {} for owner in self.trained.values()}
        for number, leaf in leaves.items():
            if leaf.grad is not None:
                gradients[self.trained[number]][number] = leaf.grad
            leaf.grad = None
        return gradients


def lender_of(ties: Iterable[Tied], stage: int) -> Lender | None:
    """The `Lender` of a stage; None if it owns no tied parameter."""
    owned = [tied for tied in ties if tied.owner == stage]
    users = sorted({user for tied in owned for user in tied.users})
    numbers = {user: [tied.number for tied in owned if user in tied.users] for user in users}
    return Lender({tied.number: tied.parameter for tied in owned}, numbers) if owned else None


def borrower_of(
    ties: Iterable[Tied], stage: int, modules: Sequence[nn.Module], trained: Container[int]
) -> Borrower | None:
    """The `Borrower` of a stage; None if it borrows nothing. It sends gradients to the owners in `trained`."""
    borrowed = {tied.number: tied for tied in ties if stage in tied.users}
    originals = {number: tied.parameter for number, tied in borrowed.items()}
    owners = {number: tied.owner for number, tied in borrowed.items() if tied.owner in trained}
    return Borrower(modules, originals, owners) if borrowed else None
