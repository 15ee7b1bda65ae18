"""How a stage trains: which weights its passes see, and what its update does, as its method says."""

import math
import warnings
from collections.abc import Callable, Sequence

import torch

from stretto.errors import UsageError
from stretto.methods import Method
from stretto.methods.cure import Correction as CorrectionWanted
from stretto.methods.cure import Cure, Place, Prediction
from stretto.optim import Rescheduled, SpikeCompensation
from stretto.optim.coming_rates import Scheduler
from stretto.stage.specification import Specification
from stretto.stage.stage import PhaseSettings, StageParts
from stretto.weights import WEIGHTS, Live, Plain, Predicted, Substituted, Weights
from stretto.weights.check import STASH, is_compiled
from stretto.weights.rounded import Rounded
from stretto.weights.value_rules import (
    Correction,
    CurrentRule,
    Interpolated,
    Rule,
    StepPrediction,
    VelocityPrediction,
    WeightPrediction,
)

Optimizer = torch.optim.Optimizer


def build_practices(of: Specification, parts: StageParts, place: Place) -> tuple[PhaseSettings, PhaseSettings]:
    """How a stage trains: as its method says, and in synchronous phases. Raises UsageError where it cannot.

    `clip` limits the norm of all stages' gradients together. Where stages update at different times each one limits
    its own, to a share that keeps all of them within it.
    """
    optimizer, clip = parts.optimizer, of.clip
    weights = build_weights(of, parts, place)
    check_copies(of.method, weights, place.stage, autocast=of.precision.name == "bf16-autocast")
    if optimizer is None:
        return PhaseSettings(weights, None), PhaseSettings(Plain(weights), None)
    own = clip if clip is None or of.method.synchronous else clip / math.sqrt(place.num_stages)
    return (
        PhaseSettings(weights, build_step(of.method, optimizer, place), own),
        PhaseSettings(Plain(weights), None, clip),
    )


def build_weights(of: Specification, parts: StageParts, place: Place) -> Weights:
    """The weights that the method's forward and backward see on a stage. Raises UsageError where they cannot."""
    method, module, optimizer = of.method, parts.module, parts.optimizer
    if optimizer is None or (method.weights == "live" and no_cure(method, place)):
        return WEIGHTS["current"](module)
    forward, backward = method.cure.forward, method.cure.backward

    def rounded(rule: Rule) -> Rule:
        return Rounded(rule, parts.masters) if parts.masters.copies else rule

    def built(wanted: Prediction | CorrectionWanted | None) -> Rule:
        return build_rule(wanted, place, optimizer, of.scheduler)

    if method.weights == "live" and forward is None and backward is None:
        return Live(module)
    if method.weights == "live":
        ahead, back = built(forward), built(backward)
        again = build_recompute_rule(method.cure, place, ahead, back, built)
        return Substituted(module, rounded(ahead), rounded(back), None if again is None else rounded(again))
    if forward is not None:
        return Predicted(module, rounded(built(forward)))
    return WEIGHTS[method.weights](module)


def check_copies(method: Method, weights: Weights, stage: int, *, autocast: bool) -> None:
    """Raise UsageError for a stage whose backward is to see other weights, but would see copies its forward made.

    Only what is known without running it: autocast and torch.compile. The first forward finds the others.
    """
    if not isinstance(weights, Live | Substituted):
        return
    if autocast:
        raise UsageError(
            f"method {method} cannot train under precision='bf16-autocast': a backward of stage {stage} is to see "
            "other weights than its forward saw, but autocast keeps casts of those. Use precision='bf16', or a method "
            "whose backward sees its forward's weights: a synchronous one, pb(stash=True), pipedream, pipedream-2bw"
        )
    for name, part in weights.module.named_modules():
        if is_compiled(part):
            raise UsageError(
                f"method {method} cannot train stage {stage} ({f'its {name}, ' * bool(name)}{type(part).__name__}): "
                "its backward is to see other weights than its forward saw, but it is compiled, and a compiled graph "
                f"may keep copies of weights; leave it uncompiled, or {STASH}"
            )


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


def build_rule(
    wanted: Prediction | CorrectionWanted | None, place: Place, optimizer: Optimizer, scheduler: Scheduler | None
) -> Rule:
    """The rule for the values of a stage's weights. `scheduler` makes one; it was not called on this optimizer yet."""
    if wanted is None:
        return CurrentRule()
    if isinstance(wanted, CorrectionWanted):
        return Correction(wanted.span(place))
    horizon = wanted.horizon(place)
    if wanted.form == "step":
        return StepPrediction(optimizer, horizon, scheduler)
    return VelocityPrediction(optimizer, horizon) if wanted.form == "velocity" else WeightPrediction(horizon)


def build_recompute_rule(
    cure: Cure, place: Place, ahead: Rule, back: Rule, built: Callable[[Prediction], Rule]
) -> Rule | None:
    """The rule for a recompute, which shares the copies that the others keep; None for the weights as they stand."""
    wanted, forward, backward = cure.recompute, cure.forward, cure.backward
    if wanted is None or place.recompute is None:
        return None
    if isinstance(wanted, CorrectionWanted):
        assert isinstance(backward, CorrectionWanted), "a recompute is corrected where its backward is"
        return Interpolated(back, wanted.span(place) / backward.span(place))
    if wanted.form == "weight":
        assert forward is not None, "a recompute is predicted where its forward is"
        whole = forward.horizon(place)
        return Interpolated(ahead, wanted.horizon(place) / whole if whole else 0.0)
    return built(wanted)


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


def build_step(method: Method, optimizer: Optimizer, place: Place) -> Callable[[int], object] | None:
    """What an update does, given how many the stage has made; None for the optimizer's own step.

    Raises UsageError for an optimizer that will not do.
    """
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
    return (lambda _: step()) if cure.spike else None


def check_served(method: Method, sync: object) -> None:
    """Raise UsageError for a method whose cures work on an optimizer that is not there, but at parameter servers."""
    cure = method.cure
    looks = [each for each in (cure.forward, cure.backward, cure.recompute) if isinstance(each, Prediction)]
    wanted = {
        "spike compensation": cure.spike,
        "T1, which divides its rate,": cure.reschedule is not None,
        "a prediction along its velocity or step": any(each.form != "weight" for each in looks),
    }
    needs = [what for what, is_wanted in wanted.items() if is_wanted]
    if needs:
        raise UsageError(
            f"method {method} with {sync}: {' and '.join(needs)} needs the optimizer, which is at the servers, for all "
            "replicas; use a method without it (pb, pb-lwpw, pipedream, pipedream-2bw, a synchronous one), or "
            "sync='all-reduce'"
        )


def momentum_of(optimizer: Optimizer | None) -> float:
    """The momentum of SGD, the first beta of Adam and its kin, 0 where there is neither."""
    if optimizer is None:
        return 0.0
    group = optimizer.param_groups[0]
    betas = group.get("betas")
    return float(betas[0]) if betas else float(group.get("momentum", 0.0))
