"""What `split` cuts: pieces in a row, some of which cannot be parted."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from stretto.nn.tied_weights import find as find_ties
from stretto.splitting.balance import partition


@dataclass(frozen=True)
class Joint:
    """Why two neighbours cannot be parted, and what would part them."""

    reason: str
    remedy: str


class SplitParts(ABC):
    """Layers of a list, or blocks of a traced model.

    `joints[i]` says why no cut may fall between piece i - 1 and piece i.
    """

    noun: str
    joints: Mapping[int, Joint]

    @abstractmethod
    def __len__(self) -> int:
        """Number of pieces."""

    @abstractmethod
    def cut(self, bounds: Sequence[int]) -> list[nn.Module]:
        """Modules out of the pieces bounds[s] up to bounds[s + 1], s = 0, 1, ...: the model's own, not copies."""

    @abstractmethod
    def name(self, start: int, stop: int) -> str:
        """Those pieces, for messages."""

    @abstractmethod
    def kinds(self, start: int, stop: int) -> str:
        """What those pieces are made of, in a few words."""

    def divisible(self, index: int) -> bool:
        """Whether a finer way to cut may part what is in one piece."""
        return True

    def verify(self, stages: Sequence[nn.Module]) -> None:  # noqa: B027
        """Raise UsageError if stages, cut from these pieces, do not compute what the model does."""

    def choose(self, costs: Sequence[int], units: Sequence[int], num_stages: int) -> list[int]:
        """Which of `units`, the pieces where a stage can begin, bound the stages; `costs` has one entry a unit."""
        return partition(costs, num_stages)

    def notes(self, bounds: Sequence[int]) -> list[str]:
        """What else there is to say about these stages: what had to stay together."""
        reasons = list(dict.fromkeys(joint.reason for joint in self.joints.values()))
        more = [f"kept together: {len(reasons) - 4} more like these"] if len(reasons) > 4 else []
        return [f"kept together: {reason}" for reason in reasons[:4]] + more


def parted(stages: Sequence[nn.Module]) -> list[str]:
    """What there is to say about parameters that several stages share."""
    return [
        f"tied: stages {' and '.join(map(str, (each.owner, *each.users)))} share the parameter {each.name!r}; "
        "pipelines train it on the first of them, local methods by that stage's losses alone"
        for each in find_ties(stages)
    ]


def tied(parameters: Sequence[Mapping[str, nn.Parameter]], names: Sequence[str]) -> dict[int, Joint]:
    """Joints between pieces that share a parameter, for methods whose stages do not wait for each other's gradients."""
    joints: dict[int, Joint] = {}
    seen: dict[int, tuple[int, str]] = {}
    for index, owned in enumerate(parameters):
        for name, parameter in owned.items():
            first, other = seen.get(id(parameter), (index, name))
            called = repr(name) if name == other else f"{other!r} alias {name!r}"
            joint = Joint(
                f"{names[first]} and {names[index]} share the parameter {called} (tied weights), which one stage shall "
                "hold",
                "untie them: give each its own parameter; or tied='apart'",
            )
            for position in range(first + 1, index + 1):
                joints.setdefault(position, joint)
            seen[id(parameter)] = index, name
    return joints


def tally(modules: Iterable[nn.Module], limit: int = 4) -> str:
    """Kinds of modules and how many of each, in order of appearance."""
    counts = Counter(type(module).__name__ for module in modules)
    shown = [kind if count == 1 else f"{count} {kind}" for kind, count in counts.items()]
    return ", ".join(shown[:limit]) + (", ..." if len(shown) > limit else "")
