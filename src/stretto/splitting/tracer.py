"""torch.fx, with every module that holds no block as one node."""

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from stretto.splitting.arguments import input_names


class BlockTracer(fx.Tracer):
    """Looks into the modules around the blocks only, so that everything else may do what it likes."""

    proxy_buffer_attributes = True

    def __init__(self, blocks: Mapping[str, nn.Module], num_inputs: int) -> None:
        super().__init__()
        self._blocks = {id(block): name for name, block in blocks.items()}
        self._num_inputs = num_inputs

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Every module but those that hold a block."""
        return id(m) in self._blocks or not any(id(inner) in self._blocks for inner in m.modules())

    def path_of_module(self, mod: nn.Module) -> str:
        """A block's name, which a plain list does not give it; otherwise the registered one."""
        return self._blocks.get(id(mod)) or super().path_of_module(mod)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Placeholders for the inputs there are; Python gives the other arguments their defaults."""
        names = input_names(root_fn, self._num_inputs)
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in names)]

    def to_bool(self, obj: fx.Proxy) -> bool:
        """An assertion becomes part of the graph; any other decision cannot."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__") in (__name__, "torch.fx.proxy"):
            frame = frame.f_back
        wanted = None if frame is None else asserted(frame.f_code, frame.f_lasti)
        if wanted is None or frame is None:
            return super().to_bool(obj)
        held = obj if wanted else self.create_proxy("call_function", bool_not, (obj,), {})
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.create_proxy("call_function", torch._assert, (held, f"assertion at {where}"), {})
        return wanted


def bool_not(value: Any) -> bool:
    """`not value`, as a function a graph can call."""
    return not value


def asserted(code: CodeType, offset: int) -> bool | None:
    """Which truth value the assert statement, if it is one, demands of the value that the jump at `offset` tests."""
    instructions = list(dis.get_instructions(code))
    index = next(i for i, instruction in enumerate(instructions) if instruction.offset >= offset)
    if instructions[index].opname == "TO_BOOL":  # from Python 3.13 on
        index += 1
    jump, *following = instructions[index:]
    fails = [i.offset for i in instructions if i.opname == "LOAD_ASSERTION_ERROR"]
    on_true = jump.opname.endswith("IF_TRUE")
    if not following or not (on_true or jump.opname.endswith("IF_FALSE")):
        return None
    if following[0].offset in fails:
        return on_true
    return not on_true if jump.argval in fails else None


@contextmanager
def recorded_factories(tracer: BlockTracer) -> Iterator[None]:
    """torch.ones(T, T) with a traced T: factories that take sizes one by one do not look for proxies on their own."""
    originals = {name: getattr(torch, name) for name in ("empty", "ones", "zeros", "rand", "randn")}
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
