"""What each layer of a model costs, read off the operators that torch really runs, on tensors that may be fake."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from stretto.cost.layer_table import (
    Affine,
    Kernels,
    LayerCost,
    ModelCosts,
    Peaks,
    ProductSizes,
    TiedLayers,
    Work,
    Works,
    highest,
)
from stretto.errors import UsageError
from stretto.measure.aten_costs import Done, Operators
from stretto.measure.cuda_autocast import CudaAutocast, autocasting
from stretto.measure.image_windows import ImageWindows, SeenWindow, image_windows
from stretto.measure.kernels import Kernel
from stretto.measure.live_bytes import LiveBytes, returning
from stretto.nn import tied_weights
from stretto.nn.batch import num_examples
from stretto.nn.layer_recompute import Recomputing, marked
from stretto.nn.preserve import device_of, output_tensors, undisturbed
from stretto.nn.stopwatch import as_leaves, attempt
from stretto.optim.labels import stage_labels
from stretto.optimizers import MatrixWork
from stretto.options.checks import flag, function, of_kind, refuse, sequence

Inputs = tuple[Tensor, ...]
REMEDY = "Mend the layer or the example; give fake=False if its shapes depend on its numbers"
Held = tuple[Sequence[int], ...]  # bytes moment by moment: of a forward, a backward, one that finds gradients


def layer_costs(
    layers: Sequence[nn.Module],
    example: Tensor | Inputs,
    *,
    names: Sequence[str] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    target: Tensor | None = None,
    fake: bool = True,
    recompute: str = "none",
    autocast: torch.dtype | None = None,
) -> ModelCosts:
    """A row for each of `layers`, run one after the other on `example`, as in training; one more for a loss.

    Forward and backwards run twice, on the example and on two of them, which gives what an example costs and what
    does not depend on the batch. `fake` runs them on torch's fake tensors: nothing is computed and nothing allocated,
    so that modules on the meta device, or made under `faking()`, will do whatever their size. A model whose shapes
    depend on its numbers needs `fake=False`. Nothing is trained; modules, statistics and generators stay as they were.
    With `recompute` "selective" or "full" they are the costs of layers that are recomputed so in training; with
    `autocast`, float16 or bfloat16, of layers and loss under torch.autocast on a CUDA device.

    Raises UsageError for a layer that cannot take what reaches it.
    """
    check(layers, example, names, loss, target, fake)
    given = example if isinstance(example, tuple) else (example,)
    named = list(zip(names or [str(index) for index in range(len(layers))], layers, strict=True))
    sweep = faked if fake else real
    contexts = {id(layer): ForwardContext(layers_again(layer, recompute), autocast) for layer in layers}
    runs = []
    for times in (1, 2):
        ends = [] if loss is None or target is None else [("loss", Loss(loss, repeated(target, times)))]
        contexts |= {id(end): ForwardContext(None, autocast) for _, end in ends}
        runs.append(sweep([*named, *ends], tuple(repeated(x, times) for x in given), contexts))
    works: dict[tuple[int, int], PassWorks] = {}  # equal layers have the same object, so that they are priced once
    rows, matrices = [], matrices_of(layers)
    for (name, module), few, many in zip([*named, *ends], *runs, strict=True):
        pair, key = Pair(given[0].shape[0], few, many), (id(few.passes), id(many.passes))
        if key not in works:
            works[key] = PassWorks(*map(pair.works, "FBIW"))
        rows.append(replace(row(name, module, pair, works[key]), matrices=matrices.get(id(module), MatrixWork())))
    return ModelCosts(tuple(rows), dtype_of(layers), ties=tuple(map(tied, tied_weights.find(layers))))


def matrices_of(layers: Sequence[nn.Module]) -> dict[int, MatrixWork]:
    """What optimizers do with the matrices of each layer, by its id; a parameter that layers share counts in each."""
    labels, totals = stage_labels(layers), {}
    for index, layer in enumerate(layers):
        total = MatrixWork()
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                hidden = labels[f"{index}.{name}"].is_hidden_matrix
                total += MatrixWork.of(parameter.shape[0], parameter.shape[1:].numel(), hidden=hidden)
        totals[id(layer)] = total
    return totals


def layers_again(layer: nn.Module, recompute: str) -> Recomputing:
    """The parts of a layer that are recomputed: its marked modules, or the layer itself."""
    return Recomputing({"none": [], "selective": marked(layer), "full": [layer]}[recompute], records=True)


def check(layers: Any, example: Any, names: Any, loss: Any, target: Any, fake: Any) -> None:
    """Refuse what is no list of layers, no batch for them, and no loss."""
    sequence("layers", layers, "a list of modules")
    for index, layer in enumerate(layers):
        of_kind(f"layers[{index}]", layer, nn.Module, "an nn.Module")
    for number, tensor in enumerate(example if isinstance(example, tuple) else (example,)):
        of_kind(f"example[{number}]", tensor, Tensor, "a tensor, or a tuple of tensors")
        num_examples(tensor, f"example[{number}]")
    if names is not None:
        sequence("names", names, f"{len(layers)} names")
        if len(names) != len(layers) or not all(isinstance(name, str) for name in names):
            refuse("names", names, f"{len(layers)} names, one a layer")
    if (loss is None) != (target is None):
        raise UsageError("a loss has costs for a target: give both, loss= and target=, or neither")
    if loss is not None:
        function("loss", loss, "a function (output, target) -> mean loss")
        of_kind("target", target, Tensor, "a tensor")
        num_examples(target, "target")
    flag("fake", fake)


def tied(shared: tied_weights.Tied) -> TiedLayers:
    """A parameter of several layers."""
    return TiedLayers((shared.owner, *shared.users), shared.parameter.numel() * shared.parameter.element_size())


class Loss(nn.Module):
    """A loss as the last layer."""

    target: Tensor

    def __init__(self, loss: Callable[[Any, Any], Any], target: Tensor) -> None:
        super().__init__()
        self.loss = loss
        self.register_buffer("target", target)

    def forward(self, output: Tensor) -> Tensor:
        """The mean loss of an output, or the sum of one that gives (sum, count)."""
        value = self.loss(output, self.target)
        number: Tensor = value[0] if isinstance(value, tuple) else value  # a sum costs what a mean costs
        return number


@dataclass(frozen=True)
class LayerRun:
    """What one run of a layer did, and the bytes that it kept and handed on."""

    passes: Mapping[str, Done]
    bytes: Mapping[str, int]
    held: Held
    differentiated: bool
    windows: Sequence[SeenWindow]


@dataclass(frozen=True)
class Pair:
    """A layer on `examples` examples and on twice as many."""

    examples: int
    few: LayerRun
    many: LayerRun

    def bytes(self, name: str) -> Affine:
        """An amount of bytes."""
        return self.line(self.few.bytes[name], self.many.bytes[name])

    def line(self, few: float, many: float) -> Affine:
        """What grows with the examples, and what does not."""
        return Affine.through((self.examples, few), (2 * self.examples, many))

    def most(self, kind: int) -> tuple[Affine, ...]:
        """The most bytes of a pass, moment by moment."""
        few, many = self.few.held[kind], self.many.held[kind]
        if len(few) != len(many):
            few, many = [max(few)], [max(many)]
        return highest([self.line(*pair) for pair in zip(few, many, strict=True)])

    def works(self, kind: str) -> Works:
        """The work of a pass, by sort of operator."""
        few, many = self.few.passes[kind].sorts, self.many.passes[kind].sorts
        none, kernels = (0, 0, 0), self.kernels(kind)

        def line(operator: str, index: int) -> Affine:
            return self.line(few.get(operator, none)[index], many.get(operator, none)[index])

        return tuple(
            Work(operator, many.get(operator, none)[0], line(operator, 1), line(operator, 2), kernels.get(operator, ()))
            for operator in sorted({*few, *many})
        )

    def kernels(self, kind: str) -> dict[str, tuple[Kernels, ...]]:
        """The kernels of a pass by sort of operator, those that are alike together; none if their number depends on
        the batch.
        """
        few, many = self.few.passes[kind].kernels, self.many.passes[kind].kernels
        if [alike_in(x) for x in few] != [alike_in(x) for x in many]:
            return {}
        kernels: dict[str, tuple[Kernels, ...]] = {}
        for (one, other), count in Counter(zip(few, many, strict=True)).items():
            product = None
            if one.product and other.product:
                product = ProductSizes(*map(self.line, one.product, other.product))
            keys = ("flops", "bytes", "random", "transposed")
            flops, num_bytes, drawn, transposed = (self.line(getattr(one, key), getattr(other, key)) for key in keys)
            alike = Kernels(count, flops, num_bytes, product, drawn, transposed, one.transposes)
            kernels[one.sort] = (*kernels.get(one.sort, ()), alike)
        return kernels


def alike_in(kernel: Kernel) -> Hashable:
    """What a kernel has whatever the number of examples is."""
    return kernel.sort, kernel.product is None, kernel.transposes


class PassWorks(NamedTuple):
    """The work of a forward, a backward, and of its halves."""

    forward: Works
    backward: Works
    input_gradient: Works
    weight_gradient: Works


def row(name: str, module: nn.Module, pair: Pair, works: PassWorks) -> LayerCost:
    """A row of the table."""
    sizes: dict[str, Any] = {
        key: pair.bytes(key) for key in ("activation", "shared", "input", "output", "loose_input", "loose_output")
    }
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return LayerCost(
        name=name,
        type=type(module).__name__,
        **works._asdict(),
        differentiated=pair.few.differentiated,
        parameters=sum(p.numel() for p in parameters),
        parameter_tensors=len(trained),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        gradient_bytes=sum(p.numel() * p.element_size() for p in trained),
        peaks=Peaks(
            pair.most(0),
            pair.most(1),
            pair.most(2),
            max((p.numel() * p.element_size() for p in trained), default=0),
        ),
        image_windows=image_windows(pair.examples, pair.few.windows, pair.many.windows),
        **sizes,
    )


def repeated(tensor: Tensor, times: int) -> Tensor:
    """So many times the examples."""
    return torch.cat([tensor] * times) if times > 1 else tensor


def dtype_of(layers: Sequence[nn.Module]) -> str:
    """The type of the first parameter that is a number with a fraction; float32 if there is none."""
    found = (p.dtype for layer in layers for p in layer.parameters() if p.is_floating_point())
    return str(next(found, torch.float32)).removeprefix("torch.")


class ForwardContext(NamedTuple):
    """How a layer runs: what of it is recomputed, if known, and the type of products under autocast."""

    again: Recomputing | None = None
    autocast: torch.dtype | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """A context for one forward, in which what is recomputed keeps its inputs only."""
        with ExitStack() as stack:
            if self.autocast is not None:
                stack.enter_context(CudaAutocast(self.autocast))
                for module in () if self.again is None else self.again.modules:
                    stack.enter_context(autocasting(module, self.autocast))
            if self.again is not None:
                stack.enter_context(self.again())
            yield


def real(
    named: Sequence[tuple[str, nn.Module]], inputs: Inputs, contexts: Mapping[int, ForwardContext]
) -> list[LayerRun]:
    """Run the layers as they are."""
    modules = [module for _, module in named]
    device = device_of(modules)
    with undisturbed(modules, device):
        for module in modules:
            module.train()
        return run(
            [
                Runnable(name, module, [*module.parameters(), *module.buffers()], contexts[id(module)])
                for name, module in named
            ],
            tuple(each.to(device) for each in inputs),
        )


def faked(
    named: Sequence[tuple[str, nn.Module]], inputs: Inputs, contexts: Mapping[int, ForwardContext]
) -> list[LayerRun]:
    """Run the layers on tensors without numbers, as on the CPU."""
    mode = current() or FakeTensorMode(allow_non_fake_inputs=True)
    known: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            known[id(tensor)] = empty.requires_grad_(tensor.requires_grad)
        return known[id(tensor)]

    def on_fakes(name: str, module: nn.Module) -> Runnable:
        own = {key: fake(each) for key, each in (*module.named_parameters(), *module.named_buffers())}
        call, weights = (lambda *given: functional_call(module, own, given)), list(own.values())
        return Runnable(name, call, weights, contexts[id(module)], alike(module))

    with mode, training([module for _, module in named]):
        return run([on_fakes(*each) for each in named], tuple(fake(each) for each in inputs))


def current() -> FakeTensorMode | None:
    """The mode of fake tensors that is on."""
    return next((m for m in torch.utils._python_dispatch._get_current_dispatch_mode_stack()
                 if isinstance(m, FakeTensorMode)), None)  # fmt: skip


def faking() -> FakeTensorMode:
    """A mode for `with`: models made inside have parameters that take no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def training(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Training mode, afterwards as before."""
    modes = [(module, module.training) for root in modules for module in root.modules()]
    for module, _ in modes:
        module.training = True
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(frozen=True)
class Runnable:
    """A layer, its parameters and buffers as they are used, how it runs, and what it is alike with, if known."""

    name: str
    call: Callable[..., Any]
    own: Sequence[Tensor]
    context: ForwardContext
    alike: Hashable = None

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


def run(layers: Sequence[Runnable], inputs: Inputs) -> list[LayerRun]:
    """One forward and three backwards of each layer on the output of the one before; of layers that are alike, once."""
    weights = {storage(tensor) for layer in layers for tensor in layer.own}
    known: dict[Hashable, TracedLayer] = {}
    before: dict[int, Tensor] = {}  # storages that graphs keep; held, so that no other one gets their place
    seen: list[LayerRun] = []
    tensors = inputs
    with torch.enable_grad(), torch.compiler.set_stance("force_eager"):  # what is compiled stays so: nn/flop_counter.py
        for index, layer in enumerate(layers):
            leaves = as_leaves(tensors, first=index == 0)
            key = (layer.alike, tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in leaves))
            found = known.get(key) if layer.alike is not None else None
            if found is None:
                found = known[key] = observe(layer, leaves, weights)
                tensors = found.outputs
            else:
                tensors = found.again(leaves)
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
    aliases: tuple[int | None, ...]  # the input in whose memory an output lies
    held: Held
    windows: Sequence[SeenWindow]

    def again(self, leaves: Inputs) -> Inputs:
        """The outputs for other inputs like those that were there."""
        return tuple(
            torch.empty_like(output) if alias is None else leaves[alias].detach().as_strided(
                output.shape, output.stride(), output.storage_offset()
            )
            for output, alias in zip(self.outputs, self.aliases, strict=True)
        )  # fmt: skip

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
            "input": sum(t.numel() * t.element_size() for t in leaves),
            "output": sum(t.numel() * t.element_size() for t in outputs),
            "loose_input": size({key: each for key, each in arrived.items() if key not in {*kept, *made}}),
            "loose_output": size({key: each for key, each in made.items() if key not in {*kept, *before}}),
        }


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
        outputs = output_tensors(attempt(layer.run, f"layer {layer.name}", leaves, REMEDY))
    saved |= layer.kept(weights)
    passes = {"F": operators.all} | backwards(layer, leaves, outputs)
    places, made = [storage(leaf) for leaf in leaves], [storage(output) for output in outputs]
    return TracedLayer(
        passes,
        size({key: each for key, each in saved.items() if key not in {*places, *made}}),
        tuple(place in saved for place in places),
        tuple(place in saved for place in made),
        tuple(output.detach() for output in outputs),
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
    end = returning(roots)
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

    return tuple(
        (name, type(part), tuple((key, plain(value)) for key, value in vars(part).items() if key not in PARTS),
         tuple((key, shape(each)) for key, each in (*part._parameters.items(), *part._buffers.items())))
        for name, part in module.named_modules()
    )  # fmt: skip


PARTS = ("_parameters", "_buffers", "_modules")


def plain(value: Any) -> Hashable:
    """A value that says all there is to know, else which object it is."""
    if isinstance(value, int | float | str | torch.dtype | None):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    if isinstance(value, set):
        return frozenset(plain(each) for each in value)
    if isinstance(value, dict | list) and not value:
        return ()
    if isinstance(value, OrderedDict):  # of hooks
        return tuple(plain(each) for each in value.values())
    if is_dataclass(value) and not isinstance(value, type) and getattr(value, "__dataclass_params__").frozen:  # noqa: B009
        return type(value), tuple(plain(getattr(value, each.name)) for each in fields(value))
    return "object", id(value)
