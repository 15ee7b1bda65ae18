"""What every head has to do with: where it stands, and losses of its own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Network:
    """What a head may know of the whole network: its stages, what each gives for one example batch, and that batch.

    `shared`: several processes share a stage's weights or images, of which each holds a part.
    """

    stages: Sequence[nn.Module]
    outputs: Sequence[Tensors]
    inputs: Tensors
    shared: bool = False


@dataclass(frozen=True, eq=False)
class Site:
    """Where a head stands: behind `stage`, which gives `features`, in a model that gives `output` (for one batch)."""

    stage: int
    features: Tensors
    output: Tensor
    network: Network | None = None

    @property
    def shape(self) -> torch.Size:
        """Of the tensor that the head reads, the first."""
        return self.features[0].shape

    @property
    def classes(self) -> int:
        """The last dimension of the model's output."""
        return self.output.shape[-1]

    @property
    def shapes(self) -> str:
        """For messages."""
        return f"stage {self.stage} gives {list(self.shape)}, the model gives {list(self.output.shape)}"


class LocalLoss(nn.Module, ABC):
    """A head that trains its stage by more than the task's loss. A user's own head may be one."""

    @abstractmethod
    def total(self, loss: Tensor, features: Tensors, inputs: Tensors) -> Tensor:
        """What is trained on: from the task's `loss` of this head's output, the `features` that the head got, and the
        model's `inputs` for the same examples. A mean over the examples, as the loss is.
        """


@dataclass(frozen=True)
class HeadKind:
    """How one kind of head is built, and which numbers of dimensions (the stage's, the model's) it goes between.

    `build` takes a site, and the head's options as keywords. `plain` kinds are those that "auto" chooses among;
    `several` reads all tensors that a stage gives, and not the first alone.
    """

    dims: Callable[[int, int], bool]
    build: Callable[..., nn.Module]
    takes: str
    plain: bool = False
    several: bool = False


class First(nn.Module):
    """A head for a stage that returns several tensors: it reads the first."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """The head's output on the first tensor."""
        output: Tensor = self.head(x)
        return output


REMEDY = "You can give your own: heads=[module or None for each stage]"


def decline(stage: int, num_stages: int) -> float:
    """How far a stage is on the way from the first head, 0, to the last, 1; the last stage has none."""
    return stage / (num_stages - 2) if num_stages > 2 else 0.0
