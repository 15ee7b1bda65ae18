"""Derives a seed for every random draw from the one that a user gives; constants in place of draws (`FixedDraws`)."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.nn.devices import generator_of

_MASK = (1 << 64) - 1


def derive(seed: int, *parts: int | str) -> int:
    """Mix `seed` with the `parts` of a place ("model", stage, micro-batch, ...) into a seed of 63 bits.

    The same place gives the same seed on any number of workers, in any process and on any machine (Python's own
    `hash` would not). The mixing is splitmix64's finalizer; it takes about a microsecond.
    """
    state = seed & _MASK
    for part in parts:
        word = crc32(part.encode()) + 0x51ED2701 if isinstance(part, str) else part
        state = (state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


class PreservedGenerator:
    """A context that restores the device's global random generator on exit; `seed` sets it in between."""

    def __init__(self, device: torch.device) -> None:
        self._generator = generator_of(device)
        self._state: Tensor | None = None

    def seed(self, seed: int) -> None:
        """Set the generator's seed."""
        self._generator.manual_seed(seed)

    def __enter__(self) -> "PreservedGenerator":
        self._state = self._generator.get_state()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._state is not None
        self._generator.set_state(self._state)


class ForwardSeeds:
    """Seeds the device's generator before each forward of a stage.

    A stage's random draws (dropout) depend on the seed, the stage, the replica and the micro-batch only.
    """

    def __init__(self, device: torch.device, seed: int, stage: int, replica: int = 0) -> None:
        base = derive(seed, "forward", stage)
        self._base = derive(base, "replica", replica) if replica else base
        self._generator = generator_of(device)

    def start(self, microbatch: int) -> None:
        """Seed the generator for the forward of a micro-batch."""
        self._generator.manual_seed(derive(self._base, microbatch))


NAMES = (
    "bernoulli binomial cauchy exponential geometric log_normal multinomial normal normal_functional poisson rand "
    "rand_like randint randint_like randn randn_like random randperm uniform _standard_gamma native_dropout"
)
DRAWS = frozenset(NAMES.split())
CONSTANT = 0.5
LOWEST = {"randint": 0, "randint_like": 1, "random_": 1, "random": 1}  # where an operator is given it, if it is


class FixedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In this context torch draws one half in place of any real number, and the lowest of whole numbers.

    A permutation turns the order round, dropout keeps all. No generator goes on.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._eager = ExitStack()

    def __enter__(self) -> Self:
        """What is compiled runs as it is written here: dynamo never compiles what it first meets in such a mode."""
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes a second
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._eager.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, or what stands for one that draws."""
        given = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name.removesuffix("_") not in DRAWS:
            return func(*args, **given)
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        own = given.get("generator") or next((arg for arg in args if isinstance(arg, torch.Generator)), None)
        generators = [own] if own is not None else [generator_of(torch.device("cpu"))]
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if own is None and tensors and tensors[0].device.type != "cpu":
            generators.append(generator_of(tensors[0].device))
        states = [generator.get_state() for generator in generators]
        drawn = func(*args, **given)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        if name == "randperm":
            return drawn.copy_(torch.arange(len(drawn) - 1, -1, -1))
        lowest = args[LOWEST[name]] if name in LOWEST and len(args) > 2 else 0
        return drawn.fill_(CONSTANT if drawn.is_floating_point() or drawn.is_complex() else lowest)
