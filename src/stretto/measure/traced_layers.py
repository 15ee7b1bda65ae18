"""A forward and the backwards of each layer: what its operators do, and what its graph keeps; of equal layers once.

How many bytes live while torch's operators run, on tensors that may be fake.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.measure.aten_costs import Done, Operators, tensors
from stretto.measure.gpu_autocast import GpuAutocast, autocasting
from stretto.measure.image_windows import ImageWindows, SeenWindow
from stretto.nn.layer_recompute import Recomputing
from stretto.nn.memory_limit import bytes_of
from stretto.nn.nested import HeldTensors, map_tensors, with_tensors
from stretto.nn.preserve import output_tensors
from stretto.nn.stopwatch import as_leaves, attempt

Inputs = tuple[Tensor, ...]
REMEDY = "Mend the layer or the example; if its shapes depend on its numbers, only layer_costs(fake=False) counts it"
NO_TENSOR = torch.empty(0)
Held = tuple[Sequence[int], ...]  # bytes moment by moment: of a forward, a backward, one that finds gradients


@dataclass(frozen=True)
class LayerRun:
    """What one run of a layer did, and the bytes that it kept and handed on."""

    passes: Mapping[str, Done]
    bytes: Mapping[str, int]
    held: Held
    differentiated: bool
    windows: Sequence[SeenWindow]


class ForwardContext(NamedTuple):
    """How a layer runs: what of it is recomputed, if known, and the type of products under autocast."""

    again: Recomputing | None = None
    autocast: torch.dtype | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """A context for one forward, in which what is recomputed keeps its inputs only."""
        with ExitStack() as stack:
            if self.autocast is not None:
                stack.enter_context(GpuAutocast(self.autocast))
                for module in () if self.again is None else self.again.modules:
                    stack.enter_context(autocasting(module, self.autocast))
            if self.again is not None:
                stack.enter_context(self.again())
            yield


class Loss(nn.Module):
    """A loss as the last layer: it takes the output before it as it is, a tensor, a tuple or a dict."""

    def __init__(self, loss: Callable[[Any, Any], Any], target: Any) -> None:
        super().__init__()
        self.loss = loss
        self.target = HeldTensors(target)

    def forward(self, output: Any) -> Tensor:
        """The mean loss of an output, or the sum of one that gives (sum, count)."""
        value = self.loss(output, self.target.value())
        number: Tensor = value[0] if isinstance(value, tuple) else value  # a sum costs what a mean costs
        return number


@dataclass(frozen=True)
class Runnable:
    """A layer, its parameters and buffers as they are used, how it runs, and what it is alike with, if known."""

    name: str
    call: Callable[..., Any]
    own: Sequence[Tensor]
    context: ForwardContext
    alike: Hashable = None
    takes_whole: bool = False

    def taking(self, form: Any) -> "Runnable":
        """The layer as it is called with tensors: with these, or, if it takes the output before it whole, in `form`."""
        if not self.takes_whole:
            return self

        def call(*tensors: Tensor) -> Any:
            return self.call(with_tensors(form, tensors))

        return replace(self, call=call, alike=None if self.alike is None else (self.alike, plain(form)))

    def run(self, *inputs: Tensor) -> Any:
        """A forward, which does not keep what is recomputed."""
        with self.context():
            return self.call(*inputs)

    def kept(self, known: Collection[int]) -> dict[int, Tensor]:
        """The inputs of what is recomputed, kept beside what the latest graph saves, but for `known` storages."""
        if self.context.again is None:
            return {}
        tensors, self.context.again.kept[:] = list(self.context.again.kept), []
        return {storage(tensor): tensor.detach() for tensor in tensors if storage(tensor) not in known}


def run(
    layers: Sequence[Runnable], inputs: Inputs, known: dict[Hashable, "TracedLayer"], *, compiles: bool = True
) -> list[LayerRun]:
    """One forward and three backwards of each layer on the output of the one before; of layers that are alike, once.

    `known` are those that have been run. `compiles`: some module may be compiled, and runs without.
    """
    weights = {storage(tensor) for layer in layers for tensor in layer.own}
    before: dict[int, Tensor] = {}  # storages that graphs keep; held, so that no other one gets their place
    seen: list[LayerRun] = []
    tensors, form = inputs, map_tensors(empty, inputs)
    eager = torch.compiler.set_stance("force_eager") if compiles else nullcontext()  # it stays so: nn/flop_counter.py
    with torch.enable_grad(), eager:
        for index, layer in enumerate(layers):
            leaves, layer = as_leaves(tensors, first=index == 0), layer.taking(form)
            key = (layer.alike, tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in leaves))
            found = known.get(key) if layer.alike is not None else None
            if found is None:
                found = observe(layer, leaves, weights)
                known[key] = found
                tensors = found.outputs
            else:
                tensors = found.again(leaves)
            form = found.form
            wanted = any(leaf.requires_grad for leaf in leaves)
            layer_bytes = found.bytes(leaves, tensors, before)
            seen.append(LayerRun(found.passes, layer_bytes, found.held, wanted, found.windows))
            before |= found.kept(leaves, tensors)
    return seen


@dataclass(frozen=True)
class TracedLayer:
    """A layer's passes, and what its graph keeps: of its inputs, of its outputs, and `inside` bytes beside them."""

    passes: Mapping[str, Done]
    inside: int
    keeps_input: tuple[bool, ...]
    keeps_output: tuple[bool, ...]
    outputs: Inputs
    form: Any  # of the output, with empty tensors in their places
    aliases: tuple[int | None, ...]  # the input in whose memory an output lies
    held: Held
    windows: Sequence[SeenWindow]

    def again(self, leaves: Inputs) -> Inputs:
        """The outputs for other inputs like those that were there."""
        return tuple(
            torch.empty_like(output)
            if alias is None
            else leaves[alias].detach().as_strided(output.shape, output.stride(), output.storage_offset())
            for output, alias in zip(self.outputs, self.aliases, strict=True)
        )

    def kept(self, leaves: Inputs, outputs: Inputs) -> dict[int, Tensor]:
        """Inputs and outputs that the graph keeps, by their storage."""
        both = (*zip(leaves, self.keeps_input, strict=True), *zip(outputs, self.keeps_output, strict=True))
        return {storage(tensor): tensor for tensor, keeps in both if keeps}

    def bytes(self, leaves: Inputs, outputs: Inputs, before: Mapping[int, Tensor]) -> dict[str, int]:
        """All amounts of bytes, behind layers whose graphs keep the storages `before`."""
        kept = self.kept(leaves, outputs)
        arrived, made = {storage(t): t for t in leaves}, {storage(t): t for t in outputs}
        return {
            "activation": self.inside + size(kept),
            "shared": size({key: each for key, each in kept.items() if key in before}),
            "input": bytes_of(leaves),
            "output": bytes_of(outputs),
            "loose_input": size({key: each for key, each in arrived.items() if key not in {*kept, *made}}),
            "loose_output": size({key: each for key, each in made.items() if key not in {*kept, *before}}),
        }


def empty(tensor: Tensor) -> Tensor:
    """What stands for a tensor in a form."""
    return NO_TENSOR


def size(tensors: Mapping[int, Tensor]) -> int:
    """Bytes of the storages of tensors."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


def storage(tensor: Tensor) -> int:
    """Which memory a tensor lies in, also where it has no address."""
    return int(tensor.untyped_storage()._cdata)


def observe(layer: Runnable, leaves: Inputs, weights: set[int]) -> TracedLayer:
    """Run one layer: what its passes do, and what its graph keeps other than weights."""
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if storage(tensor) not in weights:
            saved[storage(tensor)] = tensor.detach()
        return tensor.detach()  # the very tensor would keep its own graph alive

    with (
        ImageWindows() as windows,
        Operators() as operators,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        output = attempt(layer.run, f"layer {layer.name}", leaves, REMEDY)
    outputs = output_tensors(output)
    saved |= layer.kept(weights)
    passes = {"F": operators.all} | backwards(layer, leaves, outputs)
    places, made = [storage(leaf) for leaf in leaves], [storage(output) for output in outputs]
    return TracedLayer(
        passes,
        size({key: each for key, each in saved.items() if key not in {*places, *made}}),
        tuple(place in saved for place in places),
        tuple(place in saved for place in made),
        tuple(output.detach() for output in outputs),
        map_tensors(empty, output),
        tuple(places.index(place) if place in places else None for place in made),
        held(layer, leaves, weights),
        windows.seen,
    )


def held(layer: Runnable, leaves: Inputs, weights: set[int]) -> Held:
    """Bytes moment by moment of a forward, of a backward, and of one that adds to gradients that are there."""
    trained = [parameter for parameter in layer.own if parameter.requires_grad]
    before = [parameter.grad for parameter in trained]
    found = []
    for again in (False, True):
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter) if again else None
        found.append(freeing(layer, leaves, weights))
        for leaf in leaves:
            leaf.grad = None
    for parameter, gradient in zip(trained, before, strict=True):
        parameter.grad = gradient
    return found[0][0], found[0][1], found[1][1]


def freeing(layer: Runnable, leaves: Inputs, weights: set[int]) -> tuple[list[int], list[int]]:
    """Bytes moment by moment of a forward and of a backward that frees the graph, as in training."""
    saved: dict[int, Tensor] = {}
    known = weights | {storage(leaf) for leaf in leaves}

    def pack(tensor: Tensor) -> Tensor:
        if storage(tensor) not in known:
            saved[storage(tensor)] = tensor.detach()
        return tensor.detach()

    with LiveBytes() as forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        roots = [tensor for tensor in output_tensors(layer.run(*leaves)) if tensor.requires_grad]
    saved |= layer.kept(known)
    if not roots:
        return forward.held, [0]
    end: Tensor = Returning.apply(*roots)  # type: ignore[no-untyped-call]
    roots.clear()
    with LiveBytes(saved.values()) as backward:
        saved.clear()
        torch.autograd.backward(end)
    return forward.held, backward.held


def backwards(layer: Runnable, leaves: Inputs, outputs: Inputs) -> dict[str, Done]:
    """What the whole backward does, and each of its halves alone."""
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    trained = [parameter for parameter in layer.own if parameter.requires_grad]
    gradients = [torch.empty_like(root) for root in roots]
    passes: dict[str, Done] = {}
    for kind, wanted in (("B", [*trained, *inputs]), ("I", inputs), ("W", trained)):
        with Operators() as operators:
            if roots and wanted:
                torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
        passes[kind] = operators.all
    return passes


def alike(module: nn.Module) -> Hashable:
    """Equal for modules of one build: classes, plain attributes, shapes. Anything else counts by its identity."""
    order: dict[int, int] = {}

    def shape(tensor: Tensor | None) -> Hashable:
        if tensor is None:
            return None
        number = order.setdefault(id(tensor), len(order))
        return number, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad

    def own(part: nn.Module) -> Hashable:
        attributes = tuple((key, plain(value)) for key, value in vars(part).items() if key not in PARTS)
        tensors = tuple((key, shape(each)) for key, each in (*part._parameters.items(), *part._buffers.items()))
        return type(part), attributes, tensors

    return tuple((name, own(part)) for name, part in module.named_modules())


PARTS = ("_parameters", "_buffers", "_modules")


def plain(value: Any) -> Hashable:
    """A value that says all there is to know, else which object it is."""
    if isinstance(value, int | float | str | torch.dtype | None):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    if isinstance(value, partial):
        return partial, plain(value.func), plain(value.args), plain(tuple(value.keywords.items()))
    if isinstance(value, set):
        return frozenset(plain(each) for each in value)
    if isinstance(value, OrderedDict):  # of hooks
        return tuple(plain(each) for each in value.values())
    if isinstance(value, dict):
        return tuple((plain(key), plain(each)) for key, each in value.items())
    if isinstance(value, list):
        return tuple(plain(each) for each in value)
    if is_dataclass(value) and not isinstance(value, type) and getattr(value, "__dataclass_params__").frozen:  # noqa: B009
        return type(value), tuple(plain(getattr(value, each.name)) for each in fields(value))
    return "object", id(value)


expired = torch.UntypedStorage._expired  # as StorageWeakRef.expired does


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of storages after each operator, beyond those that lived at the beginning.

    Storages of `there` are known from the beginning: what of them goes counts against what comes.
    """

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = [0]
        self._now = 0
        self._open: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in there:
            self._enter(tensor, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, and asks it at each operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; see what has gone and what has come."""
        made = func(*args, **(kwargs or {}))
        gone = [key for key, (reference, _) in self._open.items() if expired(reference.cdata)]
        self._now -= sum(self._open.pop(key)[1] for key in gone)
        known = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        for tensor in tensors(made):
            if tensor.untyped_storage()._cdata not in known:
                self._enter(tensor, 1)
        self.held.append(self._now)
        return made

    def _enter(self, tensor: Tensor, counts: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._open:
            self._open[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
            self._now += counts * storage.nbytes()


class Returning(torch.autograd.Function):
    """Stands behind a layer, where its backward begins: makes the gradients of its outputs then and there."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        """Nothing but a place to begin."""
        ctx.likes = [(output.shape, output.dtype, output.device) for output in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Gradients that nobody else holds."""
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes)
