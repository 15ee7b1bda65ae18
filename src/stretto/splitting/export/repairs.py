"""What an exported graph, and torch.export itself, need so that stages train as the model does."""

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg
from torch.nn.modules import transformer

NAME = "_detect_is_causal_mask"  # what torch.nn's encoder and decoder ask before their first layer


@contextmanager
def masks_as_given() -> Iterator[None]:
    """In this block torch.nn's transformers do not look whether a mask is causal, which a graph could not decide.

    They use it as it is then: the same numbers, without the kernels that need no mask.
    """

    def hinted(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    original = getattr(transformer, NAME)
    setattr(transformer, NAME, hinted)
    try:
        yield
    finally:
        setattr(transformer, NAME, original)


aten = torch.ops.aten


def batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any) -> Tensor:
    """torch.nn.functional.batch_norm as an exported graph calls it."""
    if training:
        refuse_single(x, x.numel() // x.shape[1])
    normed: Tensor = aten.batch_norm.default(x, weight, bias, mean, var, training, *rest)
    return normed


def group_norm(x: Tensor, groups: int, weight: Any, bias: Any, eps: float = 1e-5, cudnn: bool = True) -> Tensor:
    """torch.nn.functional.group_norm as an exported graph calls it."""
    refuse_single(x, x.numel() // groups)
    normed: Tensor = aten.group_norm.default(x, groups, weight, bias, eps, cudnn)
    return normed


def refuse_single(x: Tensor, values: int) -> None:
    """Raise ValueError, as torch does, where a channel or a group has so many values: one."""
    if values == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")


CHECKED: dict[Any, Callable[..., Tensor]] = {aten.batch_norm.default: batch_norm, aten.group_norm.default: group_norm}


Sizes = dict[Any, tuple[fx.Node, int]]  # a symbol of torch.export: a tensor, and its dim of that size


def with_local_shapes(graph: fx.Graph, home: torch.device) -> fx.Graph:
    """Let each operation read sizes from its own tensors, else from the latest tensor before it of that size.

    torch.export reads all sizes from the batch, in the first nodes. It writes the model's device as a constant; here a
    tensor gives the device too, so that a stage runs on whatever device it is moved to.
    """
    latest: Sizes = {}
    newest: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op in ("call_function", "output") and (node.op == "output" or not is_number(node)):
            tensors = [used for used in node.all_input_nodes if isinstance(used.meta.get("val"), Tensor)]
            sizes = {**latest, **{key: place for used in reversed(tensors) for key, place in sizes_of(used).items()}}
            source = next(iter(tensors), newest)
            with graph.inserting_before(node):
                adapt(graph, node, sizes, source, home)
        if isinstance(node.meta.get("val"), Tensor) and node.op != "get_attr":
            newest = node
            latest.update(sizes_of(node))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and is_number(node) and not node.users:
            graph.erase_node(node)
    return graph


def adapt(graph: fx.Graph, node: fx.Node, sizes: Sizes, source: fx.Node | None, home: torch.device) -> None:
    """Replace the numbers and the device in one operation's arguments by nodes that read them from tensors."""
    new_nodes: dict[Any, fx.Node] = {}

    def recomputed(argument: fx.Node) -> fx.Node:
        if argument.op != "call_function" or not is_number(argument):
            return argument
        if argument not in new_nodes:
            symbol = symbol_of(argument.meta["val"])
            if symbol in sizes:
                new_nodes[argument] = graph.call_function(torch.ops.aten.sym_size.int, sizes[symbol])
            else:
                args, kwargs = map_arg((argument.args, argument.kwargs), recomputed)
                new_nodes[argument] = graph.create_node("call_function", argument.target, args, kwargs)
            new_nodes[argument].meta = dict(argument.meta)
        return new_nodes[argument]

    def with_device(value: Any) -> Any:
        if value == home and isinstance(value, torch.device) and source is not None:
            if home not in new_nodes:
                new_nodes[home] = graph.call_function(getattr, (source, "device"))
            return new_nodes[home]
        return value

    node.args, node.kwargs = map_aggregate(map_arg((node.args, node.kwargs), recomputed), with_device)


def is_number(node: fx.Node) -> bool:
    """Whether a node's value is a size or a number."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def sizes_of(node: fx.Node) -> Sizes:
    """The symbols among the sizes of a node's tensor, each with its dim."""
    sizes = {}
    for dim, size in reversed(list(enumerate(node.meta["val"].shape))):
        symbol = symbol_of(size)
        if symbol is not None:
            sizes[symbol] = node, dim
    return sizes


def symbol_of(size: Any) -> Any:
    """The symbol of a size; None for a number or an expression."""
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    return expression if expression.is_Symbol else None


@contextlib.contextmanager
def output_held_back() -> Iterator[None]:
    """Hold back printed text and torch's logs until the block ends; an exception gets them as a note instead.

    An export that fails prints the graph that it has recorded so far.
    """
    handlers = torch_handlers()
    streams = [sys.stdout, sys.stderr, *(handler.stream for handler in handlers)]
    buffers: list[io.StringIO] = [io.StringIO() for _ in streams]
    try:
        with contextlib.redirect_stdout(buffers[0]), contextlib.redirect_stderr(buffers[1]):
            for handler, buffer in zip(handlers, buffers[2:], strict=True):
                handler.setStream(buffer)
            yield
    except Exception as error:
        if printed := "\n".join(buffer.getvalue().strip() for buffer in buffers).strip():
            error.add_note(printed)
        raise
    else:
        for stream, buffer in zip(streams, buffers, strict=True):
            if buffer.getvalue():
                stream.write(buffer.getvalue())
    finally:
        for handler, stream in zip(handlers, streams[2:], strict=True):
            handler.setStream(stream)


def torch_handlers() -> "list[logging.StreamHandler[Any]]":
    """The plain stream handlers of torch's loggers, which write to a terminal, each once.

    One whose stream is closed has nothing to hold back, and cannot be given another: whoever captured torch's first
    words, as a test runner does, has gone.
    """
    loggers = [logger for name, logger in logging.root.manager.loggerDict.items() if name.partition(".")[0] == "torch"]
    handlers = [handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers]
    plain = [handler for handler in dict.fromkeys(handlers) if type(handler) is logging.StreamHandler]
    return [handler for handler in plain if not getattr(handler.stream, "closed", False)]
