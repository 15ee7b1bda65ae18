"""Will a backward read the weights themselves, or copies that its forward made of them?

Where weights change between a forward and its backward, a copy is silently read as it was: bf16 autocast casts the
weight, `weight_norm` computes it, a compiled graph keeps what its compiler chose. `run` follows the weights through one
forward and refuses such a module. It looks at what is computed and saved, not at the kinds of layers: a weight that is
added, multiplied, normalised with or looked up is saved as it is, and passes.

A copy of weights is told from an activation by what it was computed from: weights and constants only. Whatever anything
of the input went into is an activation, which a backward must see as its forward left it. A copy matters only if a
backward reads it.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.errors import UsageError
from stretto.nn.batch import call
from stretto.weights import guard
from stretto.weights.origins import Copy, Origin, Origins, place, tensors_in

STASH = "choose a method with weights='stash', such as pb(stash=True) or pipedream"
CAST = f"keep its weights in that dtype with float32 masters instead of autocast, or {STASH}"
REFUSED = "the backward would not see the weights it should, because"
COMPILED = "it is compiled, and a compiled graph may keep copies of weights", f"leave it uncompiled, or {STASH}"
RECOMPUTED = "a part of it is recomputed in the backward, with other weights (checkpoint)", "take the checkpoint out"
Objection = tuple[str, str]  # a reason, a remedy
HOOKED = "what it saves for the backward goes through saved_tensors_hooks, which may copy it", STASH


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the weights through the operations of a forward, and looks at each tensor that a graph saves."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Any],
        hook: Callable[[Any], Any] | None,
        objections: dict[str, Objection] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.origins = Origins()
        self.inside = [""]  # the submodules that are being run
        self.read: set[int] = set()  # the storages of weights that the backward will read
        self.names = {place(p): name for name, p in module.named_parameters() if p.requires_grad}
        self.origins.kinds.update((place(tensor), Origin.INPUT) for tensor in tensors_in(inputs))
        self.origins.kinds.update((where, Origin.WEIGHT) for where in self.names)
        self._module = module
        self._hook = hook
        self._objections = objections

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note what came out of what."""
        self._refuse_detours()
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        given = list(tensors_in([args, *kwargs.values()]))
        self.origins.record(func.overloadpacket.__name__, given, list(tensors_in([made])), self.inside[-1])
        return made

    def saved(self, tensor: Tensor) -> None:
        """A graph saves `tensor` for its backward. Raises UsageError if it is a copy of weights."""
        kind = self.origins.of(tensor)
        if kind == Origin.WEIGHT:
            self.read.add(place(tensor))
        elif kind == Origin.COPY:
            copy = self.origins.copies[place(tensor)]
            owner = copy.module.partition("parametrizations")
            self.refuse(owner[0].rstrip(".") if owner[1] else self.inside[-1], *explain(copy))

    def refuse(self, name: str, reason: str, remedy: str) -> None:
        """Raise UsageError for a submodule; where objections are collected, note the first one to it and go on."""
        if self._objections is None:
            refuse(name, self._module, reason, remedy)
        self._objections.setdefault(name, (reason, remedy))

    def _refuse_detours(self) -> None:
        hook = guard.innermost_hook()
        if hook is not None and is_checkpoint(hook):
            self.refuse(self.inside[-1], *RECOMPUTED)
        if hook not in (self._hook, None):
            self.refuse(self.inside[-1], *HOOKED)
        if inside_compiled():
            self.refuse(self.inside[-1], *COMPILED)


def explain(copy: Copy) -> tuple[str, str]:
    """Why a copy was made, as far as its operation tells, and what to do about it."""
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
    """Raise UsageError: the submodule of that name cannot have other weights in its backward."""
    kind = type(dict(module.named_modules())[name]).__name__  # a ScriptModule has no get_submodule
    raise UsageError(f"{name or 'the stage'} ({kind}): {REFUSED} {reason}; {remedy}")


def run(
    module: nn.Module,
    inputs: Sequence[Any],
    pack: Callable[[Tensor], Any] | None = None,
    unpack: Callable[[Any], Tensor] | None = None,
) -> Any:
    """The module's output, once it is sure that the backward reads the weights themselves. Raises UsageError else.

    `pack` and `unpack` are what the graph is to save and how it gets it back, as for `saved_tensors_hooks`. Not more
    than one forward is run, so norms and random numbers are where a plain forward leaves them.
    """
    return watched(module, inputs, pack, unpack)[0]


def watched(
    module: nn.Module,
    inputs: Sequence[Any],
    pack: Callable[[Tensor], Any] | None = None,
    unpack: Callable[[Any], Tensor] | None = None,
    objections: dict[str, Objection] | None = None,
) -> tuple[Any, list[str]]:
    """As `run`; and the names of the weights that the backward will read.

    Where a dictionary is given for `objections`, no module is refused: it gets the first objection to each, by name.
    """
    torch.clear_autocast_cache()  # a cast of before would come from nowhere

    def save(tensor: Tensor) -> Any:
        watch.saved(tensor)
        return tensor if pack is None else pack(tensor)

    watch = Watch(module, inputs, save, objections)
    with ExitStack() as stack:
        for name, part in module.named_modules():
            if is_compiled(part):
                watch.refuse(name, *COMPILED)
            if not isinstance(part, torch.jit.ScriptModule):
                stack.enter_context(inside(watch, name, part))
        stack.enter_context(saved_tensors_hooks(save, unpack if unpack is not None else lambda kept: kept))
        stack.enter_context(watch)
        output = call(module, inputs)
    for detour in detours(output):
        watch.refuse("", *detour)
    return output, [watch.names[where] for where in watch.read]


def inside(watch: Watch, name: str, part: nn.Module) -> AbstractContextManager[object]:
    """While it lasts, `watch.inside` ends in the submodule's name whenever that runs."""

    def enter(*_: Any) -> None:
        watch.inside.append(name)

    def leave(*_: Any) -> None:
        watch.inside.pop()

    stack = ExitStack()
    stack.callback(part.register_forward_pre_hook(enter).remove)
    stack.callback(part.register_forward_hook(leave).remove)
    return stack


def detours(output: Any) -> Iterator[Objection]:
    """Compiled functions and checkpoints that are part of the graph of `output`."""
    for node in nodes(output):
        kind = node.name()
        if "CompiledFunction" in kind or "DifferentiableGraph" in kind:
            yield COMPILED
        if "CheckpointFunction" in kind:
            yield RECOMPUTED


def inside_compiled() -> bool:
    """Whether the caller was called by a compiled function: while operations are watched, it runs uncompiled."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and "_dynamo" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def is_checkpoint(hook: Callable[[Any], Any]) -> bool:
    """Whether it is torch.utils.checkpoint that packs what autograd saves."""
    return getattr(hook, "__module__", "") == "torch.utils.checkpoint"


def unrecomputed(module: nn.Module, call: Callable[[], Any]) -> Any:
    """What `call`, a forward of the module on other tensors than its parameters, returns. Raises UsageError if a
    checkpoint is part of it: in the backward it would run on the parameters.
    """

    def look(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            hook = guard.innermost_hook()
            if hook is not None and is_checkpoint(hook):
                refuse("", module, *RECOMPUTED)

    with ExitStack() as stack:
        for part in uncompiled(module):
            stack.callback(part.register_forward_pre_hook(look).remove)
        output = call()
    if any("CheckpointFunction" in node.name() for node in nodes(output)):
        refuse("", module, *RECOMPUTED)
    return output


def uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    """The module and its submodules, without those that are compiled and what is in them."""
    if not is_compiled(module):
        yield module
        for child in module.children():
            yield from uncompiled(child)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile or TorchScript has taken a module over."""
    compiled = type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
    return compiled or isinstance(module, torch.jit.ScriptModule)


def nodes(output: Any) -> Iterator[Any]:
    """The nodes of the graph that ends in `output`, each once."""
    left = [tensor.grad_fn for tensor in tensors_in([output])]
    seen = set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [following for following, _ in node.next_functions]


def circumstances(module: nn.Module, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """What decides which operations a forward is made of, as far as one can tell: `run` anew where it differs."""
    kinds: list[Any] = []
    casts: dict[str, torch.dtype | None] = {}
    for value in inputs:
        if isinstance(value, Tensor):
            device = value.device.type
            kinds += (device, value.dtype, value.requires_grad)
            if device not in casts:
                casts[device] = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        else:
            kinds.append(None)
    return module.training, torch.is_grad_enabled(), *kinds, *casts.values()
