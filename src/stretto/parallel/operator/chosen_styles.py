"""Who does what: what the user says, then attention, then chains, then every layer that is left by itself."""

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn

from stretto.errors import UsageError, nearest
from stretto.options.checks import one_of
from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.chains import chains
from stretto.parallel.operator.heads import AttentionLayers, attentions, too_few
from stretto.parallel.operator.role import CONVOLUTIONS, Role, groups, kind, width

STYLES = ("column", "row", "column-sliced", "row-sliced", "vocabulary", "replicate")
NAMED_EMBEDDINGS = ("wte", "embed_tokens", "word_embeddings", "tok_embeddings", "token")
BETWEEN = (("intermediate.dense", "output.dense"),)  # halves of an MLP in modules of their own (BERT, ViT)


def roles(module: nn.Module, axis: Axis, said: Mapping[str, str]) -> tuple[dict[str, Role], list[AttentionLayers]]:
    """The role of every layer that has one, by path, and the attentions that are cut."""
    check(module, said)
    found = {path: told(module.get_submodule(path), path, style, axis) for path, style in leaves(module, said)}
    found |= {path: Role("replicate") for path in tied(module) if path not in found}
    cut = []
    for attention in attentions(module):
        paths = {attention.query, *attention.others, attention.output}
        if not paths & found.keys():
            found |= attention.roles(module, axis)
            cut.append(attention)
    for more in (packed(module, axis), halves(module, axis)):
        found |= {path: role for path, role in more.items() if path not in found}
    found |= chains(module, axis, set(found))
    return found | dict(alone(module, axis, set(found))), cut


def check(module: nn.Module, said: Mapping[str, str]) -> None:
    """Refuse paths and styles that are not there."""
    known = {path for path, _ in module.named_modules()}
    for path, style in said.items():
        if path not in known:
            raise UsageError(f"stretto.parallel.tensor: plan names {path!r}, and no such layer is there: "
                             f"{nearest(path, known - {''})}")  # fmt: skip
        one_of(f"stretto.parallel.tensor: plan[{path!r}]", style, STYLES)


def leaves(module: nn.Module, said: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What is said of layers, and what "replicate" said of a module means for all in it; the longer path wins."""
    for path in sorted(said):
        if said[path] == "replicate":
            for below, _ in module.get_submodule(path).named_modules(prefix=path):
                yield below, "replicate"
        else:
            yield path, said[path]


def told(layer: nn.Module, path: str, style: str, axis: Axis) -> Role:
    """The role that the user wants."""
    if style == "replicate":
        return Role("replicate")
    where = f'stretto.parallel.tensor: plan["{path}"] is "{style}", but {type(layer).__name__}'
    if style == "vocabulary":
        if type(layer) is not nn.Embedding or not plain(layer):
            raise UsageError(f"{where} is no plain nn.Embedding (no padding_idx, max_norm, sparse gradients)")
        return Role("vocabulary", enough(axis.cuts(layer.num_embeddings), where, "rows"))
    known = kind(layer)
    if known is None:
        raise UsageError(f"{where} is neither nn.Linear nor nn.Conv1d, 2d, 3d: split it as part of its parent, "
                         'or say "replicate"')  # fmt: skip
    sliced, dim = style.endswith("-sliced"), known.outputs if style.startswith("column") else known.inputs
    if groups(layer) > 1:
        role = grouped(layer, axis)
        if style != "column" or role is None:
            raise UsageError(f'{where} has {groups(layer)} groups: only "column" can cut them, for at most as many '
                             f"processes; here are {axis.size}")  # fmt: skip
        return role
    what = "outputs" if style.startswith("column") else "inputs"
    sizes = enough(axis.cuts(width(layer, dim)), where, what)
    return Role("column" if style.startswith("column") else "row", sizes, sliced)


def enough(sizes: tuple[int, ...], where: str, what: str) -> tuple[int, ...]:
    """Refuse a cut that leaves a process nothing."""
    if min(sizes) == 0:
        raise UsageError(f"{where} has {sum(sizes)} {what} for {len(sizes)} processes: use at most {sum(sizes)} "
                         'on the tensor axis, or say "replicate"')  # fmt: skip
    return sizes


def tied(module: nn.Module) -> set[str]:
    """Layers that share a parameter with another: left whole, so that they go on sharing it."""
    owners = [(path, weight) for path, layer in module.named_modules() for weight in layer._parameters.values()]
    uses = Counter(id(weight) for _, weight in owners if weight is not None)
    return {path for path, weight in owners if uses.get(id(weight), 0) > 1}


def packed(module: nn.Module, axis: Axis) -> dict[str, Role]:
    """torch's own attention and the two linear layers of its transformer layers."""
    found: dict[str, Role] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, nn.MultiheadAttention) and type(layer) is nn.MultiheadAttention:
            if layer.num_heads < axis.size:
                raise too_few(path, layer.num_heads, axis, "heads")
            found[path] = Role("attention", axis.cuts(layer.num_heads))
        if isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            below = f"{path}." if path else ""
            found |= pair(module, below + "linear1", below + "linear2", axis)
            if below + "linear1" in found:
                found[below + "dropout"] = Role("random")
    return found


def halves(module: nn.Module, axis: Axis) -> dict[str, Role]:
    """MLPs whose layers stand in modules of their own, known by name."""
    found: dict[str, Role] = {}
    for path, _ in module.named_modules():
        for first, second in BETWEEN:
            below = f"{path}." if path else ""
            found |= pair(module, below + first, below + second, axis)
    return found


def pair(module: nn.Module, first: str, second: str, axis: Axis) -> dict[str, Role]:
    """A column and a row, if both are there and fit."""
    layers = dict(module.named_modules())
    column, row = layers.get(first), layers.get(second)
    if type(column) is not nn.Linear or type(row) is not nn.Linear:
        return {}
    if column.out_features != row.in_features or column.out_features < axis.size:
        return {}
    sizes = axis.cuts(column.out_features)
    return {first: Role("column", sizes, sliced=True), second: Role("row", sizes, sliced=True)}


def alone(module: nn.Module, axis: Axis, taken: set[str]) -> Iterator[tuple[str, Role]]:
    """Layers that stand by themselves: outputs cut, and put together again."""
    inside = tuple(path + "." for path, layer in module.named_modules() if isinstance(layer, nn.MultiheadAttention))
    for path, layer in module.named_modules():
        known = kind(layer)
        if path in taken or path.startswith(inside):
            continue
        if type(layer) is nn.Embedding and path.split(".")[-1] in NAMED_EMBEDDINGS and plain(layer):
            sizes = axis.cuts(layer.num_embeddings)
            if min(sizes):
                yield path, Role("vocabulary", sizes)
        if known is not None and groups(layer) > 1:
            role = grouped(layer, axis)
            if role is not None:
                yield path, role
        elif known is not None and width(layer, known.outputs) >= axis.size:
            yield path, Role("column", axis.cuts(width(layer, known.outputs)))


def grouped(layer: nn.Module, axis: Axis) -> Role | None:
    """A convolution's groups, if there are enough."""
    if type(layer) not in CONVOLUTIONS or groups(layer) < axis.size:
        return None
    each = width(layer, 0) // groups(layer)
    return Role("groups", tuple(size * each for size in axis.cuts(groups(layer))))


def plain(layer: nn.Embedding) -> bool:
    """Whether an embedding is a table and nothing more."""
    return layer.padding_idx is None and layer.max_norm is None and not layer.sparse and not layer.scale_grad_by_freq
