"""Muon for the matrices of hidden layers, and AdamW for everything else."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError, nearest
from stretto.optim.combined import CombinedOptimizer
from stretto.optim.layerwise import check_betas, check_range, check_real, explaining_params
from stretto.optim.parameter_labels import MATRIX, Label
from stretto.options.checks import flag, one_of, sequence, shown

REMEDY = "give labels=stretto.optim.parameter_labels_of(model), or exclude=[...], the embeddings and the output layer"


def muon(
    params: Iterable[Any],
    lr: float = 0.001,
    *,
    labels: Sequence[Label] | None = None,
    exclude: Iterable[str | Tensor] | None = None,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    adjust_lr_fn: str = "match_rms_adamw",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> CombinedOptimizer:
    """torch.optim.Muon for the matrices of hidden layers, torch.optim.AdamW for all other parameters.

    Others are embeddings, the output layer, norms, biases, and kernels of convolutions, as torch's Muon takes
    parameters of two dims only. With the default `adjust_lr_fn` a step of Muon is as long as one of AdamW (Liu et al.
    2025, arXiv 2502.16982), so that one rate and one weight decay suit both; "original" wants some 20 times the rate.

    Args:
        params: parameters, or (name, parameter) pairs. A Trainer gives them.
        lr: learning rate of both.
        labels: one for each of `params`, as `stretto.optim.parameter_labels_of` makes them. A Trainer gives them.
        exclude: instead of labels: the matrices that AdamW steps, as parameters or, with pairs, as names of
            parameters or of modules. [] for none.
        momentum, nesterov, adjust_lr_fn: of Muon.
        weight_decay: of both, for all parameters.
        betas, eps: of AdamW.

    Raises UsageError for labels or an `exclude` that do not fit, and if called without labels for parameters without a
    matrix. The optimizer of a stage that has none is AdamW alone.
    """
    check_options(lr, momentum, weight_decay, eps)
    check_betas(betas)
    flag("nesterov", nesterov)
    one_of("adjust_lr_fn", adjust_lr_fn, ("match_rms_adamw", "original"))
    with explaining_params(params):
        named = with_names(params)
    hidden = chosen(named, labels, exclude)
    matrices = [parameter for (_, parameter), is_hidden in zip(named, hidden, strict=True) if is_hidden]
    others = [parameter for (_, parameter), is_hidden in zip(named, hidden, strict=True) if not is_hidden]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(
            torch.optim.Muon(
                matrices, lr, weight_decay, momentum, nesterov, adjust_lr_fn=adjust_lr_fn
            )
        )  # fmt: skip
    if others:
        made.append(torch.optim.AdamW(others, lr, betas, eps, weight_decay))
    combined = CombinedOptimizer(made)
    check_real(combined.param_groups)
    return combined


def check_options(lr: float, momentum: float, weight_decay: float, eps: float) -> None:
    """Raise UsageError for a hyperparameter out of range."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
        check_range(name, value, 0, float("inf"))
    check_range("momentum", momentum, 0, 1)


def with_names(params: Iterable[Any]) -> list[tuple[str, Tensor]]:
    """(name, parameter) pairs; the name is empty where there is none. Raises TypeError for anything else."""
    pairs = [entry if isinstance(entry, tuple) else ("", entry) for entry in params]
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], Tensor):
            raise TypeError(f"muon takes parameters or (name, parameter) pairs, not {type(pair[-1]).__name__}")
    if not pairs:
        raise ValueError("muon got an empty list of parameters")
    return pairs


def chosen(
    named: Sequence[tuple[str, Tensor]], labels: Sequence[Label] | None, exclude: Iterable[str | Tensor] | None
) -> list[bool]:
    """Whether Muon steps each parameter. Raises UsageError where labels and `exclude` do not say it."""
    matrices = [parameter.dim() == MATRIX for _, parameter in named]
    if labels is not None and exclude is not None:
        raise UsageError(
            "muon: labels= and exclude= both say which matrices are hidden: give one of them; with labels, change "
            "those of what you exclude, dataclasses.replace(label, role='output')"
        )
    if labels is not None:
        check_labels(named, labels)
        return [label.is_hidden_matrix for label in labels]
    if exclude is None:
        raise UsageError(
            f"muon: which of {sum(matrices)} matrices belong to hidden layers cannot be seen from parameters alone: "
            f"{REMEDY}; exclude=[] for none"
        )
    excluded = excluded_by(named, exclude)
    hidden = [is_matrix and id(p) not in excluded for is_matrix, (_, p) in zip(matrices, named, strict=True)]
    if not any(hidden):
        raise UsageError(
            f"muon: none of {len(named)} parameters is a matrix of a hidden layer ({sum(matrices)} are matrices, all "
            "excluded): use torch.optim.AdamW, or exclude fewer"
        )
    return hidden


def check_labels(named: Sequence[tuple[str, Tensor]], labels: Sequence[Label]) -> None:
    """Raise UsageError for what is no list of one label a parameter."""
    sequence("muon: labels", labels, f"a list of a stretto.optim.Label for each parameter: {REMEDY}")
    for index, label in enumerate(labels):
        if not isinstance(label, Label):
            raise UsageError(f"muon: labels[{index}]={shown(label)} is no stretto.optim.Label: {REMEDY}")
    if len(labels) != len(named):
        raise UsageError(f"muon: {len(labels)} labels for {len(named)} parameters: give one for each, in their order")
    for label, (_, parameter) in zip(labels, named, strict=True):
        if label.dims != parameter.dim():
            raise UsageError(
                f"muon: the label of {label.name} is of a parameter of {label.dims} dims, and the parameter in its "
                f"place is {list(parameter.shape)}: give labels in the order of the parameters"
            )


def excluded_by(named: Sequence[tuple[str, Tensor]], exclude: Iterable[str | Tensor]) -> set[int]:
    """The ids of the excluded parameters. Raises UsageError for an entry that excludes none."""
    if isinstance(exclude, str | Tensor) or not isinstance(exclude, Iterable):
        raise UsageError(f"muon: exclude={shown(exclude)}: give a list, exclude=[{shown(exclude)}]")
    excluded: set[int] = set()
    for entry in exclude:
        found = {id(p) for name, p in named if entry is p or (isinstance(entry, str) and is_in(name, entry))}
        if not found and isinstance(entry, str):
            names = [name for name, _ in named if name]
            remedy = nearest(entry, names) if names else "give (name, parameter) pairs, model.named_parameters()"
            raise UsageError(f"muon: exclude={shown(entry)} names no parameter: {remedy}")
        if not found:
            raise UsageError(f"muon: exclude has {shown(entry)}, which is none of the parameters that muon was given")
        excluded |= found
    return excluded


def is_in(name: str, entry: str) -> bool:
    """Whether a name is that of the parameter `entry`, or of one in the module `entry`."""
    return name == entry or name.startswith(f"{entry}.")


def check_used(optimizers: Iterable[torch.optim.Optimizer | None], labels: Iterable[Label], *, all_known: bool) -> None:
    """Raise UsageError for stages with `muon` in none of which it has a matrix to step.

    `labels` are those of all stages, unless some are built in other processes: they are not `all_known` then.
    """
    combined = any(isinstance(optimizer, CombinedOptimizer) for optimizer in optimizers)
    if combined and all_known and not any(label.is_hidden_matrix for label in labels):
        raise UsageError(
            "muon: no stage has a matrix of a hidden layer (embeddings, the output layer and kernels of convolutions "
            "are none), so that AdamW would step everything: use torch.optim.AdamW"
        )
