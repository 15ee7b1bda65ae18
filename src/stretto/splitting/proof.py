"""Proof that stages train as their model does: outputs, gradients, buffers and draws of random numbers on an example.

A recorded forward loses what no graph has: torch.no_grad, the backward of an autograd.Function, hooks of modules that
are called no more, decisions by random numbers or by attributes. So both run on the example, in training and in
evaluation, with all generators seeded alike, and every number that training depends on is compared.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stretto.errors import UsageError
from stretto.nn import deferred
from stretto.nn.carried_attributes import PLAIN, own_attributes
from stretto.nn.chain import Chain
from stretto.nn.hooks import of_torch, refuse_lost_hooks
from stretto.nn.nested import tensors_of
from stretto.nn.preserve import device_of, plain_attributes, unchanged, undisturbed, unique, without_fused_transformers
from stretto.options.object_digest import names_in
from stretto.splitting.cost import Inputs

RUNS = ((True, (0, 1)), (False, (0,)))  # training or evaluation, and the seeds of all generators for runs in a row
WHOLE = 65_536  # elements of a gradient up to which all are compared; of a larger one, as many at equal distances
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
NOISE = 1e-2  # what rounding may leave of a gradient that is zero, over the tolerance times the largest gradient


class Original(NamedTuple):
    """What stages have to do: `run` on the tensors of a batch, with the modules `roots`, called `title` in messages."""

    run: Callable[..., Any]
    roots: Sequence[nn.Module]
    title: str


@dataclass(frozen=True)
class Proof:
    """What was compared, as a line of text, how many forwards and backwards that took, and how many seconds."""

    text: str
    steps: int = 0
    seconds: float = 0.0


@dataclass
class ExampleRun:
    """What a run on the example came to."""

    outputs: tuple[Tensor, ...] = ()
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    attributes: dict[str, object] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    generators: dict[str, object] = field(default_factory=dict)
    functions: frozenset[str] = frozenset()


def prove(original: Original, stages: Sequence[nn.Module], inputs: Inputs | None, why: str) -> Proof:
    """Compare stages with the model on the example. `why` is the likely cause of a difference, and its remedy.

    Raises UsageError with the difference if the stages do not train as the model does.
    """
    for root in original.roots:
        refuse_lost_hooks(root, stages)
    if inputs is None:
        return Proof("unproved: without an example stages are not compared with the model")
    began, steps = time.perf_counter(), 0
    if deferred.placeholders([*original.roots, *stages]):
        compare_outputs(original, stages, inputs, why)
        return Proof("unproved: weights without values; shapes alone were compared")
    for training, seeds in RUNS:
        actual = attempted(partial(observe, Chain(*stages), original, stages, inputs, training, seeds))
        most = None if isinstance(actual, Exception) else len(actual[0].outputs) or None
        expected = attempted(partial(observe, original.run, original, stages, inputs, training, seeds, most))
        steps += 2 * len(seeds)
        mode = "training" if training else "evaluation"
        if isinstance(expected, Exception):
            if isinstance(actual, Exception):
                said = f"{type(expected).__name__}: {expected}".splitlines()[0]
                return Proof(f"unproved: the model fails on the example in {mode}: {said}", steps)
            raise UsageError(
                f"{original.title} fails on the example in {mode}, where its stages do not: "
                f"{type(expected).__name__}: {expected}"
            ) from expected
        if isinstance(actual, Exception):
            raise UsageError(
                f"the stages of {original.title} fail on the example in {mode}, where the model does not "
                f"({type(actual).__name__}: {actual}): {why}"
            ) from actual
        for number, (ours, theirs) in enumerate(zip(expected, actual, strict=True)):
            difference = first_difference(ours, theirs)
            if difference is None:
                continue
            again = observe(original.run, original, stages, inputs, training, seeds, most)
            if (varies := first_difference(ours, again[number])) is not None:
                difference = f"the model itself comes to other numbers when it is called again ({varies})"
            mode += " for the second time" * (number > 0)
            raise UsageError(
                f"the stages of {original.title} do not train as the model does: in {mode}, {difference}. "
                f"{cause(ours, theirs, expected[-1].carried, original.roots) or why[0].upper() + why[1:]}"
            )
    count = len(list(whole(original.roots).parameters()))
    text = (
        f"proved on the example: outputs, gradients of {count} parameters, buffers and random numbers are the model's, "
        "in training and in evaluation"
    )
    return Proof(text, steps, time.perf_counter() - began)


def attempted(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 (judged by the caller)
        return error


def observe(
    run: Callable[..., Any],
    original: Original,
    stages: Sequence[nn.Module],
    inputs: Inputs,
    training: bool,
    seeds: Sequence[int],
    most: int | None = None,
) -> list[ExampleRun]:
    """A forward and a backward for each seed, in a row: what one leaves in buffers and attributes the next one finds.

    Afterwards everything is as before. At most `most` outputs are looked at.
    """
    roots = [*original.roots, *stages]
    modules = dict(whole(original.roots).named_modules())
    lost = lost_modules(modules, stages) if run is original.run else {}
    frozen = frozen_modules(original.roots)
    with as_before(roots, whole(original.roots).parameters()):
        for module in unique(roots):
            module.training = training and id(module) not in frozen
        seen = []
        for seed in seeds:
            held = held_by(lost)
            seen.append(observe_once(run, original, inputs, seed, most))
        others = [partial(run, *map(other, inputs)) for other in (of_one_row, turned)]
        seen[-1].carried = tuple(following(others, lost, held, held_by(lost)))
    return seen


def observe_once(
    run: Callable[..., Any], original: Original, inputs: Inputs, seed: int, most: int | None
) -> ExampleRun:
    """One forward and one backward with all generators seeded."""
    modules = dict(whole(original.roots).named_modules())
    parameters = dict(whole(original.roots).named_parameters())
    seen, before = ExampleRun(), attributes_of(modules)
    for parameter in parameters.values():
        parameter.grad = None
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    seed_all(seed)
    with torch.enable_grad(), without_fused_transformers():
        outputs = tensors_in(run(*(x.clone() for x in leaves)))[:most]
        seen.outputs = tuple(output.detach().clone() for output in outputs)
        wanted = [output for output in outputs if output.requires_grad]
        seen.functions = own_functions(wanted)
        if wanted:
            torch.autograd.backward(wanted, [cotangent(output, i) for i, output in enumerate(wanted)])
    values = {**parameters, **{f"input {index}": leaf for index, leaf in enumerate(leaves) if leaf.requires_grad}}
    seen.gradients = {name: shortened(value.grad) for name, value in values.items()}
    seen.buffers = {
        f"{path}.{name}".lstrip("."): buffer.detach().clone()
        for path, module in modules.items()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    after = attributes_of(modules)
    seen.attributes = {name: after.get(name) for name in {**before, **after} if before.get(name) != after.get(name)}
    seen.generators = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": random.getstate(),
        "numpy.random": str(np.random.get_state()),
    }
    return seen


@contextmanager
def as_before(roots: Sequence[nn.Module], parameters: Any) -> Iterator[None]:
    """Afterwards modes, buffers, attributes, gradients, their hooks, and all generators are as before."""
    kept = [(p, p.grad, p._post_accumulate_grad_hooks or {}) for p in parameters]
    acting = [dict(hooks) for _, _, hooks in kept]  # an optimizer, perhaps
    modules = nn.ModuleList(unique(roots))
    try:
        with unchanged(modules), undisturbed(list(roots), device_of(roots)):
            for parameter, _, hooks in kept:
                parameter.grad = None
                hooks.clear()
            yield
    finally:
        for (parameter, gradient, hooks), former in zip(kept, acting, strict=True):
            parameter.grad = gradient
            hooks.update(former)


def seed_all(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def frozen_modules(roots: Sequence[nn.Module]) -> set[int]:
    """The ids of modules that are in evaluation while their model trains: they stay in it."""
    trains = any(root.training for root in roots)
    return {id(module) for module in unique(roots) if trains and not module.training}


def whole(roots: Sequence[nn.Module]) -> nn.Module:
    """A model, or a list of layers as one module, whose names begin with the layer."""
    return roots[0] if len(roots) == 1 else nn.ModuleList(roots)


def attributes_of(modules: Mapping[str, nn.Module]) -> dict[str, object]:
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in modules.items()
        for name, value in plain_attributes(module).items()
    }


def lost_modules(modules: Mapping[str, nn.Module], stages: Sequence[nn.Module]) -> dict[str, nn.Module]:
    called = {id(module) for module in unique(stages)}
    return {path: module for path, module in modules.items() if id(module) not in called}


class Held(NamedTuple):
    """The tensors and numbers in an attribute, and what tells whether they are still the same."""

    leaves: list[Any]
    marks: Sequence[object]


def held_by(modules: Mapping[str, nn.Module]) -> dict[str, Held]:
    """What modules hold in attributes that are no numbers: tensors, and numbers and tensors in containers."""
    found = {}
    for path, module in modules.items():
        for name, value in own_attributes(module).items():
            if not isinstance(value, PLAIN):
                leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, (Tensor, *PLAIN))]
                marks = [(id(leaf), leaf._version) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                found[f"{path}.{name}".lstrip(".")] = Held(leaves, marks)
    return found


def following(
    others: Sequence[Callable[[], Any]],
    modules: Mapping[str, nn.Module],
    before: Mapping[str, Held],
    now: Mapping[str, Held],
) -> Iterator[str]:
    """The names of attributes that a forward has changed, and changes otherwise for another batch: no mere cache.

    The first of the `others` that does not fail counts; where all fail, all that has changed.
    """
    changed = [name for name in now if name not in before or before[name].marks != now[name].marks]
    first = {
        name: [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in now[name].leaves]
        for name in changed
    }
    if changed:
        for again in others:
            if not isinstance(attempted(again), Exception):
                break
        else:
            yield from changed
            return
    second = held_by(modules)
    for name in changed:
        theirs = second[name].leaves if name in second else []
        if len(first[name]) != len(theirs) or not all(map(same_leaf, first[name], theirs)):
            yield name


def same_leaf(one: object, other: object) -> bool:
    """Whether two values in an attribute are equal; objects of unknown kinds are taken for equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return alike(one, other) and torch.equal(one, other)
    return not isinstance(one, PLAIN) or one == other


def of_one_row(x: Tensor) -> Tensor:
    """Another batch of the same shape: its first example in every row, halved where it is of numbers."""
    if not x.dim():
        return x
    row = x.detach()[:1].expand_as(x)
    return row / 2 if x.is_floating_point() else row.clone()


def turned(x: Tensor) -> Tensor:
    """Another batch of the same examples: in the opposite order."""
    return x.detach().flip(0) if x.dim() else x


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors in a forward's output, however nested."""
    if isinstance(output, Mapping):  # a Hugging Face ModelOutput may be unknown to torch
        output = list(output.values())
    found = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_of(leaf)
    return found


def cotangent(output: Tensor, index: int) -> Tensor:
    """A fixed random gradient for an output."""
    drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
    return drawn.to(output.device, output.dtype)


def own_functions(outputs: Sequence[Tensor]) -> frozenset[str]:
    """The names of the autograd.Functions, torch's own left out, that outputs come from."""
    pending: list[Any] = [output.grad_fn for output in outputs]
    known: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in known:
            known.add(node)
            pending += [source for source, _ in node.next_functions]
    kinds = {getattr(node, "_forward_cls", torch.Tensor) for node in known}
    return frozenset(kind.__name__ for kind in kinds if not of_torch(kind))


def shortened(gradient: Tensor | None) -> Tensor | None:
    """A gradient, or, of a large one, elements at equal distances and its norm."""
    if gradient is None or gradient.layout is not torch.strided or gradient.numel() <= WHOLE:
        return gradient
    some = gradient.flatten()[:: -(-gradient.numel() // WHOLE)]
    return torch.cat([some, torch.linalg.vector_norm(gradient).reshape(1)])


def first_difference(expected: ExampleRun, actual: ExampleRun) -> str | None:
    """What the stages come to that the model does not, None if they are alike."""
    if len(expected.outputs) != len(actual.outputs):
        return f"they give {len(actual.outputs)} tensors where the model gives {len(expected.outputs)}"
    for index, (ours, theirs) in enumerate(zip(expected.outputs, actual.outputs, strict=True)):
        if not alike(ours, theirs):
            return f"output {index} is {described(theirs)} where the model gives {described(ours)}"
        if not close(ours, theirs):
            return f"output {index} differs from the model's by {distance(ours, theirs)}"
    for name, value in expected.buffers.items():
        if not (alike(value, actual.buffers[name]) and close(value, actual.buffers[name])):
            return f"the buffer {name} differs afterwards by {distance(value, actual.buffers[name])}"
    for name, gradient in expected.gradients.items():
        other = actual.gradients[name]
        if gradient is None or other is None:
            if gradient is not other:
                here, there = ("no gradient", "one") if other is None else ("a gradient", "none")
                return f"{name} has {here}, in the model {there}"
            continue
        if alike(gradient, other) and close(gradient, other):
            continue
        floor = NOISE * max(largest(value) for value in expected.gradients.values() if value is not None)
        if not (alike(gradient, other) and close(gradient, other, floor)):
            return f"the gradient of {name} differs from the model's by {distance(gradient, other)}"
    for name in {**expected.attributes, **actual.attributes}:
        if expected.attributes.get(name) != actual.attributes.get(name):
            return f"the attribute {name} does not become {expected.attributes.get(name)!r}, as in the model"
    if expected.carried and expected.carried != actual.carried:
        return f"the attribute {expected.carried[0]} does not follow the batch, as in the model"
    drawn = drawn_otherwise(expected, actual)
    return f"they draw other random numbers from {drawn[0]}" if drawn else None


def cause(expected: ExampleRun, actual: ExampleRun, carried: Sequence[str], roots: Sequence[nn.Module]) -> str:
    """The construct of the forward that stages do not have, with a remedy; empty if none is known.

    carried: the attributes that follow the batch.
    """
    if expected.outputs and not actual.outputs:
        return "An object of a class of its own, which its forward returns, is not recorded: return tensors or a dict"
    if any("forward" in vars(root) for root in roots):
        return "Its forward was replaced on the object; that of its class is what is recorded: define it in the class"
    lost = sorted(expected.functions - actual.functions)
    apart = "in a module of its own, which is called as it is, or give split a list of layers"
    if lost:
        return f"The backward of {' and '.join(lost)}, an autograd.Function, is not recorded: call it {apart}"
    given = [name for name, value in actual.gradients.items() if value is not None]
    silent = [name for name in given if expected.gradients[name] is None]
    if silent:
        return (
            f"The model gives {', '.join(silent[:3])}{' ...' * (len(silent) > 3)} no gradient (torch.no_grad() or "
            f"set_grad_enabled in its forward?), which is not recorded: use requires_grad_(False), or detach(), or put "
            f"those calls {apart}"
        )
    drawn = drawn_otherwise(expected, actual)
    if drawn:
        return f"What its forward draws from {' and '.join(drawn)} would be the same at every step: draw it {apart}"
    kept = [*(name for name in expected.attributes if name not in actual.attributes), *carried]
    codes = [getattr(type(root).forward, "__code__", None) for root in roots if hasattr(type(root), "forward")]
    if any("autocast" in names_in(code) for code in codes if code is not None):
        return (
            "Its forward enters torch.autocast between its blocks, which is not recorded: give the Trainer "
            f"precision='bf16-autocast', or enter it {apart}"
        )
    if kept:
        return f"What its forward keeps in {', '.join(kept[:3])} would be lost: keep it {apart}"
    return ""


def drawn_otherwise(expected: ExampleRun, actual: ExampleRun) -> list[str]:
    """The generators that two runs leave in other states."""
    return [name for name, state in expected.generators.items() if state != actual.generators[name]]


def alike(expected: Tensor, actual: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and layout."""
    return (expected.shape, expected.dtype, expected.layout) == (actual.shape, actual.dtype, actual.layout)


def close(expected: Tensor, actual: Tensor, floor: float = 0.0) -> bool:
    """Whether two tensors are equal up to rounding, relative to the largest element, or to `floor` if that is more."""
    if expected.layout is not torch.strided:
        expected, actual = expected.to_dense(), actual.to_dense()
    if torch.equal(expected, actual):
        return True
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected, actual)
    tolerance = TOLERANCE.get(expected.dtype, 1e-2)
    return torch.allclose(
        expected, actual, rtol=tolerance, atol=tolerance * max(largest(expected), floor), equal_nan=True
    )


def largest(tensor: Tensor) -> float:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    finite = tensor.detach().abs()
    finite = finite[finite.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def distance(expected: Tensor, actual: Tensor) -> str:
    """How far apart two tensors are, for messages."""
    if not alike(expected, actual):
        return f"its kind: {described(actual)} instead of {described(expected)}"
    ours, theirs = (each.to_dense() if each.layout is not torch.strided else each for each in (expected, actual))
    return f"{largest(ours.double() - theirs.double()):.3g}, its largest element is {largest(ours):.3g}"


def described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def compare_outputs(original: Original, stages: Sequence[nn.Module], inputs: Inputs, why: str) -> None:
    """Raise UsageError unless stages give what the model gives in evaluation; without values of weights, the shapes."""
    roots = [*original.roots, *stages]
    outputs = []
    with torch.no_grad(), without_fused_transformers():
        for run in (original.run, Chain(*stages)):
            with undisturbed(roots, device_of(roots)), deferred.faked(roots) as valueless:
                seed_all(0)  # some modules draw random numbers in evaluation, too
                outputs.append(tensors_in(run(*inputs)))
    expected, actual = outputs
    agree = alike if valueless else lambda one, other: alike(one, other) and close(one, other)
    if len(expected) < len(actual) or not all(map(agree, expected, actual)):
        raise UsageError(f"the stages of {original.title} do not give what the model gives for the example: {why}")
