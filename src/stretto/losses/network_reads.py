"""Losses that read what forwards leave on modules of the network, beside its output: refused in pipelines.

`aux_loss` of a mixture of experts, features that a hook puts into a dict. A plain loop has them of the batch that the
loss is of. A pipeline may have run other micro-batches since, without a graph, or in another process.
"""

import dis
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.losses.value import MeanOfStage, MeanOverExamples
from stretto.nn.carried_attributes import CONTAINERS
from stretto.nn.hooks import of_torch
from stretto.options.object_digest import file_of, is_installed, methods_of_forward, names_in

FILLS = {"append", "appendleft", "extend", "insert", "add", "update", "setdefault"}
MOST, FIRST = 10_000, 1_000  # objects that are looked at, in all and of one container


class SeenObjects:
    """What a function sees: modules, containers and code, by its closure, defaults, globals, and object."""

    def __init__(self, function: Any, network: set[nn.Module]) -> None:
        self.modules: set[nn.Module] = set()  # of the network
        self.others: list[nn.Module] = []
        self.containers: dict[int, Any] = {}
        self.codes: list[CodeType] = []
        self._network, self._seen = network, set[int]()
        self._kept: list[Any] = []
        pending = [function]
        while pending and len(self._seen) < MOST:
            value = pending.pop()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._kept.append(value)  # no other object may get its id
                with suppress(ReferenceError):  # a weak proxy of what is no more
                    pending += self._parts(value)

    def _parts(self, value: Any) -> Iterable[Any]:
        if isinstance(value, FunctionType):
            return self._of_function(value)
        if isinstance(value, MethodType):
            return value.__func__, value.__self__
        if isinstance(value, functools.partial):
            return value.func, *value.args, *value.keywords.values()
        if issubclass(type(value), nn.Module) and value in self._network:  # a weak proxy only says that it is one
            self.modules.add(value)
            return ()
        if isinstance(value, (*CONTAINERS, tuple)):
            if not isinstance(value, tuple):
                self.containers[id(value)] = value
            return islice(value.values() if isinstance(value, dict) else value, FIRST)
        if isinstance(value, type | ModuleType | Tensor) or not hasattr(value, "__dict__") or not is_own(type(value)):
            return ()
        is_module = issubclass(type(value), nn.Module)
        if is_module:
            self.others.append(value)
        call = getattr(type(value), "forward" if is_module else "__call__", None)
        return (*vars(value).values(), *([call] if isinstance(call, FunctionType) else []))

    def _of_function(self, function: FunctionType) -> Iterator[Any]:
        if not is_own(function):
            return
        self.codes.append(function.__code__)
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a name that has no value yet
                continue
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        around = function.__globals__
        yield from (around[name] for name in names_in(function.__code__) if name in around)

    def names(self) -> set[str]:
        """The attributes that its code reads, by name; with those that methods of the modules it sees read."""
        kinds = {type(part) for module in self.modules for part in module.modules()} | set(map(type, self.others))
        known, pending = set[str](), list(self.codes)
        while pending:
            code = pending.pop()
            for name in (names_in(code) | texts_in(code)) - known:
                known.add(name)
                for kind in kinds:
                    method = getattr(kind, name, None)
                    if isinstance(method, FunctionType) and is_own(method) and name != "forward":
                        pending.append(method.__code__)
        return known


def is_own(thing: Any) -> bool:
    """Whether a function or class is the user's, and of no package that is installed."""
    if of_torch(thing) or str(thing.__module__) in sys.stdlib_module_names:
        return False
    file = file_of(thing)
    return file is None or not is_installed(file)


def texts_in(code: CodeType) -> set[str]:
    """The texts among the constants of code: names that getattr is given."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {each for each in code.co_consts if isinstance(each, str)}.union(*map(texts_in, inner))


def stored_in_forward(kind: type[nn.Module]) -> set[str]:
    """The attributes that a forward, or a method that it names, assigns."""
    codes = [method.__code__ for method in methods_of_forward(kind, lambda method: not of_torch(method))]
    return {one.argval for code in codes for one in dis.get_instructions(code) if one.opname == "STORE_ATTR"}


def fills(code: CodeType) -> bool:
    """Whether code may put something into a container."""
    return bool(FILLS & names_in(code)) or any(one.opname == "STORE_SUBSCR" for one in dis.get_instructions(code))


def network_of(given: object) -> Iterator[tuple[str, nn.Module]]:
    """The modules of what a Trainer is given as stages, and of the model that they were cut from, by name."""
    model = getattr(given, "model", None)  # of splitting.Stages
    if isinstance(model, nn.Module):
        yield from ((f"{type(model).__name__}.{path}".rstrip("."), module) for path, module in model.named_modules())
    for index, stage in enumerate(given if isinstance(given, Iterable) else ()):
        if isinstance(stage, nn.Module):
            yield from ((f"stage {index}.{path}".rstrip("."), module) for path, module in stage.named_modules())


def refuse_network_reads(
    loss: Callable[..., Any], named: Iterable[tuple[str, nn.Module]], title: str = "the loss"
) -> None:
    """Raise UsageError for a loss that reads what forwards or hooks of these modules, by name, leave."""
    while isinstance(loss, MeanOverExamples):
        loss = loss.loss
    if isinstance(loss, MeanOfStage) or of_torch(loss):
        return
    paths: dict[nn.Module, str] = {}
    for path, module in named:
        paths.setdefault(module, path)
    network = set(paths)
    of_loss = SeenObjects(loss, network)
    if of_loss.modules:
        names, parts = of_loss.names(), {part for module in of_loss.modules for part in module.modules()}
        for module in sorted(parts & network, key=lambda module: paths[module]):
            if read := stored_in_forward(type(module)) & names:
                raise UsageError(f"{title} reads {paths[module]}.{min(read)}, which forwards assign: {REMEDY}")
    if of_loss.containers:
        for module, path in paths.items():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for hook in hooks.values():
                    seen = SeenObjects(hook, network)
                    if any(map(fills, seen.codes)) and seen.containers.keys() & of_loss.containers.keys():
                        raise UsageError(
                            f"{title} reads what the hook {getattr(hook, '__qualname__', type(hook).__name__)} of "
                            f"{path} puts into a container: {REMEDY}"
                        )


REMEDY = (
    "in a pipeline that may be of another micro-batch, without its graph, or in another process. Return it as one more "
    "output of the model, from stage to stage, where the loss gets it"
)
