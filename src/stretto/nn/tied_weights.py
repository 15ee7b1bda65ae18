"""Tied weights: a parameter that several stages use, such as an embedding that is the unembedding too.

The first stage owns it: its optimizer updates it, with the gradients of all uses of a micro-batch. Every other stage
works on the version that the owner's forward of the same micro-batch saw, which arrives like an activation: a leaf of
its own for each forward, never changed, whose gradient goes back to the owner. So any choice of weights for the stage's
own parameters stays what it is.

Where stages have losses of their own (local methods), a loss that does not reach the owner does not train what it owns:
there the other stage only reads it.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Values = Mapping[int, Tensor]  # by the number of the tied parameter


@dataclass(frozen=True, eq=False)
class Tied:
    """One parameter, the stage that owns it, and those that borrow it; `name` is what the owner calls it."""

    number: int
    name: str
    parameter: nn.Parameter
    owner: int
    users: tuple[int, ...]


def find(stages: Sequence[nn.Module]) -> list[Tied]:
    """The trainable parameters that stand in more than one stage."""
    homes: dict[nn.Parameter, dict[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                homes.setdefault(parameter, {})[index] = name
    shared = [(parameter, uses) for parameter, uses in homes.items() if len(uses) > 1]
    return [
        Tied(number, uses[min(uses)], parameter, min(uses), tuple(sorted(set(uses) - {min(uses)})))
        for number, (parameter, uses) in enumerate(shared)
    ]


def pairs(ties: Iterable[Tied]) -> tuple[tuple[int, int], ...]:
    """Who lends to whom: (owner, user), each pair once."""
    return tuple(sorted({(tied.owner, user) for tied in ties for user in tied.users}))


@dataclass
class Lender:
    """What the owner's stage does about its tied parameters."""

    own: Mapping[int, nn.Parameter]

    def values(self) -> dict[int, Tensor]:
        """A copy of them as they stand, for those that borrow them."""
        return {number: parameter.detach().clone() for number, parameter in self.own.items()}

    def add(self, gradients: Iterable[Values]) -> None:
        """Add what the uses on other stages contribute."""
        for each in gradients:
            for number in self.own.keys() & each.keys():
                parameter = self.own[number]
                parameter.grad = each[number] if parameter.grad is None else parameter.grad + each[number]


@dataclass
class Borrower:
    """What another stage does about parameters that it borrows: where in its module they stand, their values now."""

    module: nn.Module
    originals: Mapping[int, nn.Parameter]
    trained: frozenset[int] = frozenset()  # those whose gradients go to the owner
    values: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = {id(parameter): number for number, parameter in self.originals.items()}
        self._places = [
            (holder, name, numbers[id(parameter)])
            for holder in self.module.modules()
            for name, parameter in holder._parameters.items()
            if parameter is not None and id(parameter) in numbers
        ]
        self.settle()

    def own(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those that are not borrowed, each once."""
        borrowed = set(self.originals.values())
        return [parameter for parameter in dict.fromkeys(parameters) if parameter not in borrowed]

    def settle(self) -> None:
        """Nothing is in flight: what the owner has is what this stage has."""
        self.values = {number: parameter.detach().clone() for number, parameter in self.originals.items()}

    @torch.no_grad()
    def overwrite(self, values: Values) -> None:
        """Give the originals new values: they are this process's own, their owner's live in another."""
        for number in self.originals.keys() & values.keys():
            self.originals[number].copy_(values[number])

    def receive(self, arrived: Iterable[Values]) -> None:
        """Take over newer values."""
        for values in arrived:
            self.values.update({number: values[number] for number in self.originals.keys() & values.keys()})

    def leaves(self) -> dict[int, nn.Parameter]:
        """A leaf for each parameter, for one forward: it shares storage with the values and is never changed."""
        return {
            number: nn.Parameter(value, requires_grad=number in self.trained) for number, value in self.values.items()
        }

    def fixed(self) -> dict[int, nn.Parameter]:
        """Placeholders that nobody trains, for whoever asks the module for its trainable parameters."""
        return {number: nn.Parameter(value, requires_grad=False) for number, value in self.values.items()}

    @contextmanager
    def worn(self, leaves: Mapping[int, nn.Parameter]) -> Iterator[None]:
        """While it lasts, the module has these parameters in place of the tied ones."""
        try:
            for holder, name, number in self._places:
                holder._parameters[name] = leaves[number]
            yield
        finally:
            for holder, name, number in self._places:
                holder._parameters[name] = self.originals[number]


def taken(leaves: Mapping[int, nn.Parameter]) -> dict[int, Tensor]:
    """The gradients of one forward's leaves; those that it did not use have none."""
    found = {number: leaf.grad for number, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = None
    return found


def lender_of(ties: Iterable[Tied], stage: int) -> Lender | None:
    """What a stage lends, if it lends."""
    own = {tied.number: tied.parameter for tied in ties if tied.owner == stage}
    return Lender(own) if own else None


def borrower_of(ties: Iterable[Tied], stage: int, module: nn.Module, trained: Container[int]) -> Borrower | None:
    """What a stage borrows, if it borrows; of which stages it trains it."""
    borrowed = {tied.number: tied for tied in ties if stage in tied.users}
    originals = {number: tied.parameter for number, tied in borrowed.items()}
    own = frozenset(number for number, tied in borrowed.items() if tied.owner in trained)
    return Borrower(module, originals, own) if borrowed else None
