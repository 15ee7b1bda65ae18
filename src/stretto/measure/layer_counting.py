"""How layers are run to be counted, without numbers, and which have been run already.

Torch's operators on meta tensors: those that ran on the same shapes before are not run again.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.measure.aten_costs import tensors
from stretto.measure.traced_layers import ForwardContext, Inputs, LayerRun, Loss, Runnable, TracedLayer, alike, run
from stretto.nn.preserve import modes_restored, unique

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


class LayerCounting:
    """Runs each distinct layer once, on tensors without numbers; all calls that share this object reuse the results.

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
    return Runnable(
        name, call, list(own.values()), context, (alike(module), places, context.autocast), isinstance(module, Loss)
    )


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


class MetaShape(NamedTuple):
    """All that there is to a meta tensor that lies in a memory of its own."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "MetaShape":
        """That of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def empty(self) -> Tensor:
        """A tensor of this shape."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class MetaOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators on meta tensors as the CPU would, each on the same shapes and options once.

    Many are written in Python there and take a millisecond. Views always run, what changes numbers in place never does.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results: dict[Hashable, Any] = {}
        self._views: set[Any] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, half a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or give what it gave before."""
        kwargs = kwargs or {}
        if changes_numbers(func):
            return args[0]
        if func in self._views or shares_memory(func):
            return func(*args, **kwargs)
        key = (func, described(args), described(tuple(kwargs.items())))
        if key not in self._results:
            made = as_on_cpu(func, args, func(*args, **kwargs))
            if not is_new(made, (args, kwargs)):
                self._views.add(func)
                return made
            self._results[key] = shapes_of(made)
            return made
        return empty_like_all(self._results[key])


@cache
def changes_numbers(func: Any) -> bool:
    """Whether an operator changes the numbers of its first operand, and nothing else: there are none."""
    schema = func._schema
    returned = [each.alias_info for each in schema.returns]
    return (
        len(returned) == 1
        and returned[0] is not None
        and returned[0].is_write
        and schema.name.endswith("_")
        and not schema.name.endswith(("::resize_", "::set_"))
        and torch.Tag.inplace_view not in func.tags
    )


@cache
def shares_memory(func: Any) -> bool:
    """Whether an operator says that it changes or gives back what it takes, or gives nothing back."""
    returned = func._schema.returns
    return not returned or any(each.alias_info is not None for each in returned) or func._schema.is_mutable


def described(value: Any) -> Hashable:
    """All that an operator's result can depend on, of an argument without numbers."""
    if isinstance(value, Tensor):
        return MetaShape(value.shape, value.stride(), value.dtype)
    if isinstance(value, tuple | list):
        return tuple([described(each) for each in value])
    return type(value), value  # 1 and 1.0 and True are equal, and give other types


def as_on_cpu(func: Any, args: Any, made: Any) -> Any:
    """What the operator gives on a CPU, off which costs are read: its norms keep statistics in the input's type."""
    if func in (torch.ops.aten.native_layer_norm.default, torch.ops.aten.native_batch_norm.default):
        normed, *statistics = made
        return (normed, *(each.to(args[0].dtype) for each in statistics))
    return made


def is_new(made: Any, given: Any) -> bool:
    """Whether the results are tensors in memory of their own."""
    known = {place(tensor) for tensor in tensors(given)}
    results = made if isinstance(made, tuple | list) else (made,)
    return all(each is None or (isinstance(each, Tensor) and place(each) not in known) for each in results)


def place(tensor: Tensor) -> int:
    """Which memory a tensor lies in."""
    return int(tensor.untyped_storage()._cdata)


def shapes_of(made: Any) -> Any:
    """Results with shapes instead of tensors."""
    if isinstance(made, Tensor):
        return MetaShape.of(made)
    return None if made is None else [shapes_of(each) for each in made]


def empty_like_all(shapes: Any) -> Any:
    """Results with tensors instead of shapes."""
    if isinstance(shapes, MetaShape):
        return shapes.empty()
    return None if shapes is None else tuple(empty_like_all(each) for each in shapes)
