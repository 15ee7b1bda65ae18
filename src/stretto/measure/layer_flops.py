"""What each layer of a model costs, read off the operators that torch really runs, on tensors that may be fake."""

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.cost.layer_table import (
    KERNEL_AMOUNTS,
    KERNEL_FACTS,
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
from stretto.measure.image_windows import image_windows
from stretto.measure.kernels import Kernel
from stretto.measure.layer_counting import LayerCounting
from stretto.measure.traced_layers import ForwardContext, Inputs, LayerRun, Loss, Runnable, run
from stretto.nn import tied_weights
from stretto.nn.batch import num_examples
from stretto.nn.layer_recompute import Recomputing, marked
from stretto.nn.memory_limit import bytes_of
from stretto.nn.nested import map_tensors, tensors_of
from stretto.nn.preserve import device_of, undisturbed
from stretto.optim.parameter_labels import MATRIX, stage_labels
from stretto.optimizers import NO_MATRICES, MatrixWork
from stretto.options.checks import flag, function, of_kind, refuse, sequence


def layer_costs(
    layers: Sequence[nn.Module],
    example: Tensor | Inputs,
    *,
    names: Sequence[str] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    target: Tensor | None = None,
    fake: bool | LayerCounting = True,
    recompute: str = "none",
    autocast: torch.dtype | None = None,
) -> ModelCosts:
    """A row for each of `layers`, run one after the other on `example`, as in training; one more for a loss.

    Forward and backwards run twice, on the example and on two of them, which gives what an example costs and the part
    that does not depend on the batch. `fake` runs them on torch's fake tensors: nothing is computed and nothing
    allocated, so that modules on the meta device, or made under `faking()`, will do whatever their size. A model whose
    shapes depend on its numbers needs `fake=False`. Nothing is trained; modules, statistics and generators stay as they
    were. With `recompute` "selective" or "full" they are the costs of layers that are recomputed so in training; with
    `autocast`, float16 or bfloat16, of layers and loss under torch.autocast on a GPU. Calls that share one
    `LayerCounting` as `fake` run no two layers that are alike. Layers that share a parameter with an earlier one are
    counted a second time, as if they read it without training it, on fake tensors only (`ModelCosts.read_rows`).

    Raises UsageError for a layer that cannot take what reaches it.
    """
    check(layers, example, names, loss, target, fake)
    given = example if isinstance(example, tuple) else (example,)
    named = list(zip(names or [str(index) for index in range(len(layers))], layers, strict=True))
    sweep = real if fake is False else (LayerCounting() if fake is True else fake).run
    contexts = {id(layer): ForwardContext(layers_again(layer, recompute), autocast) for layer in layers}
    runs = []
    for times in (1, 2):
        ends = [] if loss is None or target is None else [("loss", Loss(loss, repeated(target, times)))]
        contexts |= {id(end): ForwardContext(None, autocast) for _, end in ends}
        runs.append(sweep([*named, *ends], tuple(repeated(x, times) for x in given), contexts))
    shared: dict[tuple[int, int], PassWorks] = {}  # of equal layers the same objects, so that they are priced once
    rows = []
    matrices = [*matrices_of(layers), *((NO_MATRICES, ()) for _ in ends)]
    for (name, module), (work, shapes_of), few, many in zip([*named, *ends], matrices, *runs, strict=True):
        pair, key = Pair(given[0].shape[0], few, many), (id(few.passes), id(many.passes))
        if key not in shared:
            works, most = map(pair.works, "FBIW"), map(pair.most, range(3))
            forward, backward, inputs, weights = works
            shared[key] = PassWorks(forward, backward, inputs, weights, tuple(most))
        counted = row(name, module, pair, shared[key])
        rows.append(replace(counted, matrices=work, matrix_shapes=shapes_of))
    ties = tied_weights.find(layers)
    found = ModelCosts(tuple(rows), dtype_of(layers), ties=tuple(map(tied, ties)))
    if not (ties and fake):
        return found
    how: dict[str, Any] = {"names": names, "loss": loss, "target": target, "recompute": recompute, "autocast": autocast}
    reading = layer_costs(reading_layers(layers, ties), example, fake=fake, **how).layers
    readers = sorted({user for tie in ties for user in tie.users})
    return replace(found, read_rows=tuple((index, reading[index]) for index in readers))


def reading_layers(layers: Sequence[nn.Module], ties: Sequence[tied_weights.Tied]) -> list[nn.Module]:
    """The layers, with stand-ins for those that share a parameter with an earlier one: they do not train it.

    A stand-in has the layer's other parameters themselves.
    """
    readers: dict[int, list[nn.Parameter]] = {}
    for tie in ties:
        for user in tie.users:
            readers.setdefault(user, []).append(tie.parameter)
    found = list(layers)
    for index, read in readers.items():
        kept: dict[int, Any] = {id(each): each for each in (*layers[index].parameters(), *layers[index].buffers())}
        kept |= {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in read}
        found[index] = copy.deepcopy(layers[index], kept)
    return found


Shapes = tuple[tuple[int, int], ...]


def matrices_of(layers: Sequence[nn.Module]) -> list[tuple[MatrixWork, Shapes]]:
    """What optimizers do with the matrices of each layer, and the shapes of these.

    A parameter that layers share counts in the first one, as one optimizer steps it. Equal shapes are one object, so
    that layers that are alike are priced once.
    """
    labels, found = stage_labels(layers), list[tuple[MatrixWork, Shapes]]()
    known: dict[Shapes, Shapes] = {}
    counted: set[int] = set()
    for index, layer in enumerate(layers):
        total, shapes = MatrixWork(), list[tuple[int, int]]()
        for name, parameter in layer.named_parameters():
            if not parameter.requires_grad or parameter.dim() < MATRIX or id(parameter) in counted:
                continue
            counted.add(id(parameter))
            hidden = labels[f"{index}.{name}"].is_hidden_matrix
            total += MatrixWork.of(parameter.shape[0], parameter.shape[1:].numel(), hidden=hidden)
            if parameter.dim() == MATRIX:
                shapes.append((parameter.shape[0], parameter.shape[1]))
        found.append((total, known.setdefault(tuple(shapes), tuple(shapes))))
    return found


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
        if not tensors_of(target):
            refuse("target", target, "a tensor, or a tuple or dict of tensors as the loss takes it")
        for tensor in tensors_of(target):
            num_examples(tensor, "target")
    if not isinstance(fake, LayerCounting):
        flag("fake", fake)


def tied(shared: tied_weights.Tied) -> TiedLayers:
    """A parameter of several layers."""
    return TiedLayers((shared.owner, *shared.users), shared.parameter.numel() * shared.parameter.element_size())


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
            amounts: dict[str, Any] = {key: self.line(getattr(one, key), getattr(other, key)) for key in KERNEL_AMOUNTS}
            kept = {key: getattr(one, key) for key in KERNEL_FACTS}
            alike = Kernels(count, product=product, **amounts, **kept)
            kernels[one.sort] = (*kernels.get(one.sort, ()), alike)
        return kernels


def alike_in(kernel: Kernel) -> Hashable:
    """What a kernel has whatever the number of examples is."""
    return kernel.sort, kernel.product is None, *(getattr(kernel, key) for key in KERNEL_FACTS)


class PassWorks(NamedTuple):
    """The work of a forward, a backward, and of its halves; and the most bytes of each pass of `Held`."""

    forward: Works
    backward: Works
    input_gradient: Works
    weight_gradient: Works
    most: tuple[tuple[Affine, ...], ...]


def row(name: str, module: nn.Module, pair: Pair, works: PassWorks) -> LayerCost:
    """A row of the table."""
    sizes: dict[str, Any] = {
        key: pair.bytes(key) for key in ("activation", "shared", "input", "output", "loose_input", "loose_output")
    }
    forward, backward, again = works.most
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return LayerCost(
        name=name,
        type=type(module).__name__,
        forward=works.forward,
        backward=works.backward,
        input_gradient=works.input_gradient,
        weight_gradient=works.weight_gradient,
        differentiated=pair.few.differentiated,
        parameters=sum(p.numel() for p in parameters),
        parameter_tensors=len(trained),
        parameter_bytes=bytes_of(parameters),
        gradient_bytes=bytes_of(trained),
        peaks=Peaks(forward, backward, again, max((p.numel() * p.element_size() for p in trained), default=0)),
        image_windows=image_windows(pair.examples, pair.few.windows, pair.many.windows),
        **sizes,
    )


def repeated(value: Any, times: int) -> Any:
    """So many times the examples of a tensor, or of each in a tuple or dict."""
    return map_tensors(lambda tensor: torch.cat([tensor] * times), value) if times > 1 else value


def dtype_of(layers: Sequence[nn.Module]) -> str:
    """The type of the first parameter that is a number with a fraction; float32 if there is none."""
    found = (p.dtype for layer in layers for p in layer.parameters() if p.is_floating_point())
    return str(next(found, torch.float32)).removeprefix("torch.")


def real(
    named: Sequence[tuple[str, nn.Module]], inputs: Inputs, contexts: Mapping[int, ForwardContext]
) -> list[LayerRun]:
    """Run the layers as they are."""
    modules = [module for _, module in named]
    device = device_of(modules)
    with undisturbed(modules, device):
        for module in modules:
            module.train()
        layers = [
            Runnable(
                name,
                module,
                [*module.parameters(), *module.buffers()],
                contexts[id(module)],
                takes_whole=isinstance(module, Loss),
            )
            for name, module in named
        ]
        return run(layers, tuple(each.to(device) for each in inputs), {})
