"""Hooks that let known transformer blocks work on parts of the sequence outside their cut pairs.

A block is known by torch's class, or by the names of all its children: this package's, and Hugging Face's GPT-2, Llama
and its kin, BERT and ViT. Besides one attention and one MLP whose layers are cut, it may hold norms over features,
dropouts and modules without parameters. What it computes outside the cut pairs has to treat each token alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.heads import AttentionLayers
from stretto.parallel.operator.randomness import draw_apart
from stretto.parallel.operator.role import Role, is_transposed
from stretto.parallel.operator.span import SequenceParts

CHILDREN = (
    {"attention_norm", "attention", "mlp_norm", "mlp"},  # this package's
    {"attention_norm", "attention", "attention_sum", "mlp_norm", "mlp", "mlp_sum"},  # of its decoders and encoders
    {"ln_1", "attn", "ln_2", "mlp"},  # GPT-2
    {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"},  # Llama
    {"attention", "intermediate", "output"},  # BERT
    {"layernorm_before", "attention", "layernorm_after", "intermediate", "output"},  # ViT
)
NORMS = ("LayerNorm", "RMSNorm", "ResidualSum")  # endings of class names; sums of a stream and a branch have a bias


@dataclass(frozen=True)
class CutBlock:
    """A transformer block, with the paths of its layers by what they need.

    `cut`: the layers whose weights are cut. `gates`: modules that hold several columns, whose input is gathered once.
    `norms`: norms on parts of the sequence.
    """

    path: str
    module: nn.Module
    cut: tuple[str, ...]
    gates: tuple[str, ...]
    norms: tuple[str, ...]

    @property
    def batch_first(self) -> bool:
        """Whether activations are [N, T, D], not [T, N, D]."""
        attention = getattr(self.module, "self_attn", None)
        return attention.batch_first if isinstance(attention, nn.MultiheadAttention) else True


def blocks(root: nn.Module, roles: Mapping[str, Role], attentions: Sequence[AttentionLayers]) -> list[CutBlock]:
    """The known transformer blocks of a module. Raises UsageError if there is none."""
    known = [
        block for path, _ in root.named_modules() if (block := block_at(root, path, roles, attentions)) is not None
    ]
    if not known:
        names = "; ".join(", ".join(sorted(children)) for children in CHILDREN)
        raise UsageError(
            "stretto.parallel.tensor: sequence=True, but there is no transformer block whose attention and MLP are "
            "cut. Known are nn.TransformerEncoderLayer, and modules whose children have one of these sets of names: "
            f"{names}. Use sequence=False, or give the blocks children of these names"
        )
    return known


def block_at(
    root: nn.Module, path: str, roles: Mapping[str, Role], attentions: Sequence[AttentionLayers]
) -> CutBlock | None:
    """The block at a path; None unless it is a known one in which nothing but an attention and an MLP is cut."""
    module, prefix = root.get_submodule(path), f"{path}." if path else ""
    packed = type(module) is nn.TransformerEncoderLayer
    if not packed and {name for name, _ in module.named_children()} not in CHILDREN:
        return None
    cut_roles = {inner: role for inner, role in roles.items() if inner.startswith(prefix) and role.style != "replicate"}
    cut_attentions = [attention for attention in attentions if attention.query.startswith(prefix)]
    attention_paths = [prefix + "self_attn"] if packed else [attention.path for attention in cut_attentions]
    if len(attention_paths) != 1 or (packed and attention_paths[0] not in cut_roles):
        return None
    attention_path = attention_paths[0]
    if packed:
        attention_layers = {attention_path}
    else:
        attention_layers = {cut_attentions[0].query, *cut_attentions[0].others, cut_attentions[0].output}
    columns, rows = (
        [
            inner
            for inner, role in cut_roles.items()
            if role.style == style and role.sliced and inner not in attention_layers
        ]
        for style in ("column", "row")
    )
    gate = gate_of(columns, rows, path)
    cut = {*attention_layers, *columns, *rows}
    norms = [
        holder
        for holder in parameter_holders(root, prefix)
        if holder not in cut and not (packed and within(holder, attention_path))
    ]
    random = {inner for inner, role in cut_roles.items() if role.style == "random"}
    linear = all(
        type(layer := root.get_submodule(inner)) is nn.Linear or is_transposed(layer) for inner in (*columns, *rows)
    )
    if (
        gate is None
        or not linear
        or cut_roles.keys() - cut - random
        or any(within(norm, attention_path) for norm in norms)
        or not all(type(root.get_submodule(norm)).__name__.endswith(NORMS) for norm in norms)
    ):
        return None
    return CutBlock(path, module, tuple(cut), (attention_path, *gate) if not packed else gate, tuple(norms))


def gate_of(columns: Sequence[str], rows: Sequence[str], path: str) -> tuple[str, ...] | None:
    """The module that holds all columns of an MLP; () where one column gathers its own input; None if it is no MLP."""
    if len(rows) != 1 or not columns:
        return None
    if len(columns) == 1:
        return ()
    parents = {layer.rpartition(".")[0] for layer in (*columns, *rows)}
    return tuple(parents) if len(parents) == 1 and parents != {path} else None


def parameter_holders(root: nn.Module, prefix: str) -> Iterator[str]:
    """Paths of the modules in a block that have parameters themselves, not only in children."""
    for path, layer in root.named_modules():
        if path.startswith(prefix) and any(parameter is not None for parameter in layer._parameters.values()):
            yield path


def within(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def runs(root: nn.Module, cut_blocks: Sequence[CutBlock]) -> Iterator[tuple[nn.Module | None, list[CutBlock]]]:
    """Container and blocks of each run of blocks that follow each other; each other block alone, with None."""
    num_parents = Counter(id(child) for module in root.modules() for child in module._modules.values())
    remaining = {id(block.module): block for block in cut_blocks}
    for container in root.modules():
        if runs_in_turn(container):
            together: list[CutBlock] = []
            for child in (*in_turn(container), None):
                block = remaining.get(id(child))
                if (
                    block is not None
                    and num_parents[id(child)] == 1
                    and (not together or block.batch_first == together[0].batch_first)
                ):
                    together.append(block)
                    continue
                if len(together) > 1:
                    yield container, together
                    for member in together:
                        del remaining[id(member.module)]
                together = [] if block is None or num_parents[id(child)] > 1 else [block]
    yield from ((None, [block]) for block in remaining.values())


def runs_in_turn(container: nn.Module) -> bool:
    """Whether a module's forward only gives each child's output to the next child."""
    encoder = type(container) is nn.TransformerEncoder
    return encoder or (isinstance(container, nn.Sequential) and type(container).forward is nn.Sequential.forward)


def in_turn(container: nn.Module) -> Iterator[nn.Module | None]:
    """The children of such a module, in the order in which they run."""
    layers = container.layers if isinstance(container, nn.TransformerEncoder) else container
    yield from layers._modules.values()


INPUTS = ("hidden_states", "src", "x", "input")


def share_parts(root: nn.Module, blocks: Sequence[CutBlock], axis: Axis) -> dict[str, SequenceParts]:
    """The SequenceParts of every block, by path, with the hooks that cut its input and gather its output.

    Blocks that follow each other share one, and pass parts on.
    """
    parts_of: dict[str, SequenceParts] = {}
    for container, together in runs(root, blocks):
        parts = SequenceParts(axis, together[0].batch_first)
        parts_of |= {block.path: parts for block in together}
        if container is not None:
            container.register_forward_pre_hook(partial(set_running, parts, True))
            container.register_forward_hook(partial(set_running, parts, False), always_call=True)
        for block in together:
            block.module.register_forward_pre_hook(CutInput(parts, block is together[0]), with_kwargs=True)
            block.module.register_forward_hook(partial(gather_sequence, parts, block is together[-1]))
    return parts_of


def install(root: nn.Module, block: CutBlock, parts: SequenceParts, roles: Mapping[str, Any]) -> None:
    """Let the uncut modules of a block work on parts of the sequence."""
    for path in block.gates:
        root.get_submodule(path).register_forward_pre_hook(partial(gather_input, parts), with_kwargs=True)
    for path in block.norms:
        norm = root.get_submodule(path)
        norm.__class__ = with_summed_gradients(type(norm), tuple(norm._parameters))  # type: ignore[arg-type]
        norm.__dict__["boundary"] = parts
    for path, layer in block.module.named_modules(prefix=block.path):
        if isinstance(layer, nn.Dropout) and layer.p and path not in roles:
            draw_apart(layer, parts.axis, all_draw=False)


@cache  # layers of one class stay of one class
def with_summed_gradients(norm_class: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass whose parameters, when its forward reads them, have their gradients summed over processes.

    The parameters stay in `_parameters`: properties of these names come before nn.Module.__getattr__.
    """

    def property_of(name: str) -> property:
        def get(layer: nn.Module) -> Tensor | None:
            parameter = layer._parameters[name]
            return None if parameter is None else layer.__dict__["boundary"].used(parameter)

        return property(get)

    properties = {name: property_of(name) for name in names}
    return type(norm_class.__name__, (norm_class,), {"__module__": norm_class.__module__, **properties})


def place_of_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    """Index or keyword of the activations among a block's arguments. Raises UsageError if no known keyword is given."""
    if args:
        return 0
    name = next((keyword for keyword in INPUTS if keyword in kwargs), None)
    if name is None:
        raise UsageError(
            f"sequence=True: a block is called with the keywords {', '.join(sorted(kwargs))}; "
            f"its activations have to be the first positional argument or one of the keywords {', '.join(INPUTS)}"
        )
    return name


def with_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block, with its activations changed."""
    place = place_of_input(args, kwargs)
    if isinstance(place, str):
        return args, {**kwargs, place: change(kwargs[place])}
    return (change(args[0]), *args[1:]), kwargs


# Hooks, whose arguments before the layer are bound.
def set_running(parts: SequenceParts, begins: bool, *call: Any) -> None:
    """Mark the beginning or the end of the forward of a container of blocks."""
    parts.running = begins


def gather_sequence(parts: SequenceParts, last: bool, layer: nn.Module, args: Any, output: Any) -> Any:
    """Gather the output of a block, unless the next block takes parts."""
    if parts.running and not last:
        return None
    return (parts.whole(output[0]), *output[1:]) if isinstance(output, tuple) else parts.whole(output)


def gather_input(parts: SequenceParts, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather the input of a module that holds several columns of a pair, once for all of them."""
    return with_input(args, kwargs, parts.enter)


@dataclass(frozen=True, eq=False)
class CutInput:
    """A hook that cuts the input of a block, unless the block before has passed on its part."""

    parts: SequenceParts
    first: bool

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if self.parts.running and not self.first else with_input(args, kwargs, self.parts.cut)
