"""A torch.fx tracer that records every module and helper function without blocks as one node."""

import dis
import inspect
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from stretto.errors import UsageError
from stretto.nn.devices import SPECIFIC_ATTRIBUTES
from stretto.nn.preserve import device_of, undisturbed
from stretto.splitting.cost import Inputs
from stretto.splitting.forward_arguments import ForwardCall

PLAIN_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "itemsize", "layout", *SPECIFIC_ATTRIBUTES}
PLAIN_METHODS = {"size", "dim", "numel", "nelement", "item", "stride", "is_floating_point", "element_size"}
PLAIN_OPERATIONS = {torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default, torch.ops.aten.sym_stride.int}
OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def reads_metadata(node: fx.Node) -> bool:
    """Whether a node reads a tensor's shape, dtype, device or single element."""
    if node.op == "call_function":
        if node.target in PLAIN_OPERATIONS:
            return True
        return node.target is getattr and node.args[1] in PLAIN_ATTRIBUTES
    return node.op == "call_method" and node.target in PLAIN_METHODS


def computes_plainly(node: fx.Node) -> bool:
    """Whether a node gives shapes and numbers if its inputs are such: arithmetic, comparison, indexing."""
    module = getattr(node.target, "__module__", "")
    return node.op == "call_method" or module in ("_operator", "math", "builtins")


def settled(node: fx.Node) -> bool:
    """Whether a node's value depends on shapes and types alone, never on a tensor's elements."""
    if reads_metadata(node):
        return node.target != "item"
    inputs = node.all_input_nodes
    return computes_plainly(node) and bool(inputs) and all(map(settled, inputs))


def hold(value: Any, decided: Any, place: str) -> None:
    """Part of a stage: raise UsageError if this batch decides otherwise than the traced example."""
    present = len(value) if isinstance(value, tuple) else bool(value)
    if present != decided:
        raise UsageError(
            f"the model decides by its batch's shapes or types at {place}: it was split with an example that gave "
            f"{decided}, this batch gives {present}. Split it with an example like the batches it will see"
        )


def deciding_line(frame: FrameType | None) -> str:
    """The user's line that decides, as "file:line", for messages."""
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


# The method that a comparison calls on its first operand, or on its second one with the sides exchanged.
COMPARISONS = {
    "<": ("lt", "gt"),
    "<=": ("le", "ge"),
    "==": ("eq",),
    "!=": ("ne",),
    ">": ("gt", "lt"),
    ">=": ("ge", "le"),
}


class BlockTracer(fx.Tracer):
    """Traces into the modules around the blocks only, so that any other module may do whatever it likes.

    With an example, decisions that depend on shapes and types alone are made as for the example; the graph checks that
    other batches decide the same (see `hold`).
    """

    proxy_buffer_attributes = True

    def __init__(self, blocks: Mapping[str, nn.Module], call: ForwardCall, inputs: Inputs | None) -> None:
        super().__init__()
        self._blocks = {id(block): name for name, block in blocks.items()}
        self._call = call
        self._inputs = inputs
        self._values: dict[fx.Node, Any] = {}  # of nodes on the example, computed when needed
        self._evaluating = False
        self._constants: dict[int, tuple[str, Any]] = {}
        self.outputs: tuple[str, ...] = ()  # names of the tensors in the output, if it is a record

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        self._known = {id(module) for module in root.modules()} | set(self._blocks)
        return super().trace(root, concrete_args)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self._blocks or not any(id(inner) in self._blocks for inner in m.modules())

    def path_of_module(self, mod: nn.Module) -> str:
        """A block's name, also of one in a plain list; else the registered path."""
        return self._blocks.get(id(mod)) or super().path_of_module(mod)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """A placeholder for each tensor of a batch; other arguments keep their defaults."""

        def run(root: nn.Module, *inputs: fx.Proxy) -> Any:
            return self._tensors_of(self._call.run(partial(root_fn, root), inputs))

        return run, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in self._call.names)]

    def _tensors_of(self, output: Any) -> Any:
        # Of a Hugging Face ModelOutput, its tensors: one alone, several as a tuple.
        if not is_record(output):
            return output
        tensors = {str(name): value for name, value in output.items() if isinstance(value, fx.Proxy)}
        self.outputs = tuple(tensors)
        return next(iter(tensors.values())) if len(tensors) == 1 else tuple(tensors.values())

    def create_arg(self, a: Any) -> Any:
        """Objects that fx has no node for (configurations) become constants of the stages that need them."""
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
        """Record the call, but not while a value of the example is computed.

        A module that the forward creates on the fly, nn.ReLU()(x), is traced into: no stage could hold it.
        """
        if self._evaluating or id(m) not in self._known:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Record the use of a parameter or buffer, but not while a value of the example is computed."""
        return attr_val if self._evaluating else super().getattr(attr, attr_val, parameter_proxy_cache)

    def _settled(self, node: fx.Node) -> bool:
        return self._inputs is not None and settled(node)

    def _decide(self, proxy: fx.Proxy) -> bool | int:
        # Decide as for the example, and record a check that other batches decide the same.
        self._evaluating = True
        try:
            with undisturbed([self.root], device_of([self.root])), torch.no_grad():
                value = self._value(proxy.node)
                decided = len(value) if isinstance(value, tuple) else bool(value)  # a forward iterates over a tuple
        finally:
            self._evaluating = False
        self.create_proxy("call_function", hold, (proxy, decided, deciding_line(inspect.currentframe())), {})
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
                for attribute in str(node.target).split("."):
                    value = getattr(value, attribute)
                value = value(*args, **kwargs) if node.op == "call_module" else value
            self._values[node] = value
        return self._values[node]

    # -- decisions --------------------------------------------------------------------------------------------------

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Unpack a shape, with the example's length; anything else fails as in torch.fx."""
        if not self._settled(obj.node):
            return super().iter(obj)
        length = self._decide(obj)
        return (self.create_proxy("call_function", operator.getitem, (obj, index), {}) for index in range(length))

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Record assertions; decide by shapes as the example does. Any other decision fails as in torch.fx."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__") in (__name__, "torch.fx.proxy"):
            frame = frame.f_back
        operation = getattr(obj.node.target, "__name__", "")
        demanded = None if frame is None else asserted(frame.f_code, frame.f_lasti, operation)
        if demanded is None or frame is None:
            return bool(self._decide(obj)) if self._settled(obj.node) else super().to_bool(obj)
        condition = obj if demanded else self.create_proxy("call_function", bool_not, (obj,), {})
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.create_proxy("call_function", torch._assert, (condition, f"assertion at {where}"), {})
        return demanded


def is_record(value: object) -> bool:
    """Whether a value is both a mapping and a dataclass, as Hugging Face's ModelOutput is."""
    return isinstance(value, Mapping) and is_dataclass(value)


def bool_not(value: Any) -> bool:
    """`not value`, as a function that a graph can call."""
    return not value


def asserted(code: CodeType, offset: int, operation: str) -> bool | None:
    """The truth value that an assert demands of the value tested at bytecode `offset`; None if there is no assert.

    `operation` is the name of the operation that made the value. From CPython 3.13 on a comparison tests its own
    result. A comparison of tuples also tests there whether elements are equal, which the assert does not demand.
    """
    instructions = [entry for entry in dis.get_instructions(code) if entry.opname not in ("EXTENDED_ARG", "NOP")]

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
    if tests(instructions[index], operation):
        index += 1
    jump = instructions[index]
    on_true = jump.opname.endswith("IF_TRUE")
    if not (on_true or jump.opname.endswith("IF_FALSE")):
        return None
    if fails(index + 1):
        return on_true
    return not on_true if fails(at(jump.argval)) else None


def tests(instruction: dis.Instruction, operation: str) -> bool:
    """Whether an instruction tests the result of `operation` for the jump after it, as CPython 3.13 compiles a test."""
    if instruction.opname == "COMPARE_OP" and instruction.argrepr.startswith("bool("):
        return operation in COMPARISONS[instruction.argval]
    return instruction.opname == "TO_BOOL"


@contextmanager
def recorded_factories(tracer: BlockTracer) -> Iterator[None]:
    """Record torch factories called with a traced size, torch.ones(T, T): torch.fx does not see these on its own."""
    originals = {name: getattr(torch, name) for name in ("arange", "empty", "full", "ones", "zeros", "rand", "randn")}
    for name, original in originals.items():
        setattr(torch, name, recorder(tracer, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def recorder(tracer: BlockTracer, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, recorded as a node if an argument is traced."""

    def factory(*args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        if any(isinstance(argument, fx.Proxy) for argument in arguments):
            return tracer.create_proxy("call_function", original, args, kwargs)
        return original(*args, **kwargs)

    return factory
