"""The values that one stage can send to the next: tensors, and tuples and lists of tensors."""

import operator
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from stretto.errors import UsageError
from stretto.nn.input_errors import advice_on
from stretto.splitting.export.modes import kind_of, path_of
from stretto.splitting.fx.graph import HELPER
from stretto.splitting.fx.tracer import computes_plainly, reads_metadata


class ValueKind(Enum):
    """The kind of a value that is no tuple or list of tensors."""

    TENSOR = 1
    FIXED = 2  # a tensor that depends on no weight (rotary tables), so that it needs no gradient
    OPTIONAL = 3  # a tensor without gradient, or None: a mask that only some batches need
    PLAIN = 4  # a shape, number or device: each stage computes it from the tensors that it is sent
    STUCK = 5  # anything else, which cannot be sent


Form: TypeAlias = Any
"""A ValueKind, None, or a tuple or list of Forms with at least one tensor."""

PLAIN_TYPES = (int, float, complex, bool, str, slice, range, torch.Size, torch.dtype, torch.device, torch.layout)


def form_of(value: Any) -> Form:
    if isinstance(value, Tensor):
        return ValueKind.TENSOR if value.requires_grad or not differentiable(value) else ValueKind.FIXED
    if value is None:
        return None
    if type(value) in (tuple, list):
        forms = [form_of(member) for member in value]
        if all(form is ValueKind.PLAIN or form is None for form in forms):
            return ValueKind.PLAIN
        return ValueKind.STUCK if ValueKind.STUCK in forms or ValueKind.PLAIN in forms else type(value)(forms)
    return ValueKind.PLAIN if isinstance(value, PLAIN_TYPES) else ValueKind.STUCK


class FormRecorder(fx.Interpreter):
    """Runs a graph and records the form of every node's value, in `forms`."""

    def __init__(self, module: fx.GraphModule, hint: str) -> None:
        super().__init__(module)
        self._hint = hint
        self.extra_traceback = False
        self.forms: dict[fx.Node, Form] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and record the form of its value. Raises UsageError if the node fails."""
        try:
            with torch.enable_grad():
                value = super().run_node(n)
        except Exception as error:
            remedy = advice_on(error).strip(" .") or "Give an example of the shapes and types that the model takes"
            raise UsageError(
                f"the model fails on the example{self._hint} {self._place(n)}: {error}. {remedy}"
            ) from error
        form = form_of(value)
        self.forms[n] = ValueKind.OPTIONAL if is_optional(n, value) else form
        return tree_map_only(Tensor, detached_copy, value)

    def _place(self, node: fx.Node) -> str:
        # The innermost module that the operation is in, and the operation; else the node as the graph prints it.
        if node.op == "call_module":
            return f"in {node.target} ({type(self.fetch_attr(str(node.target))).__name__})"
        path, kind = path_of(node), kind_of(node)
        return f"in {path} ({kind}), {node.target}" if path else f"at {node.format_node()}"


def differentiable(tensor: Tensor) -> bool:
    """Whether a tensor of this dtype can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_optional(node: fx.Node, value: Any) -> bool:
    """Whether the node may give a tensor for one batch and None for another.

    A helper function may decide by the values of a batch whether it makes a mask.
    """
    if value is None:
        return node.op in ("call_function", "call_module", "call_method")
    return HELPER in node.meta and isinstance(value, Tensor) and not value.requires_grad


def detached_copy(tensor: Tensor) -> Tensor:
    """A copy without history that is no leaf, so that autograd keeps the graph of one node at a time."""
    return tensor.detach().requires_grad_().clone() if tensor.requires_grad else tensor


def pack(value: Tensor | None, like: Tensor) -> Tensor:
    """An optional value as a tensor on the device of `like`: an empty one for None."""
    return like.new_empty(0, dtype=torch.bool) if value is None else value


def unpack(tensor: Tensor) -> Tensor | None:
    """The tensor or None that `pack` was given."""
    return None if tensor.dim() == 1 and not tensor.numel() else tensor.detach()


def passed_on(tensor: Tensor) -> Tensor:
    """A tensor that depends on no weight, as a stage returns it: no leaf, should an input of it have a gradient."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor


def received(tensor: Tensor) -> Tensor:
    """What `passed_on` gave as the next stage takes it: without a gradient in training, where it comes as a leaf."""
    return tensor.detach() if tensor.is_leaf else tensor


def outline(tensor: Tensor) -> Tensor:
    """An empty tensor of shape [0, *tensor.shape]: it carries the shape and no elements."""
    return tensor.new_empty((0, *tensor.shape))


def stand_in(outlined: Tensor) -> Tensor:
    """A tensor of the shape that `outline` carries: one element expanded, whose value means nothing."""
    return outlined.new_zeros(()).expand(outlined.shape[1:])


def guess_forms(graph: fx.Graph) -> dict[fx.Node, Form]:
    """Forms without an example: every value that is not clearly a shape or a number counts as one tensor."""
    forms: dict[fx.Node, Form] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        plain = reads_metadata(node) or (
            computes_plainly(node) and bool(inputs) and all(forms[source] is ValueKind.PLAIN for source in inputs)
        )
        forms[node] = ValueKind.PLAIN if plain else ValueKind.TENSOR
    return forms


def leaves(graph: fx.Graph, value: Any, form: Form) -> list[fx.Node]:
    """The nodes of a value's tensors in a stage's graph, in order; adds the nodes that index its container."""
    if form is None:
        return []
    if isinstance(form, ValueKind):
        return [graph.call_function(passed_on, (value,)) if form is ValueKind.FIXED else value]
    members = value if isinstance(value, (tuple, list)) else [None] * len(form)
    tensors: list[fx.Node] = []
    for index, (member, member_form) in enumerate(zip(members, form, strict=True)):
        if member is None and member_form is not None:
            member = graph.call_function(operator.getitem, (value, index))
        tensors += leaves(graph, member, member_form)
    return tensors


def rebuild(graph: fx.Graph, form: Form, name: str) -> Any:
    """The value `name` in the next stage's graph, put together from the placeholders of its tensors."""
    if form is None:
        return None
    if form is ValueKind.TENSOR:
        return graph.placeholder(name)
    if form is ValueKind.FIXED:
        return graph.call_function(received, (graph.placeholder(name),))
    if form is ValueKind.OPTIONAL:
        return graph.call_function(unpack, (graph.placeholder(name),))
    return type(form)(rebuild(graph, member_form, f"{name}__{index}") for index, member_form in enumerate(form))


def num_leaves(form: Form) -> int:
    """How many tensors are sent for a value of this form."""
    return 0 if form is None else 1 if isinstance(form, ValueKind) else sum(map(num_leaves, form))
