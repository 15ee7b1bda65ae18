"""How layers are run to be counted, without numbers, and which have been run already."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.measure.meta_operators import MetaOperators
from stretto.measure.traced_layers import ForwardContext, Inputs, LayerRun, Runnable, TracedLayer, alike, run
from stretto.nn.preserve import modes_restored, unique

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


class LayerCounting:
    """Layers are run on tensors without numbers; of those that are alike one is, in all calls that share this object.

    Tensors are torch's fakes, as on the CPU. With `on_meta` they are meta tensors, whose operators take a tenth of the
    time: for modules whose operators are the CPU's there, too. Autocast leaves meta tensors alone, so that where it is
    on fakes are taken.
    """

    def __init__(self, *, on_meta: bool = False) -> None:
        self.on_meta = on_meta and not torch.is_autocast_enabled("cpu")
        self.mode: TorchDispatchMode = MetaOperators() if self.on_meta else current() or faking()
        self.traced: dict[Hashable, TracedLayer] = {}
        self._named: list[nn.Module] = []  # what keys of `traced` name by its place in memory stays there

    @property
    def device(self) -> str:
        """Where tensors without numbers are."""
        return "meta" if self.on_meta else "cpu"

    @contextmanager
    def numberless(self) -> Iterator[None]:
        """Inside, tensors have no numbers."""
        with self.mode:
            yield

    def empty(self, tensor: Tensor) -> Tensor:
        """A tensor like another one, without its numbers."""
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        return made.requires_grad_(tensor.requires_grad)

    def run(
        self, named: Sequence[tuple[str, nn.Module]], inputs: Inputs, contexts: Mapping[int, ForwardContext]
    ) -> list[LayerRun]:
        """Run layers on tensors without numbers, each in its context."""
        modules = [module for _, module in named]
        self._named += modules
        with self.numberless(), training(modules):
            known: dict[int, Tensor] = {}

            def bare(tensor: Tensor) -> Tensor:
                if id(tensor) not in known:
                    known[id(tensor)] = self.empty(tensor)
                return known[id(tensor)]

            layers = [runnable(name, module, bare, contexts[id(module)]) for name, module in named]
            return run(layers, tuple(map(bare, inputs)), self.traced, compiles=not self.on_meta)


def runnable(name: str, module: nn.Module, bare: Callable[[Tensor], Tensor], context: ForwardContext) -> Runnable:
    """A layer that runs on `bare` parameters and buffers."""
    own = {key: bare(each) for key, each in (*module.named_parameters(), *module.named_buffers())}

    def call(*given: Tensor) -> Any:
        return functional_call(module, own, given)

    again = [] if context.again is None else context.again.modules
    places = tuple(place for place, part in module.named_modules() if any(part is each for each in again))
    return Runnable(name, call, list(own.values()), context, (alike(module), places, context.autocast))


def current() -> "FakeTensorMode | None":
    """The mode of fake tensors that is on."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    if not modes:
        return None
    from torch._subclasses.fake_tensor import FakeTensorMode

    return next((mode for mode in modes if isinstance(mode, FakeTensorMode)), None)


def faking() -> "FakeTensorMode":
    """A mode for `with`: models made inside have parameters that take no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def training(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Training mode, afterwards as before."""
    with modes_restored(modules):
        for module in unique(modules):
            module.training = True
        yield
