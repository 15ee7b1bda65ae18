"""torch.fx, with every module and every helper function that holds no block as one node."""

import dis
import inspect
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from stretto.nn.preserve import home, undisturbed
from stretto.splitting.cost import Inputs
from stretto.splitting.forward_arguments import ForwardCall
from stretto.splitting.fx.decisions import asking, decision_of, hold, settled

# What a comparison asks of its first operand, or of its second one with the sides changed.
COMPARISONS = {
    "<": ("lt", "gt"),
    "<=": ("le", "ge"),
    "==": ("eq",),
    "!=": ("ne",),
    ">": ("gt", "lt"),
    ">=": ("ge", "le"),
}


class BlockTracer(fx.Tracer):
    """Looks into the modules around the blocks only, so that everything else may do what it likes.

    With an example, what shapes and types decide is decided as the example has them, and held to that.
    """

    proxy_buffer_attributes = True

    def __init__(self, blocks: Mapping[str, nn.Module], call: ForwardCall, inputs: Inputs | None) -> None:
        super().__init__()
        self._blocks = {id(block): name for name, block in blocks.items()}
        self._call = call
        self._inputs = inputs
        self._values: dict[fx.Node, Any] = {}  # for the example, where it was asked for
        self._looking = False
        self._constants: dict[int, tuple[str, Any]] = {}
        self.outputs: tuple[str, ...] = ()  # names of the tensors in what the forward returns, where they have names

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """The graph of the root's forward."""
        self._known = {id(module) for module in root.modules()} | set(self._blocks)
        return super().trace(root, concrete_args)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Every module but those that hold a block."""
        return id(m) in self._blocks or not any(id(inner) in self._blocks for inner in m.modules())

    def path_of_module(self, mod: nn.Module) -> str:
        """A block's name, which a plain list does not give it; otherwise the registered one."""
        return self._blocks.get(id(mod)) or super().path_of_module(mod)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Placeholders for the inputs there are; Python gives the other arguments their defaults."""

        def run(root: nn.Module, *inputs: fx.Proxy) -> Any:
            return self._bare(self._call.run(partial(root_fn, root), inputs))

        return run, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in self._call.names)]

    def _bare(self, output: Any) -> Any:
        # Of a record with names (Hugging Face's ModelOutput) its tensors: one alone, several as a tuple.
        if not is_record(output):
            return output
        tensors = {str(name): value for name, value in output.items() if isinstance(value, fx.Proxy)}
        self.outputs = tuple(tensors)
        return next(iter(tensors.values())) if len(tensors) == 1 else tuple(tensors.values())

    def create_arg(self, a: Any) -> Any:
        """Objects that a graph does not know (configurations) are constants of the stages that need them."""
        if is_dataclass(a) and not isinstance(a, type) and not is_record(a):
            return self._constant(a)
        try:
            return super().create_arg(a)
        except NotImplementedError:
            return self._constant(a)

    def _constant(self, value: Any) -> fx.Node:
        if id(value) not in self._constants:
            name = self.get_fresh_qualname("_constant")
            setattr(self.root, name, value)
            self._constants[id(value)] = name, value
        return self.create_node("get_attr", self._constants[id(value)][0], (), {})

    # -- values of the example --------------------------------------------------------------------------------------

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record the call, but for one that only looks at what the example gives.

        A module that the forward makes for the moment, nn.ReLU()(x), is looked into: no stage could hold it.
        """
        if self._looking or id(m) not in self._known:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Record that a parameter or buffer is used, likewise."""
        return attr_val if self._looking else super().getattr(attr, attr_val, parameter_proxy_cache)

    def _settled(self, node: fx.Node) -> bool:
        return self._inputs is not None and settled(node)

    def _decide(self, proxy: fx.Proxy) -> bool | int:
        # What the example's shapes make of it; other batches are held to that.
        self._looking = True
        try:
            with undisturbed([self.root], home([self.root])), torch.no_grad():
                decided = decision_of(self._value(proxy.node))
        finally:
            self._looking = False
        self.create_proxy("call_function", hold, (proxy, decided, asking(inspect.currentframe())), {})
        return decided

    def _value(self, node: fx.Node) -> Any:
        assert self._inputs is not None
        if node not in self._values:
            args, kwargs = map_arg((node.args, node.kwargs), self._value)
            if node.op == "placeholder":
                value: Any = self._inputs[self._call.names.index(str(node.target))]
            elif node.op == "call_function":
                assert callable(node.target)
                value = node.target(*args, **kwargs)
            elif node.op == "call_method":
                value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                value = self.root
                for item in str(node.target).split("."):
                    value = getattr(value, item)
                value = value(*args, **kwargs) if node.op == "call_module" else value
            self._values[node] = value
        return self._values[node]

    # -- decisions --------------------------------------------------------------------------------------------------

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Shapes may be unpacked."""
        if not self._settled(obj.node):
            return super().iter(obj)
        length = self._decide(obj)
        return (self.create_proxy("call_function", operator.getitem, (obj, index), {}) for index in range(length))

    def to_bool(self, obj: fx.Proxy) -> bool:
        """An assertion becomes part of the graph, what shapes decide is held to; any other decision cannot be."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__") in (__name__, "torch.fx.proxy"):
            frame = frame.f_back
        asked = getattr(obj.node.target, "__name__", "")
        wanted = None if frame is None else asserted(frame.f_code, frame.f_lasti, asked)
        if wanted is None or frame is None:
            return bool(self._decide(obj)) if self._settled(obj.node) else super().to_bool(obj)
        held = obj if wanted else self.create_proxy("call_function", bool_not, (obj,), {})
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.create_proxy("call_function", torch._assert, (held, f"assertion at {where}"), {})
        return wanted


def is_record(value: object) -> bool:
    """Whether a value is a dict that is a dataclass, too, as Hugging Face's outputs are."""
    return isinstance(value, Mapping) and is_dataclass(value)


def bool_not(value: Any) -> bool:
    """`not value`, as a function a graph can call."""
    return not value


def asserted(code: CodeType, offset: int, asked: str) -> bool | None:
    """Which truth value an assert statement demands of the value that the instruction at `offset` tests; None if none.

    `asked` names the operation that made the value. From CPython 3.13 on a comparison tests its own result; one of
    tuples tests there, too, whether elements are equal, of which an assertion that tuples differ says nothing.
    """
    instructions = [each for each in dis.get_instructions(code) if each.opname not in ("EXTENDED_ARG", "NOP")]

    def at(offset: int) -> int:
        return bisect_left(instructions, offset, key=lambda instruction: instruction.offset)

    def fails(index: int) -> bool:  # a chained comparison first takes a value off the stack, or jumps
        instruction = instructions[index]
        if instruction.opname == "POP_TOP":
            return fails(index + 1)
        if instruction.opname == "JUMP_FORWARD":
            return fails(at(instruction.argval))
        return instruction.opname == "LOAD_ASSERTION_ERROR"

    index = at(offset)
    if tests(instructions[index], asked):
        index += 1
    jump = instructions[index]
    on_true = jump.opname.endswith("IF_TRUE")
    if not (on_true or jump.opname.endswith("IF_FALSE")):
        return None
    if fails(index + 1):
        return on_true
    return not on_true if fails(at(jump.argval)) else None


def tests(instruction: dis.Instruction, asked: str) -> bool:
    """Whether an instruction tests what `asked` made for the jump that follows it, as CPython 3.13 compiles a test."""
    if instruction.opname == "COMPARE_OP" and instruction.argrepr.startswith("bool("):
        return asked in COMPARISONS[instruction.argval]
    return instruction.opname == "TO_BOOL"


@contextmanager
def recorded_factories(tracer: BlockTracer) -> Iterator[None]:
    """torch.ones(T, T) with a traced T: factories that take sizes one by one do not look for proxies on their own."""
    originals = {name: getattr(torch, name) for name in ("arange", "empty", "full", "ones", "zeros", "rand", "randn")}
    for name, original in originals.items():
        setattr(torch, name, recorder(tracer, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def recorder(tracer: BlockTracer, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, recorded if an argument is traced."""

    def factory(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if any(isinstance(argument, fx.Proxy) for argument in given):
            return tracer.create_proxy("call_function", original, args, kwargs)
        return original(*args, **kwargs)

    return factory
