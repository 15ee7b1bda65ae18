"""What can travel from one stage to the next: tensors, and tuples and lists of them."""

import operator
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from stretto.errors import UsageError


class Kind(Enum):
    """What a value is, if it is not a container of tensors."""

    TENSOR = 1
    PLAIN = 2  # shapes, numbers, devices: computed anew from the tensors they come from
    STUCK = 3  # anything else, which cannot travel


Form: TypeAlias = Any
"""A Kind; None; or a tuple or list of Forms that has a tensor in it."""

PLAIN_TYPES = (int, float, complex, bool, str, slice, range, torch.Size, torch.dtype, torch.device, torch.layout)
PLAIN_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "is_cuda", "itemsize", "layout"}
PLAIN_METHODS = {"size", "dim", "numel", "nelement", "item", "stride", "is_floating_point", "element_size"}


def form_of(value: Any) -> Form:
    """The form of a value that was seen."""
    if isinstance(value, Tensor):
        return Kind.TENSOR
    if value is None:
        return None
    if type(value) in (tuple, list):
        forms = [form_of(member) for member in value]
        if all(form is Kind.PLAIN or form is None for form in forms):
            return Kind.PLAIN
        return Kind.STUCK if Kind.STUCK in forms or Kind.PLAIN in forms else type(value)(forms)
    return Kind.PLAIN if isinstance(value, PLAIN_TYPES) else Kind.STUCK


class Watch(fx.Interpreter):
    """Runs a graph and keeps the form of what every node gave, in `forms`."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.forms: dict[fx.Node, Form] = {}

    def run_node(self, n: fx.Node) -> Any:
        """One node. Raises UsageError if it fails."""
        try:
            value = super().run_node(n)
        except Exception as error:
            raise UsageError(
                f"the model fails on the example at {n.format_node()}: {error}. Give an example of the shapes and "
                "types that the model takes"
            ) from error
        self.forms[n] = form_of(value)
        return value


def guess_forms(graph: fx.Graph) -> dict[fx.Node, Form]:
    """Forms without having seen values: what is not clearly a shape or a number counts as one tensor."""
    forms: dict[fx.Node, Form] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        # Arithmetic and indexing on shapes and numbers gives such again.
        inherits = node.op == "call_method" or getattr(node.target, "__module__", "") in (
            "_operator",
            "math",
            "builtins",
        )
        plain = (
            (node.op == "call_function" and node.target is getattr and node.args[1] in PLAIN_ATTRIBUTES)
            or (node.op == "call_method" and node.target in PLAIN_METHODS)
            or (inherits and bool(inputs) and all(forms[n] is Kind.PLAIN for n in inputs))
        )
        forms[node] = Kind.PLAIN if plain else Kind.TENSOR
    return forms


def leaves(graph: fx.Graph, value: Any, form: Form) -> list[fx.Node]:
    """The tensors of a value in a stage's graph, in order; taken out of their container if need be."""
    if form is None:
        return []
    if form is Kind.TENSOR:
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
    if form is Kind.TENSOR:
        return graph.placeholder(name)
    return type(form)(rebuild(graph, inner, f"{name}__{index}") for index, inner in enumerate(form))


def num_leaves(form: Form) -> int:
    """How many tensors travel for a value."""
    return 0 if form is None else 1 if form is Kind.TENSOR else sum(map(num_leaves, form))
