"""The public functions: cut a module over the tensor axis of a mesh, and gather its parameters or gradients."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from stretto.errors import UsageError
from stretto.nn.sharded_modules import is_share
from stretto.options.checks import flag, mapping, of_kind, one_of
from stretto.parallel.operator import cut_layers
from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.chosen_styles import roles
from stretto.parallel.operator.piece import pieces
from stretto.parallel.operator.randomness import draw_apart
from stretto.parallel.operator.role import Role
from stretto.parallel.operator.sequence import blocks, share_parts
from stretto.parallel.operator.sequence import install as install_sequence
from stretto.parallel.operator.span import Boundary

PARAMETERS = ("dtensor", "local")


def tensor(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, str] | None = None,
    parameters: Literal["dtensor", "local"] = "dtensor",
    sequence: bool = False,
) -> nn.Module:
    """Cut the weights of `module`, in place, over the mesh's axis "tensor", and return it; parameters keep their names.

    Inputs and outputs are plain tensors, whole and the same on every process of the axis. Every process has to run the
    same forwards and backwards in the same order, with random generators in the same state (seed them alike): dropout
    of whole activations is then the same everywhere. All start with the weights of the axis's first process.

    Layers are cut automatically. Attention is cut by heads. Consecutive layers are cut by outputs and then by inputs,
    with one all-reduce behind, if operations between them treat each channel alone. Every other linear layer and
    convolution is cut by its outputs, which are gathered; embeddings of tokens, known by name, by rows. Norms outside
    such chains, layers that share weights, and layers with fewer channels than processes stay whole. `plan` overrides
    this for single layers, a style by path: "column", "row" (whole tensors in and out), "column-sliced", "row-sliced"
    (a pair that passes parts on), "vocabulary", "replicate" (for a module: all layers in it).

    After a backward every process holds the gradients of its own parts, equal to those of one device. Linear layers
    whose channels the axis divides are cut by torch's own styles and have DTensor parameters (`.to_local()`,
    `.full_tensor()`); all other parameters are plain, and with parameters="local" all are. Optimizers that work on each
    element, like SGD and Adam, can step both kinds; a norm over all weights (clipping, LARS) sees this process's parts
    only.

    With `sequence` known transformer blocks (torch's encoder layer, this package's, GPT-2, Llama, BERT, ViT) keep
    activations outside their cut pairs as parts of the sequence, which may have any length: each process computes and
    keeps only its tokens of norms, dropouts and residuals. Blocks in nn.Sequential and nn.TransformerEncoder pass parts
    to each other; all other modules give and get whole activations. The parameters of such blocks are plain.

    Raises UsageError where a plan does not fit, a process would have no head, or `sequence` finds no known block.
    """
    axis = Axis.of(mesh)
    of_kind("stretto.parallel.tensor: module", module, nn.Module, "an nn.Module")
    one_of("stretto.parallel.tensor: parameters", parameters, PARAMETERS)
    flag("stretto.parallel.tensor: sequence", sequence)
    if plan is not None:
        mapping("stretto.parallel.tensor: plan", plan, 'a dict of styles by path, {"0": "column"}')
    if any(True for _ in pieces(module)) or any(map(is_share, module.parameters())):
        raise UsageError(
            "stretto.parallel.tensor: this module, or a part of it, has been prepared already: prepare a module once"
        )
    return cut_module(module, axis, plan or {}, torch_styles=parameters == "dtensor", sequence=sequence)


def cut_module(
    module: nn.Module, axis: Axis, plan: Mapping[str, str], *, torch_styles: bool = False, sequence: bool = False
) -> nn.Module:
    """Cut the weights of `module`, in place, as `tensor` says; with `torch_styles` by torch's own where they fit."""
    role_of, attentions = roles(module, axis, plan)
    sequence_blocks = blocks(module, role_of, attentions) if sequence else []
    if axis.size == 1:
        return module
    axis.align(*module.parameters(), *module.buffers())
    modules = dict(module.named_modules())
    parts_of = share_parts(module, sequence_blocks, axis)
    boundary_of = {path: parts_of[block.path] for block in sequence_blocks for path in block.cut}
    for path, role in role_of.items():
        install(modules[path], role, axis, boundary_of.get(path), torch_styles=torch_styles)
    for layers in attentions:
        key = layers.others[0] if layers.others else layers.query
        layers.adjust(role_of[layers.query], role_of[key], axis)
        draw_apart(layers.module, axis, until=modules[layers.output])
    for block in sequence_blocks:
        install_sequence(module, block, parts_of[block.path], role_of)
    return module


def install(layer: nn.Module, role: Role, axis: Axis, boundary: Boundary | None, *, torch_styles: bool) -> None:
    if role.style == "random":
        draw_apart(layer, axis)
    elif role.style == "attention":
        assert isinstance(layer, nn.MultiheadAttention)
        cut_layers.share_heads(layer, role, axis, boundary)
    elif role.style != "replicate" and torch_styles and boundary is None and equal_parts(layer, role):
        from stretto.parallel.operator import styles  # torch's DTensors take a second to import

        styles.distribute(layer, role, axis)
    elif role.style != "replicate":
        cut_layers.cut(layer, role, axis, boundary)


def equal_parts(layer: nn.Module, role: Role) -> bool:
    """Whether one of torch's styles can cut a layer for its role: the parts of a linear layer are equal."""
    equal = len(set(role.sizes)) == 1 and role.blocks == 1
    return equal and type(layer) is nn.Linear and role.style in ("column", "row")


def gather(module: nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
    """The state_dict that the module would have on one device, in plain tensors; every process has to call it.

    With `gradients`, the whole gradients of the parameters that have one, by the parameters' names.
    """
    of_kind("stretto.parallel.gather: module", module, nn.Module, "an nn.Module")
    flag("stretto.parallel.gather: gradients", gradients)
    cut = dict(pieces(module))
    local: dict[str, Tensor] = module.state_dict(keep_vars=True)
    unmade = next((name for name, value in local.items() if is_lazy(value)), None)
    if unmade is not None:
        raise UsageError(f"stretto.parallel.gather: {unmade} has no shape yet (a lazy module): run one batch first")
    if gradients:
        local = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    whole: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, value in local.items():
            if is_share(value):
                share: Any = value
                whole[name] = share.full_tensor().detach()
            else:
                whole[name] = cut[name].whole(value.detach()) if name in cut else value.detach()
    return whole
