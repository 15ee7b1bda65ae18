"""Attention written with layers of its own for query, key, value and output, recognised by their names.

Its forward must find the number of heads by the width it is given (`unflatten(2, (-1, head_width))`), or by one of the
attributes that are set here. What is recognised: this package's transformer, Llama and its kin, BERT and ViT, GPT-2,
DistilBERT, of Hugging Face's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from stretto.errors import UsageError
from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.role import Role, kind, width

PROJECTIONS = (  # query, key, value, output; the output by a path from the module that holds the others
    ("query", "key", "value", "output"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("q_lin", "k_lin", "v_lin", "out_lin"),
)
BESIDE = ("query", "key", "value")  # the output is `output.dense` of the module above
PACKED = ("c_attn", "c_proj")
WIDTHS = ("head_width", "head_dim", "attention_head_size")
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
TOTALS = ("all_head_size", "split_size", "inner_dim", "dim")


@dataclass(frozen=True)
class AttentionLayers:
    """The layers of one attention, by path, and the width of a head."""

    path: str
    module: nn.Module
    query: str
    others: tuple[str, ...]  # key and value; none where one layer makes all three
    output: str
    head_width: int

    def roles(self, root: nn.Module, axis: Axis) -> dict[str, Role]:
        """Heads, cut as torch.tensor_split cuts; where several queries share a key, the keys' heads."""
        blocks = 1 if self.others else 3
        queries = outputs(root, self.query) // blocks // self.head_width
        keys = outputs(root, self.others[0]) // self.head_width if self.others else queries
        if keys < axis.size:
            raise too_few(self.path, keys, axis, "key and value heads" if keys < queries else "heads")
        per_key = tuple(size * self.head_width for size in axis.cuts(keys))
        per_query = tuple(size * queries // keys for size in per_key)
        columns = {path: Role("column", per_key, sliced=True) for path in self.others}
        columns[self.query] = Role("column", per_query, sliced=True, blocks=blocks)
        return columns | {self.output: Role("row", per_query, sliced=True)}

    def adjust(self, role: Role, key_role: Role, axis: Axis) -> None:
        """Tell the module how many heads it has now, by whatever name it keeps that."""
        whole, own = sum(role.sizes), role.sizes[axis.rank]
        keys, own_keys = sum(key_role.sizes), key_role.sizes[axis.rank]
        told = {
            **dict.fromkeys(COUNTS, (whole // self.head_width, own // self.head_width)),
            **dict.fromkeys(KEY_COUNTS, (keys // self.head_width, own_keys // self.head_width)),
            **dict.fromkeys(TOTALS, (whole, own)),
        }
        for name, (before, after) in told.items():
            if self.module.__dict__.get(name) == before:
                setattr(self.module, name, after)


def attentions(root: nn.Module) -> Iterator[AttentionLayers]:
    """All that are recognised in a module."""
    modules = dict(root.named_modules())
    for path, module in modules.items():
        found = projections(path, module, modules)
        if found is not None:
            query, others, output = found
            size = head_width(module, outputs(root, query) // (1 if others else 3))
            if size is not None:
                yield AttentionLayers(path, module, query, others, output, size)


def projections(path: str, module: nn.Module, modules: dict[str, nn.Module]) -> tuple[str, tuple[str, ...], str] | None:
    """The paths of query, of key and value, and of output; None where there are no such layers."""
    below = f"{path}." if path else ""
    above = ".".join([*path.split(".")[:-1], "output.dense"]).removeprefix(".")
    choices: list[tuple[str, tuple[str, ...], str]] = [
        (below + q, (below + k, below + v), below + o) for q, k, v, o in PROJECTIONS
    ]
    choices.append((below + BESIDE[0], (below + BESIDE[1], below + BESIDE[2]), above))
    if hasattr(module, "split_size"):
        choices.append((below + PACKED[0], (), below + PACKED[1]))
    for query, others, output in choices:
        layers = [modules.get(each) for each in (query, *others, output)]
        if all(layer is not None and kind(layer) is not None for layer in layers):
            return query, others, output
    return None


def head_width(module: nn.Module, total: int) -> int | None:
    """How many features a head has; None where the module does not say or it does not fit."""
    told = [getattr(module, name, None) for name in WIDTHS]
    told += [total // count for name in COUNTS if isinstance(count := getattr(module, name, None), int) and count > 0]
    size = next((each for each in told if isinstance(each, int)), None)
    return size if size and total % size == 0 else None


def outputs(root: nn.Module, path: str) -> int:
    """How many outputs a layer has."""
    layer = root.get_submodule(path)
    known = kind(layer)
    assert known is not None
    return width(layer, known.outputs)


def too_few(path: str, count: int, axis: Axis, what: str) -> UsageError:
    """Some processes would have no head."""
    return UsageError(
        f"stretto.parallel.tensor: {path or 'the attention'} has {count} {what} for {axis.size} processes on the "
        f'tensor axis: use at most {count} processes, or leave it whole with plan={{"{path}": "replicate"}}'
    )
