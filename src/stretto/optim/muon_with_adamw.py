"""Muon for the matrices of hidden layers, also where processes share them out, and AdamW for everything else."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError, nearest
from stretto.nn.sharded_modules import is_share, local_share, share_like
from stretto.optim.layerwise import check_betas, check_range, check_real, explaining_params, with_gradients
from stretto.optim.parameter_labels import MATRIX, Label
from stretto.options.checks import flag, one_of, refuse, sequence, shown


class ShardedMuon(torch.optim.Muon):
    """Muon whose parameters may be shares of matrices (DTensors), with the numbers of torch.optim.Muon on the whole.

    A group with `keeps_update` keeps each last orthogonalised update in its state, as "update" in bfloat16; what one
    with a "delay" orthogonalises is that of late gradients (`optim/spike_coefficients.py`).
    Averages stay with the shares; each matrix's update is gathered, one after the other, and orthogonalised on every
    process, which keeps its rows. So a step is a collective of the processes that share the matrices.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss, if there is one."""
        if all(map(is_plain, self.param_groups)):
            loss: float | None = super().step(closure)  # type: ignore[no-untyped-call]
            return loss
        loss = with_gradients(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)
        return loss

    def _step_one(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, average = local_share(parameter.grad), local_share(state["momentum_buffer"])
        average.lerp_(gradient, 1 - group["momentum"])
        late = group.get("delay", 0) + bool(group["nesterov"])
        ahead = gradient.lerp(average, group["momentum"] ** late) if late else average
        whole = whole_like(ahead, parameter)
        step = orthogonalised(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rows = local_share(share_like(step, parameter))
        if group.get("keeps_update"):
            state["update"] = rows
        rate = float(group["lr"])
        local_share(parameter).mul_(1 - rate * group["weight_decay"]).add_(
            rows, alpha=-rate * shape_factor(whole.shape, group["adjust_lr_fn"])
        )


def is_plain(group: Mapping[str, Any]) -> bool:
    """Whether torch.optim.Muon itself can step a group: whole matrices in time, of which no update is kept.

    Without Nesterov's momentum torch 2.13 normalises the average of a bfloat16 parameter in place.
    """
    as_torchs = bool(group["nesterov"]) and not group.get("keeps_update") and not group.get("delay")
    return as_torchs and not any(map(is_share, group["params"]))


def whole_like(share: Tensor, parameter: Tensor) -> Tensor:
    """The whole tensor of which this process has `share`, as it has that of `parameter`. A collective, if it is one."""
    if not is_share(parameter):
        return share
    from torch.distributed.tensor import DTensor

    placed: Any = parameter
    made = DTensor.from_local(
        share, placed.device_mesh, placed.placements, shape=parameter.shape, stride=parameter.stride()
    )
    whole: Tensor = made.full_tensor()
    return whole


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Nearly U V^T of a matrix U S V^T, in bfloat16, as torch.optim.Muon computes it to the last bit.

    X = matrix / ||matrix||, then `steps` times X <- a X + (b A + c A A) X with A = X X^T (Newton-Schulz, quintic). A
    tall matrix is transposed first.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.to(torch.bfloat16, copy=True)
    found = found.T if tall else found
    found.div_(found.norm().clamp(min=eps))
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found


def shape_factor(shape: torch.Size, adjust: str | None) -> float:
    """The factor of the rate of an m x n matrix: torch.optim.Muon's `adjust_lr_fn`."""
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return float(0.2 * max(rows, columns) ** 0.5)
    return float(max(1, rows / columns) ** 0.5)


RULES: dict[str, type[torch.optim.Optimizer]] = {"Muon": ShardedMuon, "AdamW": torch.optim.AdamW}


class CombinedOptimizer(torch.optim.Optimizer):
    """One optimizer of several: `CombinedOptimizer([torch.optim.Muon(...), torch.optim.AdamW(...)])`.

    Its groups are theirs, each with its own options and with the name of its rule, "Muon" or "AdamW", under "rule"; the
    state of a parameter is that of its rule. Schedulers, checkpoints and whatever reads groups see one optimizer. It
    takes over the given optimizers, which are not to be stepped any more.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        wanted = f"a list of optimizers, each one of {', '.join(RULES)} of torch.optim"
        sequence("CombinedOptimizer: optimizers", optimizers, wanted)
        if not len(optimizers):
            refuse("CombinedOptimizer: optimizers", optimizers, wanted)
        groups: list[dict[str, Any]] = []
        for optimizer in optimizers:
            rule = type(optimizer).__name__
            if not isinstance(optimizer, torch.optim.Optimizer) or rule not in RULES:
                refuse("CombinedOptimizer: optimizers", optimizers, wanted)
            groups += [{**group, "rule": rule} for group in optimizer.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Let each rule step its groups; return the closure's loss, if there is one."""
        loss = with_gradients(closure)
        for rule, kind in RULES.items():
            groups = [group for group in self.param_groups if group["rule"] == rule]
            if groups:  # made anew: what schedulers and loading replace is then never an old one
                stepping(kind, self.state, groups).step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Raises ValueError if its groups have other rules."""
        rules, saved = rules_of(self.param_groups), rules_of(state_dict["param_groups"])
        if rules != saved:
            raise ValueError(f"groups of the rules {saved}, expected {rules}")
        super().load_state_dict(state_dict)


def stepping(
    kind: type[torch.optim.Optimizer], state: Mapping[Any, Any], groups: Sequence[dict[str, Any]]
) -> torch.optim.Optimizer:
    """An optimizer of a kind that steps another one's groups with its state."""
    made = kind.__new__(kind)
    made.__setstate__({"defaults": {}, "state": state, "param_groups": groups})
    return made


def rules_of(groups: Sequence[dict[str, Any]]) -> list[Any]:
    return [group.get("rule") for group in groups]


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
        made.append(torch.optim.Muon(matrices, lr, weight_decay, momentum, nesterov, adjust_lr_fn=adjust_lr_fn))
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
        found = {
            id(p)
            for name, p in named
            if entry is p or (isinstance(entry, str) and (name == entry or name.startswith(f"{entry}.")))
        }
        if not found and isinstance(entry, str):
            names = [name for name, _ in named if name]
            remedy = nearest(entry, names) if names else "give (name, parameter) pairs, model.named_parameters()"
            raise UsageError(f"muon: exclude={shown(entry)} names no parameter: {remedy}")
        if not found:
            raise UsageError(f"muon: exclude has {shown(entry)}, which is none of the parameters that muon was given")
        excluded |= found
    return excluded


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
