"""Will a backward read the weights themselves, or copies that its forward made of them?

Where weights change between a forward and its backward, a copy silently keeps the old values: bf16 autocast casts the
weight, `weight_norm` computes it, a compiled graph keeps what its compiler chose. `checked_call` follows the weights
through one forward and refuses such a module. It looks at the tensors that are computed and saved, not at the types of
layers: a weight that is added, multiplied, normalised with or looked up is saved as it is, and passes.

A copy of weights is computed from weights and constants only. A tensor that depends on the input is an activation,
which a backward must see as its forward left it. A copy matters only if a backward reads it.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.errors import UsageError
from stretto.nn.batch import call, with_names_of
from stretto.nn.layer_recompute import Region

# A private function of torch, with which weights change between a forward and its backward without an error.
# `tests/weights/test_guard.py` fails if it stops meaning that. Where it is missing, `Live` has the graph save weights
# by name instead, which needs no private function and costs a Python call for each tensor that a graph saves.
NAME = "_unsafe_preserve_version_counter"


def can_hide_changes() -> bool:
    """Whether this torch has the function that `unnoticed` needs."""
    return hasattr(torch.autograd, NAME)


def unnoticed(parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
    """A context in which in-place changes of `parameters` leave their version counters as they are.

    A backward through a graph that saved the parameters then reads the changed values and raises no error. Sound only
    where the graph saved the parameters themselves, which `check.checked_call` makes sure of: a copy made in the
    forward (autocast, weight_norm) would keep the old values.
    """
    context: AbstractContextManager[None] = getattr(torch.autograd, NAME)(tuple(parameters))
    return context


def innermost_hook() -> Callable[[Any], Any] | None:
    """The pack function of the innermost `saved_tensors_hooks` in effect; None without one, or if torch cannot tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = top(False) if top is not None else None
    return hooks[0] if hooks is not None else None


class Origin(IntEnum):
    """What a tensor was computed from: of several operands, the highest value counts."""

    CONSTANT = 0
    ZEROS = 1  # such as the first state of a recurrence: its product with a weight is an activation
    WEIGHT = 2
    COPY = 3  # computed from weights and constants
    INPUT = 4


@dataclass
class Copy:
    """A tensor computed from weights: the operation, the name of the submodule, and the tensor's dtype."""

    operation: str
    module: str
    dtype: torch.dtype


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")
MAKES_ZEROS = ("zeros", "zeros_like", "new_zeros")
KEEPS_ZEROS = ("clone", "zero_")


@dataclass
class Origins:
    """The origin of each storage, by its address. A reused address gets a new origin when it is written."""

    kinds: dict[int, Origin] = field(default_factory=dict)
    copies: dict[int, Copy] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> Origin:
        return self.kinds.get(storage_address(tensor), Origin.CONSTANT)

    def record(self, operation: str, operands: list[Tensor], results: list[Tensor], module: str) -> None:
        """Record the origins of an operation's results; `module` names the submodule that ran it."""
        kinds = [self.of(tensor) for tensor in operands]
        addresses = {storage_address(tensor) for tensor in operands}
        highest = max(kinds, default=Origin.CONSTANT)
        if operation in MAKES_ZEROS and highest == Origin.CONSTANT:
            highest = Origin.ZEROS
        elif operation in PRODUCTS and Origin.ZEROS in kinds:
            highest = Origin.INPUT
        elif highest == Origin.WEIGHT:
            highest = Origin.COPY
        for index, tensor in enumerate(results):
            address = storage_address(tensor)
            still_zeros = address in addresses or operation in (*MAKES_ZEROS, *KEEPS_ZEROS)
            kind = Origin.CONSTANT if highest == Origin.ZEROS and not still_zeros else highest
            if operation == "_cudnn_rnn" and index == 4:  # the buffer into which cuDNN packs weights
                kind = Origin.COPY
            if self.kinds.get(address) != Origin.WEIGHT and address:
                self.kinds[address] = kind
                if kind == Origin.COPY and not (address in addresses and address in self.copies):
                    self.copies[address] = Copy(operation, module, tensor.dtype)


def storage_address(tensor: Tensor) -> int:
    """The address of a tensor's storage, the same for all its views; 0 if the tensor is not strided."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


STASH = "choose a method with weights='stash', such as pb(stash=True) or pipedream"
CAST = f"keep its weights in that dtype with float32 masters instead of autocast, or {STASH}"
REFUSED = "the backward would not see the weights it should, because"
COMPILED = "it is compiled, and a compiled graph may keep copies of weights", f"leave it uncompiled, or {STASH}"
RECOMPUTED = "a part of it is recomputed in the backward, with other weights (checkpoint)", "take the checkpoint out"
Objection = tuple[str, str]  # a reason, a remedy
HOOKED = "what it saves for the backward goes through saved_tensors_hooks, which may copy it", STASH


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the weights through the operations of a forward, and checks each tensor that the graph saves."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Any],
        hook: Callable[[Any], Any] | None,
        objections: dict[str, Objection] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.origins = Origins()
        self.submodules = [""]  # the stack of submodules being called, by name
        self.read: set[int] = set()  # storage addresses of the weights that the backward will read
        self.names = {storage_address(p): name for name, p in module.named_parameters() if p.requires_grad}
        self.origins.kinds.update((storage_address(tensor), Origin.INPUT) for tensor in tensors_in(inputs))
        self.origins.kinds.update((address, Origin.WEIGHT) for address in self.names)
        self._module = module
        self._hook = hook
        self._objections = objections

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record which tensors its results were computed from."""
        self._refuse_detours()
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = list(tensors_in([args, *kwargs.values()]))
        self.origins.record(func.overloadpacket.__name__, operands, list(tensors_in([result])), self.submodules[-1])
        return result

    def saved(self, tensor: Tensor) -> None:
        """Note that the graph saves `tensor` for the backward. Raises UsageError if it is a copy of weights."""
        kind = self.origins.of(tensor)
        if kind == Origin.WEIGHT:
            self.read.add(storage_address(tensor))
        elif kind == Origin.COPY:
            copy = self.origins.copies[storage_address(tensor)]
            owner = copy.module.partition("parametrizations")
            self.refuse(owner[0].rstrip(".") if owner[1] else self.submodules[-1], *explain(copy))

    def refuse(self, name: str, reason: str, remedy: str) -> None:
        """Raise UsageError for a submodule; where objections are collected, keep its first one and go on."""
        if self._objections is None:
            refuse(name, self._module, reason, remedy)
        self._objections.setdefault(name, (reason, remedy))

    def _refuse_detours(self) -> None:
        hook = innermost_hook()
        if hook is not None and is_checkpoint(hook):
            self.refuse(self.submodules[-1], *RECOMPUTED)
        region = getattr(hook, "__self__", None)
        if isinstance(region, Region):
            if region.trains:
                self.refuse(self.submodules[-1], *RECOMPUTED)
        elif hook not in (self._hook, None):
            self.refuse(self.submodules[-1], *HOOKED)
        if inside_compiled():
            self.refuse(self.submodules[-1], *COMPILED)


def explain(copy: Copy) -> tuple[str, str]:
    """The reason for a copy, as far as its operation tells, and the remedy."""
    if copy.operation == "_to_copy":
        dtype = str(copy.dtype).removeprefix("torch.")
        return f"its weight is cast to {dtype} in the forward (autocast?)", CAST
    if "parametrizations" in copy.module.split(".") or copy.operation == "_weight_norm_interface":
        return "its weight is computed in the forward (a parametrization, weight_norm)", f"remove it, or {STASH}"
    if copy.operation == "_cudnn_rnn":
        return "cuDNN packs its weights into a buffer in the forward", f"call flatten_parameters() on it, or {STASH}"
    return (
        f"its weight is a copy, computed by {copy.operation!r} in the forward",
        f"use the weight as it is, or {STASH}",
    )


def refuse(name: str, module: nn.Module, reason: str, remedy: str) -> NoReturn:
    """Raise UsageError: the weights of submodule `name` cannot change between its forward and its backward."""
    kind = type(dict(module.named_modules())[name]).__name__  # a ScriptModule has no get_submodule
    raise UsageError(f"{name or 'the stage'} ({kind}): {REFUSED} {reason}; {remedy}")


def checked_call(
    module: nn.Module,
    inputs: Sequence[Any],
    pack: Callable[[Tensor], Any] | None = None,
    unpack: Callable[[Any], Tensor] | None = None,
) -> Any:
    """Call the module and return its output. Raises UsageError unless its backward reads the weights themselves.

    `pack` and `unpack` are those of `saved_tensors_hooks`. Exactly one forward is run, so running statistics and random
    number generators end as after a plain forward.
    """
    return watched_call(module, inputs, pack, unpack)[0]


def watched_call(
    module: nn.Module,
    inputs: Sequence[Any],
    pack: Callable[[Tensor], Any] | None = None,
    unpack: Callable[[Any], Tensor] | None = None,
    objections: dict[str, Objection] | None = None,
) -> tuple[Any, list[str]]:
    """As `checked_call`, and the names of the weights that the backward will read.

    With a dictionary `objections` no submodule is refused: it receives the first objection to each, by name.
    """
    torch.clear_autocast_cache()  # else a weight cast before this call would look like a constant

    def save(tensor: Tensor) -> Any:
        watch.saved(tensor)
        return tensor if pack is None else pack(tensor)

    watch = Watch(module, inputs, save, objections)
    with ExitStack() as stack:
        for name, submodule in module.named_modules():
            if is_compiled(submodule):
                watch.refuse(name, *COMPILED)
            if not isinstance(submodule, torch.jit.ScriptModule):
                stack.enter_context(track_submodule(watch, name, submodule))
        stack.enter_context(saved_tensors_hooks(save, unpack if unpack is not None else lambda tensor: tensor))
        stack.enter_context(watch)
        output = call(module, inputs)
    for detour in detours(output):
        watch.refuse("", *detour)
    return output, [watch.names[address] for address in watch.read]


def track_submodule(watch: Watch, name: str, submodule: nn.Module) -> AbstractContextManager[object]:
    """Inside this context `watch.submodules` ends in `name` whenever the submodule is being called."""

    def enter(*_: Any) -> None:
        watch.submodules.append(name)

    def leave(*_: Any) -> None:
        watch.submodules.pop()

    stack = ExitStack()
    stack.callback(submodule.register_forward_pre_hook(enter).remove)
    stack.callback(submodule.register_forward_hook(leave).remove)
    return stack


def detours(output: Any) -> Iterator[Objection]:
    """An objection for each compiled function and checkpoint in the graph of `output`."""
    for node in graph_nodes(output):
        kind = node.name()
        if "CompiledFunction" in kind or "DifferentiableGraph" in kind:
            yield COMPILED
        if "CheckpointFunction" in kind:
            yield RECOMPUTED


def inside_compiled() -> bool:
    """Whether a compiled function is on the call stack: under a dispatch mode it runs uncompiled."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and "_dynamo" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def is_checkpoint(hook: Callable[[Any], Any]) -> bool:
    """Whether the saved-tensors hook `hook` is one of torch.utils.checkpoint."""
    return getattr(hook, "__module__", "") == "torch.utils.checkpoint"


def call_refusing_checkpoints(module: nn.Module, call: Callable[[], Any]) -> Any:
    """The output of `call`, a forward of the module on other tensors than its parameters.

    Raises UsageError if a checkpoint is part of it: its recompute in the backward would run on the parameters.
    """

    def refuse_checkpoint(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            hook = innermost_hook()
            if hook is not None and is_checkpoint(hook):
                refuse("", module, *RECOMPUTED)

    with ExitStack() as stack:
        for submodule in uncompiled(module):
            stack.callback(submodule.register_forward_pre_hook(refuse_checkpoint).remove)
        output = call()
    if any("CheckpointFunction" in node.name() for node in graph_nodes(output)):
        refuse("", module, *RECOMPUTED)
    return output


def uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    """The module and its submodules, without compiled ones and their submodules."""
    if not is_compiled(module):
        yield module
        for child in module.children():
            yield from uncompiled(child)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled by torch.compile or TorchScript."""
    compiled = type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
    return compiled or isinstance(module, torch.jit.ScriptModule)


def graph_nodes(output: Any) -> Iterator[Any]:
    pending = [tensor.grad_fn for tensor in tensors_in([output])]
    seen = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [next_node for next_node, _ in node.next_functions]


def forward_conditions(module: nn.Module, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The mode, dtypes, devices and autocast settings of a forward. Where they differ it may run other operations.

    A forward under new conditions has to be checked again (`checked_call`).
    """
    conditions: list[Any] = []
    casts: dict[str, torch.dtype | None] = {}
    for value in inputs:
        if isinstance(value, Tensor):
            device = value.device.type
            conditions += (device, value.dtype, value.requires_grad)
            if device not in casts:
                casts[device] = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        else:
            conditions.append(None)
    return module.training, torch.is_grad_enabled(), *conditions, *casts.values()


def backward_reads(module: nn.Module, inputs: Sequence[Any], name: str) -> bool:
    """Whether gradients differ once the weight `name` has been changed in place after the forward."""
    weight = module.get_parameter(name)
    detached = [value.detach().clone() if isinstance(value, Tensor) else value for value in inputs]
    leaves: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    leaves += [value.requires_grad_() for value in detached if isinstance(value, Tensor) and value.is_floating_point()]
    copies = [value.clone() if isinstance(value, Tensor) else value for value in detached]  # it may work in place
    outputs = [tensor for tensor in tensors_in([call(module, with_names_of(inputs, copies))]) if tensor.requires_grad]
    cotangents = [torch.randn_like(tensor) for tensor in outputs]

    def gradients() -> list[Tensor]:
        computed = torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True, allow_unused=True)
        return [gradient for gradient in computed if gradient is not None]

    before, values = gradients(), weight.detach().clone()
    with torch.no_grad(), unnoticed([weight]):
        weight.add_(torch.randn_like(weight))
    try:
        after = gradients()
    finally:
        with torch.no_grad(), unnoticed([weight]):
            weight.copy_(values)
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
