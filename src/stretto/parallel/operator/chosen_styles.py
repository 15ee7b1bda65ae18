"""The role of each layer: by the user's plan, then attention, known MLPs, chains, and last layers by themselves."""

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn

from stretto.errors import UsageError, nearest
from stretto.options.checks import one_of
from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.chains import chains
from stretto.parallel.operator.heads import AttentionLayers, attentions, too_few
from stretto.parallel.operator.role import CONVOLUTIONS, Role, groups, weight_dims, width

STYLES = ("column", "row", "column-sliced", "row-sliced", "vocabulary", "replicate")
NAMED_EMBEDDINGS = ("wte", "embed_tokens", "word_embeddings", "tok_embeddings", "token")
MLP_PAIRS = (  # MLPs whose two layers are in different modules (BERT, ViT), or whose first has pairs of rows (gates)
    ("intermediate.dense", "output.dense"),
    ("gates", "narrow"),
)


def roles(module: nn.Module, axis: Axis, plan: Mapping[str, str]) -> tuple[dict[str, Role], list[AttentionLayers]]:
    """The role of every layer that has one, by path, and the attentions that are cut."""
    check(module, plan)
    role_of = {
        path: planned_role(module.get_submodule(path), path, style, axis) for path, style in planned(module, plan)
    }
    role_of |= {path: Role("replicate") for path in tied(module) if path not in role_of}
    cut = []
    for attention in attentions(module):
        paths = {attention.query, *attention.others, attention.output}
        if not paths & role_of.keys():
            role_of |= attention.roles(module, axis)
            cut.append(attention)
    for known_roles in (torch_transformer_roles(module, axis), mlp_roles(module, axis)):
        role_of |= {path: role for path, role in known_roles.items() if path not in role_of}
    role_of |= chains(module, axis, set(role_of))
    return role_of | dict(single_layer_roles(module, axis, set(role_of))), cut


def check(module: nn.Module, plan: Mapping[str, str]) -> None:
    """Refuse a plan with unknown paths or styles."""
    paths = {path for path, _ in module.named_modules()}
    for path, style in plan.items():
        if path not in paths:
            raise UsageError(f"stretto.parallel.tensor: plan names {path!r}, but the module has no such layer: "
                             f"{nearest(path, paths - {''})}")  # fmt: skip
        one_of(f"stretto.parallel.tensor: plan[{path!r}]", style, STYLES)


def planned(module: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Path and style of each layer in a plan; "replicate" holds for all layers in a module. Longer paths come last."""
    for path in sorted(plan):
        if plan[path] == "replicate":
            for inner_path, _ in module.get_submodule(path).named_modules(prefix=path):
                yield inner_path, "replicate"
        else:
            yield path, plan[path]


def planned_role(layer: nn.Module, path: str, style: str, axis: Axis) -> Role:
    """The role that a plan gives a layer. Raises UsageError if the layer does not suit the style or the axis."""
    if style == "replicate":
        return Role("replicate")
    where = f'stretto.parallel.tensor: plan["{path}"] is "{style}", but {type(layer).__name__}'
    if style == "vocabulary":
        if type(layer) is not nn.Embedding or not is_plain(layer):
            raise UsageError(f"{where} is no plain nn.Embedding (no padding_idx, max_norm, sparse gradients)")
        return Role("vocabulary", checked(axis.cuts(layer.num_embeddings), where, "rows"))
    dims = weight_dims(layer)
    if dims is None:
        raise UsageError(f"{where} is neither nn.Linear nor nn.Conv1d, nn.Conv2d, nn.Conv3d: name such a layer, "
                         'or use "replicate"')  # fmt: skip
    if groups(layer) > 1:
        role = groups_role(layer, axis)
        if style != "column" or role is None:
            raise UsageError(f'{where} has {groups(layer)} groups: only "column" can cut them, for at most '
                             f"{groups(layer)} processes; the tensor axis has {axis.size}")  # fmt: skip
        return role
    sliced = style.endswith("-sliced")
    if style.startswith("column"):
        return Role("column", checked(axis.cuts(width(layer, dims.outputs)), where, "outputs"), sliced)
    return Role("row", checked(axis.cuts(width(layer, dims.inputs)), where, "inputs"), sliced)


def checked(sizes: tuple[int, ...], where: str, what: str) -> tuple[int, ...]:
    """The sizes of a cut. Raises UsageError if a process would have none."""
    if min(sizes) == 0:
        raise UsageError(f"{where} has {sum(sizes)} {what} for {len(sizes)} processes: use at most {sum(sizes)} "
                         'on the tensor axis, or use "replicate"')  # fmt: skip
    return sizes


def tied(module: nn.Module) -> set[str]:
    """Paths of the layers that share a parameter with another; they stay whole, so that they go on sharing it."""
    owners = [(path, parameter) for path, layer in module.named_modules() for parameter in layer._parameters.values()]
    num_owners = Counter(id(parameter) for _, parameter in owners if parameter is not None)
    return {path for path, parameter in owners if num_owners.get(id(parameter), 0) > 1}


def torch_transformer_roles(module: nn.Module, axis: Axis) -> dict[str, Role]:
    """The roles of torch's own attention and of the MLP in torch's transformer layers, by path."""
    role_of: dict[str, Role] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, nn.MultiheadAttention) and type(layer) is nn.MultiheadAttention:
            if layer.num_heads < axis.size:
                raise too_few(path, layer.num_heads, axis, "heads")
            role_of[path] = Role("attention", axis.cuts(layer.num_heads))
        if isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            prefix = f"{path}." if path else ""
            role_of |= pair_roles(module, prefix + "linear1", prefix + "linear2", axis)
            if prefix + "linear1" in role_of:
                role_of[prefix + "dropout"] = Role("random")
    return role_of


def mlp_roles(module: nn.Module, axis: Axis) -> dict[str, Role]:
    """The roles of the layers of MLPs that are known by name, by path."""
    role_of: dict[str, Role] = {}
    for path, _ in module.named_modules():
        for first, second in MLP_PAIRS:
            prefix = f"{path}." if path else ""
            role_of |= pair_roles(module, prefix + first, prefix + second, axis)
    return role_of


def pair_roles(module: nn.Module, first: str, second: str, axis: Axis) -> dict[str, Role]:
    """The roles of a column and the row behind it; none unless both are linear layers whose widths fit."""
    layers = dict(module.named_modules())
    column, row = layers.get(first), layers.get(second)
    if type(column) is not nn.Linear or type(row) is not nn.Linear:
        return {}
    sizes, rows = axis.cuts(row.in_features), 2 if first.rpartition(".")[2] == "gates" else 1  # rows of a hidden unit
    if column.out_features != rows * row.in_features or row.in_features < axis.size:
        return {}
    column_sizes = tuple(rows * size for size in sizes)
    return {first: Role("column", column_sizes, sliced=True), second: Role("row", sizes, sliced=True)}


def single_layer_roles(module: nn.Module, axis: Axis, taken: set[str]) -> Iterator[tuple[str, Role]]:
    """Path and role of each layer that is in no chain: its outputs are cut and gathered again."""
    attention_prefixes = tuple(
        path + "." for path, layer in module.named_modules() if isinstance(layer, nn.MultiheadAttention)
    )
    for path, layer in module.named_modules():
        dims = weight_dims(layer)
        if path in taken or path.startswith(attention_prefixes):
            continue
        if type(layer) is nn.Embedding and path.split(".")[-1] in NAMED_EMBEDDINGS and is_plain(layer):
            sizes = axis.cuts(layer.num_embeddings)
            if min(sizes):
                yield path, Role("vocabulary", sizes)
        if dims is not None and groups(layer) > 1:
            role = groups_role(layer, axis)
            if role is not None:
                yield path, role
        elif dims is not None and width(layer, dims.outputs) >= axis.size:
            yield path, Role("column", axis.cuts(width(layer, dims.outputs)))


def groups_role(layer: nn.Module, axis: Axis) -> Role | None:
    """The role of a convolution whose groups are cut; None where it has fewer groups than there are processes."""
    if type(layer) not in CONVOLUTIONS or groups(layer) < axis.size:
        return None
    group_outputs = width(layer, 0) // groups(layer)
    return Role("groups", tuple(num_groups * group_outputs for num_groups in axis.cuts(groups(layer))))


def is_plain(layer: nn.Embedding) -> bool:
    """Whether an embedding only looks up rows: none of the options that change its forward or gradient is set."""
    return layer.padding_idx is None and layer.max_norm is None and not layer.sparse and not layer.scale_grad_by_freq
