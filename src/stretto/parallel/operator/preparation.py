"""What a script uses: prepare a module for the tensor axis of a mesh, and put its parameters together again."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from stretto.errors import UsageError
from stretto.options.checks import flag, mapping, of_kind, one_of
from stretto.parallel.operator import attention, cut_layers, styles
from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.chosen_styles import roles
from stretto.parallel.operator.piece import pieces
from stretto.parallel.operator.randomness import draw_apart
from stretto.parallel.operator.role import Role
from stretto.parallel.operator.sequence import install as open_up
from stretto.parallel.operator.sequence import spans
from stretto.parallel.operator.span import Between
from stretto.parallel.operator.transformer_blocks import blocks

PARAMETERS = ("dtensor", "local")


def tensor(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, str] | None = None,
    parameters: Literal["dtensor", "local"] = "dtensor",
    sequence: bool = False,
) -> nn.Module:
    """Cut the weights of `module`, in place, over the mesh's axis "tensor"; names stay, and it is returned.

    What goes in and what comes out are plain tensors, whole and the same on every process of the axis. Every process
    has to run the same forwards and backwards in the same order, and to draw random numbers alike (seed them alike):
    dropout of whole activations is then the same everywhere. All start with the weights of the axis's first process.

    Chosen automatically: in attention heads are cut; layers that follow each other with nothing between that mixes
    channels are cut by outputs, then by inputs, with one sum behind; every other linear layer and convolution by its
    outputs, which are put together again; embeddings of tokens, known by name, by rows. Norms, and layers that share
    weights or are smaller than the axis, stay whole. `plan` says otherwise for single layers: "column", "row" (whole
    tensors in and out), "column-sliced", "row-sliced" (a pair that passes parts on), "vocabulary", "replicate" (of a
    module: for all in it).

    After a backward every process holds one device's gradients of what it holds. Linear layers that the axis divides
    are cut by torch's own styles and have DTensor parameters (`.to_local()`, `.full_tensor()`), everything else has
    plain ones; with parameters="local" all are plain. Optimizers that work on each element, like SGD and Adam, step
    either as they are; what needs a norm over all weights (clipping, LARS) sees this process's parts only.

    With `sequence` known transformer blocks (`blocks`: torch's encoder layer, this package's, GPT-2, Llama, BERT, ViT)
    keep activations between their cut pairs as parts of the sequence, of any length: norms, dropouts and residuals are
    computed and kept once, not on every process. Parts pass from block to block in nn.Sequential and
    nn.TransformerEncoder; what any other module gives a block and gets from it is whole. Such blocks' parameters are
    plain. Raises UsageError where a plan does not fit, a process would have no head, or no block is known.
    """
    axis = Axis.of(mesh)
    of_kind("stretto.parallel.tensor: module", module, nn.Module, "an nn.Module")
    one_of("stretto.parallel.tensor: parameters", parameters, PARAMETERS)
    flag("stretto.parallel.tensor: sequence", sequence)
    if plan is not None:
        mapping("stretto.parallel.tensor: plan", plan, 'a dict of styles by path, {"0": "column"}')
    if any(True for _ in pieces(module)) or any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise UsageError(
            "stretto.parallel.tensor: this module, or a part of it, has been prepared already: once is all"
        )
    role_of, attentions = roles(module, axis, plan or {})
    known = blocks(module, role_of, attentions) if sequence else []
    if axis.size == 1:
        return module
    axis.align(*module.parameters(), *module.buffers())
    modules = dict(module.named_modules())
    span_of = spans(module, known, axis)
    between = {path: span_of[block.path] for block in known for path in block.cut}
    for path, role in role_of.items():
        install(modules[path], role, axis, between.get(path), torch_styles=parameters == "dtensor")
    for cut in attentions:
        cut.adjust(role_of[cut.query], role_of[cut.others[0] if cut.others else cut.query], axis)
        draw_apart(cut.module, axis, until=modules[cut.output])
    for block in known:
        open_up(module, block, span_of[block.path], role_of)
    return module


def install(layer: nn.Module, role: Role, axis: Axis, between: Between | None, *, torch_styles: bool) -> None:
    """Let a layer play its role."""
    if role.style == "random":
        draw_apart(layer, axis)
    elif role.style == "attention":
        assert isinstance(layer, nn.MultiheadAttention)
        attention.share(layer, role, axis, between)
    elif role.style != "replicate" and torch_styles and between is None and styles.fits(layer, role):
        styles.distribute(layer, role, axis)
    elif role.style != "replicate":
        cut_layers.cut(layer, role, axis, between)


def gather(module: nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
    """The state_dict that the module would have on one device, in plain tensors; every process has to ask.

    With `gradients` those of all parameters that have one, by the same names.
    """
    of_kind("stretto.parallel.gather: module", module, nn.Module, "an nn.Module")
    flag("stretto.parallel.gather: gradients", gradients)
    unmade = next((name for name, parameter in module.named_parameters() if is_lazy(parameter)), None)
    if unmade is not None:
        raise UsageError(f"stretto.parallel.gather: {unmade} has no shape yet (a lazy module): run one batch first")
    cut = dict(pieces(module))
    held: dict[str, Tensor] = module.state_dict(keep_vars=True)
    if gradients:
        held = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    whole: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, value in held.items():
            if isinstance(value, DTensor):
                whole[name] = value.full_tensor().detach()
            else:
                whole[name] = cut[name].whole(value.detach()) if name in cut else value.detach()
    return whole
