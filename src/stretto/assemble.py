"""A stage put together from what its method wants: its weights, its step, its seeds."""

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn

from stretto.errors import UsageError
from stretto.methods import Method
from stretto.methods.cure import Correction as CorrectionWanted
from stretto.methods.cure import Place, Prediction
from stretto.optim import Rescheduled, SpikeCompensation
from stretto.stage import Practice
from stretto.weights import WEIGHTS, Live, Plain, Predicted, Substituted, Weights
from stretto.weights.rules import Correction, CurrentRule, PartOf, Rule, VelocityPrediction, WeightPrediction

Optimizer = torch.optim.Optimizer


def build_practices(
    method: Method, module: nn.Module, optimizer: Optimizer | None, place: Place
) -> tuple[Practice, Practice]:
    """How a stage trains: as its method says, and in synchronous phases. Raises UsageError where it cannot."""
    weights = build_weights(method, module, optimizer, place)
    if optimizer is None:
        return Practice(weights, lambda _: None), Practice(Plain(weights), lambda _: None)
    # The optimizer's step is looked up whenever it is taken: a scheduler replaces it.
    return (
        Practice(weights, build_step(method, optimizer, place)),
        Practice(Plain(weights), lambda _: optimizer.step()),
    )


def build_weights(method: Method, module: nn.Module, optimizer: Optimizer | None, place: Place) -> Weights:
    """The weights that the method's forward and backward see on a stage. Raises UsageError where they cannot."""
    if optimizer is None or (method.weights == "live" and no_cure(method, place)):
        return WEIGHTS["current"](module)
    forward, backward = method.cure.forward, method.cure.backward
    if method.weights == "live" and forward is None and backward is None:
        return Live(module)
    if method.weights == "live":
        ahead, back = build_rule(forward, optimizer, place), build_rule(backward, optimizer, place)
        return Substituted(module, ahead, back, build_recompute_rule(method, optimizer, place, ahead, back))
    if forward is not None:
        return Predicted(module, build_rule(forward, optimizer, place))
    return WEIGHTS[method.weights](module)


def no_cure(method: Method, place: Place) -> bool:
    """Whether a stage without delay also has nothing to predict: then its weights are simply the current ones.

    So they are where nothing is cured and a recompute comes right before its backward.
    """
    wanted = (method.cure.forward, method.cure.backward)
    if place.recompute == 0 and wanted == (None, None):
        return True
    return place.delay == 0 and all(
        each is None
        or (isinstance(each, Prediction) and each.horizon(place) == 0)
        or isinstance(each, CorrectionWanted)
        for each in wanted
    )


def build_rule(wanted: Prediction | CorrectionWanted | None, optimizer: Optimizer, place: Place) -> Rule:
    """The rule for the values of a stage's weights."""
    if wanted is None:
        return CurrentRule()
    if isinstance(wanted, CorrectionWanted):
        return Correction(wanted.span(place))
    horizon = wanted.horizon(place)
    return VelocityPrediction(optimizer, horizon) if wanted.form == "velocity" else WeightPrediction(horizon)


def build_recompute_rule(method: Method, optimizer: Optimizer, place: Place, ahead: Rule, back: Rule) -> Rule | None:
    """The rule for a recompute, which shares the copies that the others keep; None for the weights as they stand."""
    wanted, forward, backward = method.cure.recompute, method.cure.forward, method.cure.backward
    if wanted is None or place.recompute is None:
        return None
    if isinstance(wanted, CorrectionWanted):
        assert isinstance(backward, CorrectionWanted), "a recompute is corrected where its backward is"
        return PartOf(back, wanted.span(place) / backward.span(place))
    if wanted.form == "weight":
        assert forward is not None, "a recompute is predicted where its forward is"
        whole = forward.horizon(place)
        return PartOf(ahead, wanted.horizon(place) / whole if whole else 0.0)
    return build_rule(wanted, optimizer, place)


def warn_of_overshoot(method: Method, places: Sequence[Place]) -> None:
    """Momentum forgets within 1/(1-m) updates: looking much further ahead along it is worse than not looking."""
    if method.cure.forward is None or not places:
        return
    horizon, place = max((method.cure.forward.horizon(place), place) for place in places)
    reach = 1 / (1 - place.momentum) if place.momentum < 1 else math.inf
    if horizon > 2 * reach:
        warnings.warn(
            f"{method} predicts the weights of stage {place.stage} {horizon:g} updates ahead, but momentum "
            f"{place.momentum:g} is gone after about {reach:.0f}: it will overshoot. Use horizon='decayed', a smaller "
            "horizon, or more momentum",
            stacklevel=3,
        )


def build_step(method: Method, optimizer: Optimizer, place: Place) -> Callable[[int], object]:
    """What an update does, given how many the stage has made. Raises UsageError for an optimizer that will not do."""
    cure = method.cure
    if cure.optimizer is not None and type(optimizer).__name__ != cure.optimizer:
        raise UsageError(
            f"method {method} is built on torch.optim.{cure.optimizer}; this optimizer is {type(optimizer).__name__}. "
            f"Use optimizer=lambda params: torch.optim.{cure.optimizer}(params, ...), on the command line "
            f"--optimizer {cure.optimizer.lower()}; or method 'pipedream'"
        )

    def plain() -> object:  # looked up at each step: a scheduler replaces the optimizer's own
        return optimizer.step()

    step: Callable[[], object] = SpikeCompensation(optimizer, place.delay).step if cure.spike else plain
    if cure.reschedule is not None:
        return Rescheduled(optimizer, place.delay, cure.reschedule, step).step
    return lambda _: step()


def momentum_of(optimizer: Optimizer | None) -> float:
    """The momentum of SGD, the first beta of Adam and its kin, 0 where there is neither."""
    if optimizer is None:
        return 0.0
    group = optimizer.param_groups[0]
    betas = group.get("betas")
    return float(betas[0]) if betas else float(group.get("momentum", 0.0))
