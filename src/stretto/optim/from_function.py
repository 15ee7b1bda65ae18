"""The optimizer that a user's function makes, checked.

Refused is one that looks at all its parameters together, as a stage's own would see those of the stage alone: a norm of
all gradients (clipping in the optimizer, or in a hook on its step) and one step size for all, estimated from them
(Prodigy, D-Adaptation), are other numbers in a stage than in the whole network.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.options.checks import function, sequence, shown
from stretto.options.object_digest import names_in
from stretto.options.user_errors import called

Named = list[tuple[str, nn.Parameter]]

NAMED = "a function of a list of (name, parameter) pairs that returns an optimizer"


@dataclass(frozen=True, eq=False)
class NamedOptimizer:
    """What a Trainer takes as `optimizer` where the function needs names: it is called with (name, parameter) pairs.

    Names are those of `Trainer.gather`, "<stage>.<name>" and "heads.<stage>.<name>". The parameters need not be those
    of the module: replicas that are emulated have copies, and precision="bf16" has float32 masters.
    """

    function: Callable[[Named], torch.optim.Optimizer]

    def __post_init__(self) -> None:
        function("NamedOptimizer: function", self.function, NAMED, 1)

    def __call__(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Raise UsageError: only a parameter server steps parameters without names."""
        raise UsageError(
            f"a parameter server steps shards of {len(parameters)} flat pieces, which have no names, and this "
            "optimizer chooses its groups by the parameters' names: use another sync, such as 'all-reduce'"
        )

    def named(self, names: Sequence[str]) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
        """The function of the parameters alone, whose names are these."""
        sequence("NamedOptimizer.named: names", names, "a list of the parameters' names")

        def made(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            if len(names) != len(parameters):
                raise UsageError(f"NamedOptimizer.named: {len(names)} names for {len(parameters)} parameters")
            pairs = list(zip(names, parameters, strict=True))
            optimizer: torch.optim.Optimizer = called("NamedOptimizer: function", self.function, pairs, wanted=NAMED)
            return optimizer

        return made


def check_optimizer(optimizer: Any) -> None:
    """Raise UsageError for what is no function, such as an optimizer of the whole network."""
    if not callable(optimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}: each stage has its own, so give a function of the parameters, "
            "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )


def build_optimizer(optimizer: Callable[..., Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the user's function makes.

    Raises UsageError for anything else, and for one that evaluates the loss several times a step: LBFGS, SAM.
    """
    check_optimizer(optimizer)
    expected = "a function of parameters, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
    built = called("optimizer", optimizer, parameters, wanted=expected)
    if not isinstance(built, torch.optim.Optimizer):
        hint = " Does the function end with return?" if built is None else ""
        hint = " A stage has one, with several groups if need be." if isinstance(built, list | tuple) else hint
        raise UsageError(f"optimizer returned {shown(built)}, not a torch.optim.Optimizer.{hint} Give {expected}")
    if takes_several_passes(built):
        raise UsageError(
            f"{type(built).__name__} evaluates the loss several times a step; a pipeline cannot. Choose another "
            "optimizer"
        )
    return built


def takes_several_passes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step needs the loss again: LBFGS, those whose `step` requires a closure, SAM and its kin.

    SAM's step is a `first_step`, which moves the weights, another backward and a `second_step`. Implementations that
    have these under other names are known by that of their class.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return (
        isinstance(optimizer, torch.optim.LBFGS)
        or (closure is not None and closure.default is closure.empty)
        or (hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"))
        or any("SAM" in kind.__name__ or "Sharpness" in kind.__name__ for kind in type(optimizer).__mro__)
    )


STEPS, SIZE = 5, 3
NORMAL = {"normal", "normal_", "log_normal_"}  # random numbers, not norms
APART = (
    "but each stage has an optimizer of its own. Clip with clip=, use an optimizer that treats each parameter by "
    "itself, or one stage"
)


def refuse_coupled(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimizer of which the step of one parameter depends on another one's gradient."""
    kind = type(optimizer).__name__
    if any(map(takes_norm, getattr(optimizer, "_optimizer_step_pre_hooks", {}).values())):
        raise UsageError(f"{kind} has a hook before its step that takes a norm, {APART}")
    if type(optimizer).__module__.startswith(("torch.optim.", "stretto.optim.")) or only_wraps(type(optimizer)):
        return
    parameters = list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))
    if len(parameters) < 2:
        return
    try:
        together, alone = stepped(optimizer, parameters, False), stepped(optimizer, parameters, True)
    except Exception:  # noqa: BLE001 (one that takes no smaller tensors, or no copy, is not judged)
        return
    if not torch.equal(together, alone):
        raise UsageError(f"{kind} lets the step of a parameter depend on the gradients of others, {APART}")


def only_wraps(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether the class's step is that of the class it is derived from, with something around it that takes no norm."""
    code = getattr(inspect.unwrap(kind.step), "__code__", None)
    return code is not None and "super" in names_in(code) and not takes_norm(kind.step)


def takes_norm(function: Any) -> bool:
    """Whether a function's code mentions a norm, such as clip_grad_norm_; False of what has no code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and any("norm" in name for name in names_in(code) - NORMAL)


def stepped(optimizer: torch.optim.Optimizer, parameters: list[Tensor], alone: bool) -> Tensor:
    """A part of the first of the parameters after some steps of a copy; `alone`: the others have no gradient."""
    corners = {id(p): [min(SIZE, size) for size in p.shape] for p in parameters}
    small = {id(p): nn.Parameter(torch.full(corners[id(p)], 0.5, dtype=p.dtype)) for p in parameters}
    memo: dict[int, Any] = {**small}
    tried = copy.deepcopy(optimizer, memo)
    # torch copies the attributes of its own optimizers alone; a scheduler's `step` would step the original
    for name in vars(optimizer).keys() - vars(tried).keys() - {"step"}:
        setattr(tried, name, copy.deepcopy(vars(optimizer)[name], memo))
    first = small[id(parameters[0])]
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(0)  # the same gradient again: estimates of a step size grow
        for p in small.values():
            gradient = torch.randn(p.shape, generator=draws, dtype=torch.float64).to(p.dtype)
            p.grad = None if alone and p is not first else gradient
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(step)
            tried.step()
    return first.detach()
