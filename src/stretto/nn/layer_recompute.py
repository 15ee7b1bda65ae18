"""Layers that keep their inputs only: what their backward needs is computed again when the backward comes.

`recompute="full"` does so for every layer of a stage, `"selective"` for the modules that are marked: `MARK = True` on a
class or an instance. The graph is the one of plain training; only what it saves is dropped, and made again by a second
forward on the same inputs, weights, buffers and random numbers. So gradients are the same to the last bit (Chen et al.
2016, arXiv 1604.06174; selective: Korthikanti et al. 2022, arXiv 2205.05198).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from stretto.errors import UsageError
from stretto.nn.carried_attributes import CarriedAttributes, exchanged_attributes
from stretto.nn.deferred import RemoteStage
from stretto.nn.devices import CPU, forked_generators, generators
from stretto.nn.preserve import replaced_forward, unique
from stretto.nn.shapes import summary

RECOMPUTE = ("none", "selective", "full")
MARK = "recompute_selectively"


def marked(module: nn.Module) -> list[nn.Module]:
    if getattr(module, MARK, False):
        return [module]
    return [found for child in module.children() for found in marked(child)]


def layers_of(stage: nn.Module) -> list[nn.Module]:
    """The layers of a stage: the members of an nn.Sequential, the modules that a traced stage calls; else itself."""
    if isinstance(stage, fx.GraphModule):
        called = [str(node.target) for node in stage.graph.nodes if node.op == "call_module"]
        return [stage.get_submodule(name) for name in dict.fromkeys(called)]
    return list(dict.fromkeys(stage.children())) if isinstance(stage, nn.Sequential) else [stage]


def recomputed(stage: nn.Module, how: str) -> list[nn.Module]:
    return {"none": lambda _: [], "selective": marked, "full": layers_of}[how](stage)


def check_marked(stages: Sequence[nn.Module], how: str) -> None:
    """Raise UsageError for selective recomputation of stages none of which has a marked module, all being known."""
    if how == "selective" and not any(isinstance(stage, RemoteStage) or marked(stage) for stage in stages):
        raise UsageError(
            f"recompute='selective': no module of these stages is marked by {MARK} = True, so that there is nothing to "
            "recompute: mark what takes memory and is cheap to compute again, such as the scores, softmax, dropout and "
            "values of an attention in a module of its own; or choose recompute='full', or leave it out"
        )


class Recomputing:
    """`with Recomputing(modules)()`: forwards of these modules keep their inputs only, where gradients are wanted.

    With `records`, `kept` are the tensors that forwards hold for their backwards.
    """

    def __init__(self, modules: Sequence[nn.Module], *, records: bool = False) -> None:
        self._bodies = [Body(module) for module in modules]
        self.kept: list[Tensor] = []
        self._record: Callable[[list[Tensor]], None] | None = self.kept.extend if records else None

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose activations are recomputed in the backward."""
        return [body.module for body in self._bodies]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with ExitStack() as stack:
            for body in self._bodies:
                stack.enter_context(exchanged_forward(body, self._record))
            yield


@contextmanager
def exchanged_forward(body: "Body", record: Callable[[list[Tensor]], None] | None) -> Iterator[None]:
    """In this block the module's forward, without its hooks, is one that keeps its inputs only, which it records."""
    body.original = body.module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return body(*args, **kwargs)
        region = Region(body, args, kwargs)
        if record is not None:
            record(region.inputs)
        return region.run()

    with replaced_forward(body.module, forward):
        yield


class Body(nn.Module):
    """A module without its hooks: its forward, on any parameters and buffers."""

    original: Callable[..., Any]

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.carried = CarriedAttributes(unique([module]))
        first = next((layer for layer in module.modules() if not any(True for _ in layer.children())), module)
        self._copies = bool(getattr(first, "inplace", False))  # its first layer overwrites its input

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._copies:
            args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
        return self.original(*args, **kwargs)


class Region:
    """One forward of a module whose backward runs it again; its methods are saved-tensor hooks.

    Inputs and weights are kept as they are. Everything else that the graph saves is counted and dropped, and known by
    its number when a backward asks for it.
    """

    def __init__(self, body: Body, args: Any, kwargs: Any) -> None:
        self._body, self._original, self._args, self._kwargs = body, body.original, args, kwargs
        self.inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._weights = dict(body.named_parameters(remove_duplicate=False))
        self._tables = dict(body.named_buffers(remove_duplicate=False))
        self._statistics = {name: x.detach().clone() for name, x in statistics(body)}  # as this forward finds them
        self._carried = body.carried.snapshot()
        device = next((tensor.device for tensor in self.inputs), CPU)
        self._device = CPU if device.type == "meta" else device
        self._states = [generator.get_state() for generator in generators(self._device)]
        kind = self._device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        kept = (storage(tensor) for tensor in (*self.inputs, *self._weights.values()))
        self._known = {place for place in kept if place is not None}
        self._number = 0
        self._made: dict[int, Tensor] = {}

    @property
    def trains(self) -> bool:
        """Whether the module has weights of its own to train."""
        return any(weight.requires_grad for weight in self._weights.values())

    def run(self) -> Any:
        """The first forward. Raises UsageError for a module that changes its input in place."""
        before = [tensor._version for tensor in self.inputs]
        weights = {name: weight._version for name, weight in self._weights.items()}
        with saved_tensors_hooks(self.pack, self.unpack):
            output = self._body(*self._args, **self._kwargs)
        if before != [tensor._version for tensor in self.inputs]:
            raise UsageError(
                f"{summary(self._body.module)} changes its input in place, which its backward would need again: begin "
                "it with an operation that does not work in place, or leave recompute= out"
            )
        refuse_changed_weights(summary(self._body.module), self._weights, weights)
        return output

    def pack(self, tensor: Tensor) -> Tensor | int:
        """What the graph keeps of a tensor that it saves: the tensor itself, or its number."""
        if storage(tensor) in self._known:
            return tensor.detach()
        self._number += 1
        return self._number - 1

    def unpack(self, saved: Tensor | int) -> Tensor:
        """The tensor of a number, once; a second backward of the same graph computes it again."""
        if isinstance(saved, Tensor):
            return saved
        if saved not in self._made:
            self._made = self._again()
        return self._made.pop(saved)

    def _again(self) -> dict[int, Tensor]:
        """All numbered tensors, by a second forward."""
        made: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> None:
            if storage(tensor) not in self._known:
                made[len(made)] = tensor.detach()

        def leaf(value: Any) -> Any:
            return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

        args, kwargs = tree_map(leaf, (self._args, self._kwargs))
        own = self._weights | self._tables | {name: buffer.clone() for name, buffer in self._statistics.items()}
        enabled, dtype = self._autocast
        self._body.original = self._original
        with (
            forked_generators(self._device),
            torch.enable_grad(),
            torch.autocast(self._device.type, dtype=dtype, enabled=enabled, cache_enabled=False),
            saved_tensors_hooks(pack, unasked),
        ):
            for generator, state in zip(generators(self._device), self._states, strict=True):
                generator.set_state(state)
            with exchanged_attributes(self._carried):
                functional_call(self._body, own, args, kwargs)
        if len(made) != self._number:
            raise UsageError(
                f"{summary(self._body.module)} saved {self._number} tensors for its backward, and {len(made)} when it "
                "ran again: what is recomputed has to do the same in each call; leave recompute= out"
            )
        return made


def refuse_changed_weights(title: str, weights: Mapping[str, Tensor], versions: Mapping[str, int]) -> None:
    """Raise UsageError for weights that a forward has written to; `versions` are those from before it."""
    changed = [name for name, weight in weights.items() if weight._version != versions[name]]
    if changed:
        raise UsageError(
            f"the forward of {title} changes its parameter {changed[0].removeprefix('module.')} in place, and would do "
            "so twice where it is computed again: keep what moves in buffers, or leave recompute= out"
        )


def statistics(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a forward may change, by name: those of the state; others are tables, such as masks."""
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


def unasked(_: Any) -> Tensor:
    """The unpack hook of a graph that has no backward."""
    raise AssertionError("a second forward has no backward of its own")


def storage(tensor: Tensor) -> int | None:
    """Which memory a tensor lies in; None for one whose storage cannot be told."""
    try:
        with torch._C.DisableTorchFunctionSubclass():  # a part of an image answers as a tensor
            return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return None
