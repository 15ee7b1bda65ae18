"""How a stage trains: which weights its passes see and what its update does, from its method."""

import math
import warnings
from collections.abc import Callable, Sequence

import torch

from stretto.errors import UsageError
from stretto.methods import Method
from stretto.methods.cure import Correction as CorrectionCure
from stretto.methods.cure import Cure, Place, Prediction
from stretto.optim import Rescheduled, RotatedAdam, SpikeCompensation, UpdateFeedback
from stretto.optim.learning_rates import Scheduler
from stretto.optim.traits import momenta_of
from stretto.stage.stage import PhaseSettings, StageParts
from stretto.stage.trainer_arguments import Specification
from stretto.weights import WEIGHTS, Live, Plain, Predicted, Substituted, Weights
from stretto.weights.saved_tensor_check import STASH, is_compiled
from stretto.weights.value_rules import (
    Correction,
    CurrentRule,
    Interpolated,
    Rounded,
    Rule,
    StepPrediction,
    VelocityPrediction,
    WeightPrediction,
)

Optimizer = torch.optim.Optimizer
Step = Callable[[int], object]  # gets the number of updates before it


def build_phases(specification: Specification, parts: StageParts, place: Place) -> tuple[PhaseSettings, PhaseSettings]:
    """A stage's settings in its method's own phases and in synchronous ones. Raises UsageError where it cannot train.

    `clip` limits the norm of all stages' gradients together. Where stages update at different times each one limits
    its own, to a share that keeps all of them within it.
    """
    optimizer, clip = parts.optimizer, specification.clip
    check_whole_matrices(specification)
    weights = build_weights(specification, parts, place)
    check_copies(specification.method, weights, place.stage, autocast=specification.precision.name == "bf16-autocast")
    check_recompute(specification, weights, place.stage)
    if optimizer is None:
        return PhaseSettings(weights, None), PhaseSettings(Plain(weights), None)
    stage_clip = clip if clip is None or specification.method.synchronous else clip / math.sqrt(place.num_stages)
    step, plain_step = build_steps(specification.method, optimizer, place)
    return PhaseSettings(weights, step, stage_clip), PhaseSettings(Plain(weights), plain_step, clip)


def check_whole_matrices(specification: Specification) -> None:
    """Raise UsageError for a rotation of matrices that processes share: a part of one has another eigenbasis."""
    mesh, sync = specification.mesh, specification.sync
    if specification.method.cure.rotate is not None and (mesh.tensor > 1 or sync.sharding is not None):
        raise UsageError(
            f"method {specification.method} on {mesh} with {sync}: rotate turns whole matrices, and a process has a "
            "part of each: use tensor=1 and sync='all-reduce', or leave rotate out"
        )


def build_weights(specification: Specification, parts: StageParts, place: Place) -> Weights:
    """The weights that a stage's passes see. Raises UsageError for an optimizer that cannot predict them."""
    method, module, optimizer = specification.method, parts.module, parts.optimizer
    if optimizer is None or (method.weights == "live" and sees_current(method, place)):
        return WEIGHTS["current"](module)
    forward, backward = method.cure.forward, method.cure.backward

    def rounded(rule: Rule) -> Rule:
        return Rounded(rule, parts.masters) if parts.masters.copies else rule

    def built(cure: Prediction | CorrectionCure | None) -> Rule:
        return build_rule(cure, place, optimizer, specification.scheduler)

    if method.weights == "live" and forward is None and backward is None:
        return Live(module)
    if method.weights == "live":
        ahead, back = built(forward), built(backward)
        recompute = build_recompute_rule(method.cure, place, ahead, back, built)
        return Substituted(module, rounded(ahead), rounded(back), None if recompute is None else rounded(recompute))
    if forward is not None:
        return Predicted(module, rounded(built(forward)))
    return WEIGHTS[method.weights](module)


def check_copies(method: Method, weights: Weights, stage: int, *, autocast: bool) -> None:
    """Raise UsageError where a backward is to see other weights than its forward, but would read the forward's copies.

    autocast and torch.compile are known to copy before any forward runs; the first forward finds other copies.
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


def check_recompute(specification: Specification, weights: Weights, stage: int) -> None:
    """Raise UsageError where layers cannot be recomputed on the weights that their forward saw, or are compiled."""
    how, method = specification.recompute, specification.method
    if how == "full" and isinstance(weights, Live | Substituted):
        raise UsageError(
            f"method {method} cannot train stage {stage} with recompute='full': its layers would be recomputed on "
            f"other weights than their forward saw; take recompute='selective', or {STASH}"
        )
    compiled = next((name for name, part in weights.module.named_modules() if is_compiled(part)), None)
    if how != "none" and compiled is not None:
        raise UsageError(
            f"recompute={how!r}: {f'{compiled} of ' * bool(compiled)}stage {stage} is compiled, and a compiled graph "
            "chooses itself what it keeps and what it computes again: leave it uncompiled, or leave recompute= out"
        )


def sees_current(method: Method, place: Place) -> bool:
    """Whether all passes of a stage see its current weights.

    True without delay, unless a prediction looks ahead. True as well where the method cures nothing and a recompute
    comes right before its backward.
    """
    cures = (method.cure.forward, method.cure.backward)
    if place.recompute == 0 and cures == (None, None):
        return True
    return place.delay == 0 and all(
        cure is None or (isinstance(cure, Prediction) and cure.horizon(place) == 0) or isinstance(cure, CorrectionCure)
        for cure in cures
    )


def build_rule(
    cure: Prediction | CorrectionCure | None, place: Place, optimizer: Optimizer, scheduler: Scheduler | None
) -> Rule:
    """The rule for the weights that a pass sees. `scheduler` is the user's function, not called on `optimizer` yet."""
    if cure is None:
        return CurrentRule()
    if isinstance(cure, CorrectionCure):
        return Correction(cure.span(place))
    horizons = [cure.horizon(at) for at in places_by_group(place, optimizer)]
    horizon = max(horizons)
    rule: Rule = (
        StepPrediction(optimizer, horizon, scheduler)
        if cure.form == "step"
        else VelocityPrediction(optimizer, horizon)
        if cure.form == "velocity"
        else WeightPrediction(horizon)
    )
    if len(set(horizons)) > 1:
        groups = zip(horizons, optimizer.param_groups, strict=True)
        rule.horizons = {id(parameter): own for own, group in groups for parameter in group["params"]}
    return rule


def build_recompute_rule(
    cure: Cure, place: Place, ahead: Rule, back: Rule, built: Callable[[Prediction], Rule]
) -> Rule | None:
    """The rule for a recompute, which shares the copies of `ahead` or `back`; None for the current weights."""
    recompute, forward, backward = cure.recompute, cure.forward, cure.backward
    if recompute is None or place.recompute is None:
        return None
    if isinstance(recompute, CorrectionCure):
        assert isinstance(backward, CorrectionCure), "a recompute is corrected where its backward is"
        return Interpolated(back, recompute.span(place) / backward.span(place))
    if recompute.form == "weight":
        assert forward is not None, "a recompute is predicted where its forward is"
        whole = forward.horizon(place)
        return Interpolated(ahead, recompute.horizon(place) / whole if whole else 0.0)
    return built(recompute)


def warn_of_overshoot(method: Method, places: Sequence[Place]) -> None:
    """Warn of a prediction more than twice as far ahead as momentum lasts, 1/(1-m) updates: it is worse than none.

    `places` are those of each stage and each group of its optimizer; the warning is of the one that overshoots most.
    """
    if method.cure.forward is None or not places:
        return
    forward = method.cure.forward
    _, place = max((forward.horizon(place) * max(0.0, 1 - place.momentum), place) for place in places)
    horizon, span = forward.horizon(place), 1 / (1 - place.momentum) if place.momentum < 1 else math.inf
    if horizon > 2 * span:
        warnings.warn(
            f"{method} predicts the weights of stage {place.stage} {horizon:g} updates ahead, but momentum "
            f"{place.momentum:g} is gone after about {span:.0f}: it will overshoot. Use horizon='decayed', a smaller "
            "horizon, or more momentum",
            stacklevel=3,
        )


def build_steps(method: Method, optimizer: Optimizer, place: Place) -> tuple[Step | None, Step | None]:
    """A stage's update in the method's own phases and in synchronous ones; None for the optimizer's own step.

    Raises UsageError for an optimizer of another class than the method needs. A rotated basis is kept in synchronous
    phases, too, as the optimizer's averages are of it.
    """
    cure = method.cure
    if cure.optimizer is not None and type(optimizer).__name__ != cure.optimizer:
        raise UsageError(
            f"method {method} is built on torch.optim.{cure.optimizer}; this optimizer is {type(optimizer).__name__}. "
            f"Use optimizer=lambda params: torch.optim.{cure.optimizer}(params, ...), on the command line "
            f"--optimizer {cure.optimizer.lower()}; or method 'pipedream'"
        )

    def own() -> object:  # looked up at each step: a scheduler replaces the optimizer's own
        return optimizer.step()

    step: Callable[[], object] = own
    changed = cure.at(place)
    late = place.delay if cure.spike else 0.0
    plain = None
    if changed.interval is not None:
        plain = ignoring_number(RotatedAdam(optimizer, changed.interval, two_sided=changed.two_sided).step)
        step = RotatedAdam(optimizer, changed.interval, two_sided=changed.two_sided, delay=late).step
    elif cure.spike:
        step = SpikeCompensation(optimizer, late).step
    if changed.feedback:
        fed = UpdateFeedback(optimizer, changed.feedback, step)
        return ignoring_number(fed.step), ignoring_number(fed.plain_step)
    if cure.reschedule is not None:
        return Rescheduled(optimizer, place.delay, cure.reschedule, step).step, plain
    return (ignoring_number(step) if step is not own else None), plain


def ignoring_number(step: Callable[[], object]) -> Step:
    return lambda _: step()


def check_served(method: Method, sync: object) -> None:
    """Raise UsageError for a method whose cures need a stage's optimizer, which is at the parameter servers."""
    cure = method.cure
    passes = (cure.forward, cure.backward, cure.recompute)
    predictions = [prediction for prediction in passes if isinstance(prediction, Prediction)]
    used = {
        "spike compensation": cure.spike,
        "T1, which divides its rate,": cure.reschedule is not None,
        "update-level error feedback": cure.feedback is not None,
        "a rotated basis": cure.rotate is not None,
        "a prediction along its velocity or step": any(prediction.form != "weight" for prediction in predictions),
    }
    needs = [what for what, is_used in used.items() if is_used]
    if needs:
        raise UsageError(
            f"method {method} with {sync}: {' and '.join(needs)} needs the optimizer, which is at the servers, for all "
            "replicas; use a method without it (pb, pb-lwpw, pipedream, pipedream-2bw, a synchronous one), or "
            "sync='all-reduce'"
        )


def places_by_group(place: Place, optimizer: Optimizer) -> list[Place]:
    """A stage's place for each group of its optimizer, with that group's momentum."""
    return [place._replace(momentum=momentum) for momentum in momenta_of(optimizer)]
