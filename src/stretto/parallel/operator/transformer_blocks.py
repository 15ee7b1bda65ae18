"""Transformer blocks between whose cut pairs activations may be parts of the sequence.

Known by torch's class, or by the names of a block's children, all of them: this package's, GPT-2's, Llama's and its
kin's, BERT's and ViT's of Hugging Face. Besides one attention and one MLP whose layers are cut, such a block may hold
norms over features, dropouts and what has no parameters; it has to work on each token alone there.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from stretto.errors import UsageError
from stretto.parallel.operator.heads import AttentionLayers
from stretto.parallel.operator.role import Role, is_transposed

CHILDREN = (
    {"attention_norm", "attention", "mlp_norm", "mlp"},  # this package's
    {"ln_1", "attn", "ln_2", "mlp"},  # GPT-2
    {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"},  # Llama
    {"attention", "intermediate", "output"},  # BERT
    {"layernorm_before", "attention", "layernorm_after", "intermediate", "output"},  # ViT
)
NORMS = ("LayerNorm", "RMSNorm")  # how the names of their classes end


@dataclass(frozen=True)
class CutBlock:
    """A block, by path; its cut layers, the modules whose input is gathered for several of them, and the rest."""

    path: str
    module: nn.Module
    cut: tuple[str, ...]
    gates: tuple[str, ...]
    norms: tuple[str, ...]

    @property
    def batch_first(self) -> bool:
        """Whether activations are [N, T, D]."""
        attention = getattr(self.module, "self_attn", None)
        return attention.batch_first if isinstance(attention, nn.MultiheadAttention) else True


def blocks(root: nn.Module, found: Mapping[str, Role], attentions: Sequence[AttentionLayers]) -> list[CutBlock]:
    """All in a module. Raises UsageError if there is none."""
    known = [block for path, _ in root.named_modules() if (block := seen(root, path, found, attentions)) is not None]
    if not known:
        names = "; ".join(", ".join(sorted(each)) for each in CHILDREN)
        raise UsageError(
            "stretto.parallel.tensor: sequence=True, but there is no transformer block whose attention and MLP are "
            "cut. Known are nn.TransformerEncoderLayer, and modules whose children have one of these sets of names: "
            f"{names}. Use sequence=False, or let a block's forward be that of one of these"
        )
    return known


def seen(
    root: nn.Module, path: str, found: Mapping[str, Role], attentions: Sequence[AttentionLayers]
) -> CutBlock | None:
    """The block at a path, if there is a known one and nothing in it is cut in another way."""
    module, below = root.get_submodule(path), f"{path}." if path else ""
    packed = type(module) is nn.TransformerEncoderLayer
    if not packed and {name for name, _ in module.named_children()} not in CHILDREN:
        return None
    own = {each: role for each, role in found.items() if each.startswith(below) and role.style != "replicate"}
    heads = [each for each in attentions if each.query.startswith(below)]
    inside = [below + "self_attn"] if packed else [each.path for each in heads]
    if len(inside) != 1 or (packed and inside[0] not in own):
        return None
    of_heads = {inside[0]} if packed else {heads[0].query, *heads[0].others, heads[0].output}
    columns, rows = (
        [each for each, role in own.items() if role.style == style and role.sliced and each not in of_heads]
        for style in ("column", "row")
    )
    gate = gate_of(columns, rows, path)
    cut = {*of_heads, *columns, *rows}
    norms = [each for each in holders(root, below) if each not in cut and not (packed and within(each, inside[0]))]
    random = {each for each, role in own.items() if role.style == "random"}
    linear = all(
        type(layer := root.get_submodule(each)) is nn.Linear or is_transposed(layer) for each in (*columns, *rows)
    )
    if (
        gate is None
        or not linear
        or own.keys() - cut - random
        or not all(normal(root, each, inside[0]) for each in norms)
    ):
        return None
    return CutBlock(path, module, tuple(cut), (*inside, *gate) if not packed else gate, tuple(norms))


def gate_of(columns: Sequence[str], rows: Sequence[str], path: str) -> tuple[str, ...] | None:
    """What gathers the input of an MLP: its column, or the module that holds several; None where it is no MLP."""
    if len(rows) != 1 or not columns:
        return None
    if len(columns) == 1:
        return ()
    above = {each.rpartition(".")[0] for each in (*columns, *rows)}
    return tuple(above) if len(above) == 1 and above != {path} else None


def holders(root: nn.Module, below: str) -> Iterator[str]:
    """Modules in a block that have parameters of their own."""
    for path, layer in root.named_modules():
        if path.startswith(below) and any(each is not None for each in layer._parameters.values()):
            yield path


def within(path: str, module: str) -> bool:
    """Whether a path is that of a module or of something in it."""
    return path == module or path.startswith(f"{module}.")


def normal(root: nn.Module, path: str, attention: str) -> bool:
    """Whether a layer is a norm over features, used on parts of the sequence."""
    return type(root.get_submodule(path)).__name__.endswith(NORMS) and not within(path, attention)


def runs(root: nn.Module, known: Sequence[CutBlock]) -> Iterator[tuple[nn.Module | None, list[CutBlock]]]:
    """Blocks that certainly follow each other, with the container that runs them; others one by one, with None."""
    uses = Counter(id(each) for module in root.modules() for each in module._modules.values())
    left = {id(block.module): block for block in known}
    for container in root.modules():
        if runs_in_turn(container):
            together: list[CutBlock] = []
            for child in (*in_turn(container), None):
                block = left.get(id(child))
                if block is not None and uses[id(child)] == 1 and (not together or alike(block, together[0])):
                    together.append(block)
                    continue
                if len(together) > 1:
                    yield container, together
                    for each in together:
                        del left[id(each.module)]
                together = [] if block is None or uses[id(child)] > 1 else [block]
    yield from ((None, [block]) for block in left.values())


def alike(block: CutBlock, other: CutBlock) -> bool:
    """Whether activations have the same order of dims."""
    return block.batch_first == other.batch_first


def runs_in_turn(container: nn.Module) -> bool:
    """Whether a module gives each child's output to the next, and nothing else."""
    encoder = type(container) is nn.TransformerEncoder
    return encoder or (isinstance(container, nn.Sequential) and type(container).forward is nn.Sequential.forward)


def in_turn(container: nn.Module) -> Iterator[nn.Module | None]:
    """What such a module runs."""
    layers = container.layers if isinstance(container, nn.TransformerEncoder) else container
    yield from layers._modules.values()
