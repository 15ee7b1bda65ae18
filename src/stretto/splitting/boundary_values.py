"""What can travel from one stage to the next: tensors, and tuples and lists of them."""

import operator
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from stretto.errors import UsageError
from stretto.splitting.fx.decisions import asks, reckons
from stretto.splitting.fx.helpers import HELPER


class ValueKind(Enum):
    """What a value is, if it is not a container of tensors."""

    TENSOR = 1
    FIXED = 2  # a tensor that no weight has a part in (rotary tables): its gradient would be of no use
    OPTIONAL = 3  # a tensor without gradient, or None: a mask that some batches need and others do not
    PLAIN = 4  # shapes, numbers, devices: computed anew from the tensors they come from
    STUCK = 5  # anything else, which cannot travel


Form: TypeAlias = Any
"""A Kind; None; or a tuple or list of Forms that has a tensor in it."""

PLAIN_TYPES = (int, float, complex, bool, str, slice, range, torch.Size, torch.dtype, torch.device, torch.layout)


def form_of(value: Any) -> Form:
    """The form of a value that was seen."""
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
    """Runs a graph and keeps the form of what every node gave, in `forms`."""

    def __init__(self, module: fx.GraphModule, hint: str) -> None:
        super().__init__(module)
        self._hint = hint
        self.extra_traceback = False
        self.forms: dict[fx.Node, Form] = {}

    def run_node(self, n: fx.Node) -> Any:
        """One node. Raises UsageError if it fails."""
        try:
            with torch.enable_grad():
                value = super().run_node(n)
        except Exception as error:
            raise UsageError(
                f"the model fails on the example{self._hint} at {n.format_node()}: {error}. Give an example of the "
                "shapes and types that the model takes"
            ) from error
        form = form_of(value)
        self.forms[n] = ValueKind.OPTIONAL if is_optional(n, value) else form
        return tree_map_only(Tensor, afresh, value)


def differentiable(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_optional(node: fx.Node, value: Any) -> bool:
    """Whether other batches may have a tensor where this one has None, or None where this one has a tensor.

    A helper function may decide by the numbers in a batch whether it makes a mask.
    """
    if value is None:
        return node.op in ("call_function", "call_module", "call_method")
    return HELPER in node.meta and isinstance(value, Tensor) and not value.requires_grad


def afresh(tensor: Tensor) -> Tensor:
    """The same numbers without what they came from, no leaf: only one node's graph is ever held."""
    return tensor.detach().requires_grad_().clone() if tensor.requires_grad else tensor


def pack(value: Tensor | None, like: Tensor) -> Tensor:
    """An optional value as a tensor where `like` is: None is an empty one."""
    return like.new_empty(0, dtype=torch.bool) if value is None else value


def unpack(tensor: Tensor) -> Tensor | None:
    """What `pack` was given."""
    return None if tensor.dim() == 1 and not tensor.numel() else tensor.detach()


def outline(tensor: Tensor) -> Tensor:
    """A tensor without elements that tells the shape of another, [0, *shape]."""
    return tensor.new_empty((0, *tensor.shape))


def stand_in(outlined: Tensor) -> Tensor:
    """A tensor of the shape that `outline` was given, which takes no memory and whose numbers mean nothing."""
    return outlined.new_zeros(()).expand(outlined.shape[1:])


def guess_forms(graph: fx.Graph) -> dict[fx.Node, Form]:
    """Forms without having seen values: what is not clearly a shape or a number counts as one tensor."""
    forms: dict[fx.Node, Form] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        plain = asks(node) or (reckons(node) and bool(inputs) and all(forms[n] is ValueKind.PLAIN for n in inputs))
        forms[node] = ValueKind.PLAIN if plain else ValueKind.TENSOR
    return forms


def leaves(graph: fx.Graph, value: Any, form: Form) -> list[fx.Node]:
    """The tensors of a value in a stage's graph, in order; taken out of their container if need be."""
    if form is None:
        return []
    if isinstance(form, ValueKind):
        return [value]
    members = value if isinstance(value, (tuple, list)) else [None] * len(form)
    found: list[fx.Node] = []
    for index, (member, inner) in enumerate(zip(members, form, strict=True)):
        if member is None and inner is not None:
            member = graph.call_function(operator.getitem, (value, index))
        found += leaves(graph, member, inner)
    return found


def rebuild(graph: fx.Graph, form: Form, name: str) -> Any:
    """The value called `name` in the next stage's graph, out of the tensors that the stage is given."""
    if form is None:
        return None
    if form is ValueKind.TENSOR:
        return graph.placeholder(name)
    if form is ValueKind.FIXED:
        return graph.call_method("detach", (graph.placeholder(name),))
    if form is ValueKind.OPTIONAL:
        return graph.call_function(unpack, (graph.placeholder(name),))
    return type(form)(rebuild(graph, inner, f"{name}__{index}") for index, inner in enumerate(form))


def num_leaves(form: Form) -> int:
    """How many tensors travel for a value."""
    return 0 if form is None else 1 if isinstance(form, ValueKind) else sum(map(num_leaves, form))
