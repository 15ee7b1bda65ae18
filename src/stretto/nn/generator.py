"""The global random generator of a device, borrowed."""

import torch
from torch import Tensor

from stretto.nn.devices import generator_of
from stretto.nn.seeding import derive


class PreservedGenerator:
    """The device's global random generator, given back as it was found."""

    def __init__(self, device: torch.device) -> None:
        self._generator = generator_of(device)
        self._state: Tensor | None = None

    def seed(self, seed: int) -> None:
        """Start the generator anew."""
        self._generator.manual_seed(seed)

    def __enter__(self) -> "PreservedGenerator":
        self._state = self._generator.get_state()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._state is not None
        self._generator.set_state(self._state)


class ForwardSeeds:
    """Seeds the device's generator before each forward of a stage.

    What a stage draws (dropout) depends on the seed, the stage, the replica and the micro-batch only.
    """

    def __init__(self, device: torch.device, seed: int, stage: int, replica: int = 0) -> None:
        base = derive(seed, "forward", stage)
        self._base = derive(base, "replica", replica) if replica else base
        self._generator = PreservedGenerator(device)

    def start(self, microbatch: int) -> None:
        """The forward of a micro-batch comes next."""
        self._generator.seed(derive(self._base, microbatch))
