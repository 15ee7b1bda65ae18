"""An optimizer function that is told the parameters' names, for groups by name (no decay of biases, say)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stretto.errors import UsageError
from stretto.options.checks import function, sequence

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, eq=False)
class NamedOptimizer:
    """What a Trainer takes as `optimizer` where the function needs names: it is called with (name, parameter) pairs.

    Names are those of `Trainer.gather`, "<stage>.<name>" and "heads.<stage>.<name>". The parameters need not be those
    of the module: replicas that are emulated have copies, and precision="bf16" has float32 masters.
    """

    function: Callable[[Named], torch.optim.Optimizer]

    def __post_init__(self) -> None:
        function("NamedOptimizer: function", self.function, "a function of a list of (name, parameter) pairs", 1)

    def __call__(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Raise UsageError: only a parameter server steps parameters without names."""
        raise UsageError(
            f"a parameter server steps shards of {len(parameters)} flat pieces, which have no names, and this "
            "optimizer chooses its groups by the parameters' names: use another sync, such as 'all-reduce'"
        )

    def named(self, names: Sequence[str]) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
        """The function of the parameters alone, whose names are these."""
        sequence("NamedOptimizer.named: names", names, "a list of the parameters' names")

        def made(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            if len(names) != len(parameters):
                raise UsageError(f"NamedOptimizer.named: {len(names)} names for {len(parameters)} parameters")
            return self.function(list(zip(names, parameters, strict=True)))

        return made
