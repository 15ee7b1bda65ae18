"""A model as a sequence of pieces that `split` cuts between, and the positions where it cannot."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from stretto.nn.tied_weights import TRAINED
from stretto.nn.tied_weights import find as find_ties
from stretto.splitting.balance import partition
from stretto.splitting.cost import Inputs
from stretto.splitting.proof import Original, Proof, prove


@dataclass(frozen=True)
class Joint:
    """Why no cut may fall between two neighbouring pieces, and a remedy."""

    reason: str
    remedy: str


class SplitParts(ABC):
    """The pieces of a model, in order: layers of a list, or units of a recorded forward.

    `joints[i]` says why no cut may fall between piece i - 1 and piece i. `noun` is the word for a piece in messages.
    """

    noun: str
    joints: Mapping[int, Joint]

    @abstractmethod
    def __len__(self) -> int:
        """The number of pieces."""

    @abstractmethod
    def cut(self, bounds: Sequence[int]) -> list[nn.Module]:
        """One module a stage: stage s runs the pieces bounds[s] up to bounds[s + 1] on the model's own modules."""

    @abstractmethod
    def name(self, start: int, stop: int) -> str:
        """The pieces from `start` up to `stop`, for messages."""

    @abstractmethod
    def kinds(self, start: int, stop: int) -> str:
        """The classes of the modules in the pieces from `start` up to `stop`, and how many of each."""

    def divisible(self, index: int) -> bool:
        """Whether a finer way to cut may cut inside this piece."""
        return True

    @property
    @abstractmethod
    def original(self) -> Original:
        """What the stages have to do."""

    @abstractmethod
    def why_different(self) -> str:
        """The likely cause if stages do not do what the model does, and a remedy."""

    def verify(self, stages: Sequence[nn.Module], inputs: Inputs | None) -> Proof:
        """Raise UsageError if the stages do not train as the model does."""
        return prove(self.original, stages, inputs, self.why_different())

    def choose(self, costs: Sequence[int], units: Sequence[int], num_stages: int) -> list[int]:
        """The stages' bounds, as indices into `units`: pieces that a stage can begin with. `costs` has one a unit."""
        return partition(costs, num_stages)

    def notes(self, bounds: Sequence[int]) -> list[str]:
        """Lines below the table of stages: which pieces had to stay together, and why."""
        reasons = list(dict.fromkeys(joint.reason for joint in self.joints.values()))
        more = [f"kept together: {len(reasons) - 4} more like these"] if len(reasons) > 4 else []
        return [f"kept together: {reason}" for reason in reasons[:4]] + more


def tied_notes(stages: Sequence[nn.Module]) -> list[str]:
    """A line for each parameter that several stages share."""
    return [
        f"tied: stages {' and '.join(map(str, (tie.owner, *tie.users)))} share the parameter {tie.name!r}; {TRAINED}"
        for tie in find_ties(stages)
    ]


def tied(parameters: Sequence[Mapping[str, nn.Parameter]], names: Sequence[str]) -> dict[int, Joint]:
    """A Joint before each piece from the first user of a shared parameter to its last.

    `parameters` has one dict by name for each piece, `names` its name in messages.
    """
    joints: dict[int, Joint] = {}
    seen: dict[int, tuple[int, str]] = {}
    for index, piece_parameters in enumerate(parameters):
        for name, parameter in piece_parameters.items():
            first, first_name = seen.get(id(parameter), (index, name))
            label = repr(name) if name == first_name else f"{first_name!r} alias {name!r}"
            joint = Joint(
                f"{names[first]} and {names[index]} share the parameter {label} (tied weights), which one stage shall "
                "hold",
                "untie them: give each its own parameter; or tied='apart'",
            )
            for position in range(first + 1, index + 1):
                joints.setdefault(position, joint)
            seen[id(parameter)] = index, name
    return joints


def tally(modules: Iterable[nn.Module], limit: int = 4) -> str:
    """The classes of modules and how many of each, in order of first appearance: "2 Linear, ReLU"."""
    counts = Counter(type(module).__name__ for module in modules)
    shown = [kind if count == 1 else f"{count} {kind}" for kind, count in counts.items()]
    return ", ".join(shown[:limit]) + (", ..." if len(shown) > limit else "")
