"""Attention modules with linear layers for query, key, value and output, recognised by the names of the layers.

The module's forward has to find the number of heads from the width of its layers (`unflatten(2, (-1, head_width))`) or
from one of the attributes that `adjust` sets. Recognised are this package's transformer, and Hugging Face's Llama and
its kin, BERT, ViT, GPT-2 and DistilBERT.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from stretto.errors import UsageError
from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.role import Role, weight_dims, width

PROJECTIONS = (  # query, key, value, output
    ("query", "key", "value", "output"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("q_lin", "k_lin", "v_lin", "out_lin"),
)
WITH_OUTPUT_BESIDE = ("query", "key", "value")  # the output layer is `output.dense` of the parent module
PACKED = ("c_attn", "c_proj")  # one layer for query, key and value; output
GROUPED = ("qkv", "output")  # the same, with the rows of one key head after the other: queries, key, value
HEAD_WIDTHS = ("head_width", "head_dim", "attention_head_size")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
TOTAL_WIDTHS = ("all_head_size", "split_size", "inner_dim", "dim")


@dataclass(frozen=True)
class AttentionLayers:
    """The layers of one attention, by path, and the width of a head."""

    path: str
    module: nn.Module
    query: str
    others: tuple[str, ...]  # key and value; empty where one layer computes query, key and value
    output: str
    head_width: int
    group: int = 0  # where the rows of one layer are by key head: the query heads of each; else 0

    def roles(self, root: nn.Module, axis: Axis) -> dict[str, Role]:
        """The roles of its layers, by path: key heads cut as torch.tensor_split cuts, query heads with their key head.

        Raises UsageError if a process would have no head.
        """
        if self.group:
            return self.grouped_roles(root, axis)
        blocks = 1 if self.others else 3
        queries = outputs(root, self.query) // blocks // self.head_width
        keys = outputs(root, self.others[0]) // self.head_width if self.others else queries
        if keys < axis.size:
            raise too_few(self.path, keys, axis, "key and value heads" if keys < queries else "heads")
        key_sizes = tuple(heads * self.head_width for heads in axis.cuts(keys))
        query_sizes = tuple(size * queries // keys for size in key_sizes)
        columns = {path: Role("column", key_sizes, sliced=True) for path in self.others}
        columns[self.query] = Role("column", query_sizes, sliced=True, blocks=blocks)
        return columns | {self.output: Role("row", query_sizes, sliced=True)}

    def grouped_roles(self, root: nn.Module, axis: Axis) -> dict[str, Role]:
        """The same, where the rows of one layer are by key head: a key head keeps its queries, its key and its value.

        Raises UsageError if a process would have no key head.
        """
        keys = outputs(root, self.query) // ((self.group + 2) * self.head_width)
        if keys < axis.size:
            raise too_few(self.path, keys, axis, "key and value heads" if self.group > 1 else "heads")
        rows, columns = (
            tuple(heads * number * self.head_width for heads in axis.cuts(keys))
            for number in (self.group + 2, self.group)
        )
        return {self.query: Role("column", rows, sliced=True), self.output: Role("row", columns, sliced=True)}

    def adjust(self, role: Role, key_role: Role, axis: Axis) -> None:
        """Set the module's attributes that hold a number of heads or a total width to those of this process."""
        whole, local = sum(role.sizes), role.sizes[axis.rank]
        keys, local_keys = sum(key_role.sizes), key_role.sizes[axis.rank]
        values = {
            **dict.fromkeys(HEAD_COUNTS, (whole // self.head_width, local // self.head_width)),
            **dict.fromkeys(KEY_COUNTS, (keys // self.head_width, local_keys // self.head_width)),
            **dict.fromkeys(TOTAL_WIDTHS, (whole, local)),
        }
        for name, (before, after) in values.items():
            if self.module.__dict__.get(name) == before:
                setattr(self.module, name, after)


def attentions(root: nn.Module) -> Iterator[AttentionLayers]:
    modules = dict(root.named_modules())
    for path, module in modules.items():
        paths = projections(path, module, modules)
        if paths is not None:
            query, others, output = paths
            grouped = query.rpartition(".")[2] == GROUPED[0]
            width_of_head = head_width(module, outputs(root, query) // (1 if others or grouped else 3))
            group = module.group if grouped else 0
            if width_of_head is not None and isinstance(group, int):
                yield AttentionLayers(path, module, query, others, output, width_of_head, group)


def projections(path: str, module: nn.Module, modules: dict[str, nn.Module]) -> tuple[str, tuple[str, ...], str] | None:
    """The paths of query, of key and value, and of output; None if the module has no such layers."""
    prefix = f"{path}." if path else ""
    output_beside = ".".join([*path.split(".")[:-1], "output.dense"]).removeprefix(".")
    choices: list[tuple[str, tuple[str, ...], str]] = [
        (prefix + q, (prefix + k, prefix + v), prefix + o) for q, k, v, o in PROJECTIONS
    ]
    query, key, value = (prefix + name for name in WITH_OUTPUT_BESIDE)
    choices.append((query, (key, value), output_beside))
    if hasattr(module, "split_size"):
        choices.append((prefix + PACKED[0], (), prefix + PACKED[1]))
    if hasattr(module, "group"):
        choices.append((prefix + GROUPED[0], (), prefix + GROUPED[1]))
    for query, others, output in choices:
        layers = [modules.get(layer_path) for layer_path in (query, *others, output)]
        if all(layer is not None and weight_dims(layer) is not None for layer in layers):
            return query, others, output
    return None


def head_width(module: nn.Module, total: int) -> int | None:
    """The features of a head, from the module's attributes; None if it has none or they do not divide `total`."""
    widths = [getattr(module, name, None) for name in HEAD_WIDTHS]
    counts = [getattr(module, name, None) for name in HEAD_COUNTS]
    widths += [total // count for count in counts if isinstance(count, int) and count > 0]
    first = next((value for value in widths if isinstance(value, int)), None)
    return first if first and total % first == 0 else None


def outputs(root: nn.Module, path: str) -> int:
    """The number of a layer's outputs."""
    layer = root.get_submodule(path)
    dims = weight_dims(layer)
    assert dims is not None
    return width(layer, dims.outputs)


def too_few(path: str, count: int, axis: Axis, what: str) -> UsageError:
    """The error for an attention with fewer heads than the axis has processes."""
    return UsageError(
        f"stretto.parallel.tensor: {path or 'the attention'} has {count} {what} for {axis.size} processes on the "
        f'tensor axis: use at most {count} processes, or leave it whole with plan={{"{path}": "replicate"}}'
    )
