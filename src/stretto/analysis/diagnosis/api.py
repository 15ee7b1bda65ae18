"""`stretto.diagnose`: what is wrong with the gradients of one step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stretto.analysis.diagnosis.answer import (
    EQUAL,
    EXPLAINED,
    UNEXPLAINED,
    Answer,
    findings,
    rows_of,
    sentence_of,
    where_to_look,
)
from stretto.analysis.diagnosis.evidence import Entry, Evidence
from stretto.analysis.diagnosis.hypotheses import HYPOTHESES, batch, tensor
from stretto.analysis.diagnosis.hypotheses.updates import CHANGES
from stretto.analysis.diagnosis.names import by_module, by_parameter, entries_of, tensors_by_name, unpacked
from stretto.analysis.diagnosis.passes import Changed, Condition, GradientPasses
from stretto.analysis.diagnosis.scenario import Scenario
from stretto.analysis.diagnosis.search import Search
from stretto.analysis.diagnosis.step import ROUNDING, TrainingStep, beginnings
from stretto.analysis.diagnosis.update import UpdateRule
from stretto.errors import UsageError
from stretto.losses import Loss
from stretto.losses.comparison import as_cross_entropy, may_be_cross_entropy
from stretto.nn.batch import inputs_of, target_of, with_names_of
from stretto.nn.group_norm import has_batch_norm
from stretto.nn.nested import map_tensors
from stretto.splitting.proof import close

SMALL = 1e3  # times the tolerance: more than that is no rounding
TIMES = 4.0  # what rounding takes gradients to, over what it was once seen to
NEAR = 0.5  # what a mistake leaves, over what plain training leaves: only such are worth a look
LARGE = 20_000_000  # parameters from which passes of their own are made only where nothing cheaper explains all


def diagnose(
    model: nn.Module,
    batch: tuple[Any, Any],
    loss: Loss,
    gradients: Any = None,
    *,
    weights: Any = None,
    earlier: Any = None,
    activations: Any = None,
    after: Any = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    optimizer_state: Any = None,
    microbatches: int = 1,
    accumulation: int = 1,
    replicas: int = 1,
    tensor: int = 1,
    stages: int = 1,
    cut: Sequence[str] = (),
    clip: float | None = None,
    loss_scale: float | None = None,
    precision: torch.dtype | None = None,
) -> Answer:
    """Compare the gradients of one batch with plain PyTorch's, and say which mistake explains the difference.

    `batch` is (inputs, targets), of all replicas and micro-batches, in order. `gradients`, `weights` (of the step; else
    the model's) and `earlier` (some updates before) are dicts by parameter, modules, or paths of files: safetensors,
    torch.save, a folder of torch.distributed.checkpoint or with Hugging Face's index. A missing key is a missing
    gradient. `cut` names the first module of each stage but the first. `clip` is the bound on the norm by which the
    gradients were clipped before they were saved. `activations` are outputs of modules in the trainer's forward, by
    name: where no mistake explains the gradients, the first that differs is told. The model stays as it is, and
    computes as it does now: in training mode unless it is in evaluation.

    Raises UsageError for what does not fit together.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"diagnose: the model is {type(model).__name__}: give an nn.Module")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UsageError("diagnose: the batch is a pair, (inputs, targets)")
    with loaded(model, weights):
        step = TrainingStep(
            model=model,
            inputs=inputs_of(batch[0]),
            target=target_of(batch[1]),
            loss=loss,
            microbatches=microbatches,
            accumulation=accumulation,
            replicas=replicas,
            tensor=tensor,
            stages=stages,
            cut=cut,
            clip=clip,
            loss_scale=loss_scale,
            precision=precision,
            earlier={} if earlier is None else by_parameter(model, earlier, "earlier"),
            activations={} if activations is None else by_module(model, activations),
        )
        beginnings(step)  # refuses a cut that is no module
        step = replace(step, loss=known_loss(step))
        if after is None:
            return explained(step, *entries_of(step, tensors_by_name(gradients, "gradients")))
        if optimizer is None or gradients is not None:
            raise UsageError("diagnose: give gradients, or the weights after the step with the optimizer that made it")
        new = by_parameter(model, after, "after")
        moved = {name: new[name] - p.detach() for name, p in step.parameters.items() if name in new}
        return explained(step, *entries_of(step, moved), optimizer, state_of(optimizer_state))


def known_loss(step: TrainingStep) -> Loss:
    """The step's loss, as torch's cross entropy where its gradient shows that it is: then it can be changed."""
    if not may_be_cross_entropy(step.loss, step.target):
        return step.loss
    outputs = GradientPasses(step, {}, {}).outputs([step.inputs])
    found = as_cross_entropy(step.loss, outputs[0], step.target) if len(outputs) == 1 else None
    return found or step.loss


@contextmanager
def loaded(model: nn.Module, weights: Any) -> Iterator[None]:
    """In this block the model has these weights."""
    values = {} if weights is None else by_parameter(model, weights, "weights")
    parameters = dict(model.named_parameters())
    before = {name: parameters[name].data for name in values}
    try:
        for name, value in values.items():
            parameters[name].data = value
        yield
    finally:
        for name, value in before.items():
            parameters[name].data = value


def state_of(given: Any) -> Mapping[str, Any] | None:
    """An optimizer's state, given as a dict or as a file of torch.save. Raises UsageError for anything else."""
    if isinstance(given, str | Path):
        given = unpacked(Path(given))
    if given is not None and not (isinstance(given, Mapping) and "state" in given and "param_groups" in given):
        raise UsageError(
            "diagnose: optimizer_state is no state_dict() of an optimizer: it has no state or param_groups"
        )
    return given


def explained(
    step: TrainingStep,
    given: Mapping[Entry, Tensor | None],
    names: Mapping[str, str],
    optimizer: Any = None,
    state: Mapping[str, Any] | None = None,
) -> Answer:
    """The answer for the gradients of a step, or for what its optimizer changed in the weights."""
    important = {entry.parameter: value for entry, value in given.items()}
    known = {name: change for hypothesis in HYPOTHESES for name, change in hypothesis.changes.items()}
    passes = GradientPasses(
        step, known | {"opposite order": opposite} | tensor.changes_of(step) | batch.changes_of(step), important
    )
    base = Scenario(condition=plain_condition(step, passes), clips=[list(step.parameters)] if step.clip else None)
    passes[base.condition]
    rule = None if optimizer is None else UpdateRule(step, passes, optimizer, state, CHANGES)
    sketch, whole = (Evidence(step, passes, given, base, sketch=few, rule=rule) for few in (True, False))
    plain = whole.plain
    if not bool(whole.good(plain.residuals).all()):
        limits = rounding_of(whole)
        if limits is not None:
            whole.within(limits)
            sketch.within(limits)
    told: dict[str, Any] = {"names": names, "tolerance": whole.tolerance, "cannot_show": cannot_show(sketch)}
    if bool(whole.good(plain.residuals).all()):
        worst = float(plain.residuals.max())
        sentence = (
            f"The gradients are those of plain training (the largest difference is {worst:.1g} of a gradient's length)"
        )
        return Answer(
            verdict=EQUAL, sentence=sentence, hypotheses=(), alternatives=(), rows=rows_of(whole, None), **told
        )
    search = Search(sketch, whole, quick=sum(p.numel() for p in step.parameters.values()) > LARGE)
    all_found = search.run()
    if not all_found:
        closest = search.best()
        near = closest is not None and closest.residuals.mean() <= NEAR * plain.residuals.mean()
        most = findings(whole, closest, ()) if closest is not None and near else ()
        needed = [name for name, why in told["cannot_show"].items() if why.startswith("needs")]
        looked_for = len({each.name for each in HYPOTHESES} - {*needed})
        more = f"; {len(needed)} more need options, such as --microbatches" if step.num_parts == 1 else ""
        sentence = f"None of {looked_for} mistakes explains it, nor do two of them{more}: {where_to_look(whole)}"
        return Answer(
            verdict=UNEXPLAINED, sentence=sentence, hypotheses=(), alternatives=most, rows=rows_of(whole, None), **told
        )
    chosen, *others = all_found
    found = findings(whole, chosen, others)
    seen = {each.name for each in found} | {name for each in found for name in each.same_as}
    runners = [one for other in others[:8] for one in findings(whole, other, ()) if one.name not in seen]
    return Answer(
        verdict=EXPLAINED,
        sentence=sentence_of(whole, found),
        hypotheses=found,
        alternatives=runners,
        rows=rows_of(whole, chosen),
        **told,
    )


def rounding_of(evidence: Evidence) -> Tensor | None:
    """How far rounding takes the gradients of this model, by entry; None where that is not what makes them differ.

    It is measured where a coarser dtype was meant than that of the weights, and where little is left: by a pass in that
    dtype, with the examples in the opposite order, or in one forward.
    """
    step, base = evidence.step, evidence.base
    finest = min(ROUNDING[p.dtype] for p in step.parameters.values() if p.dtype in ROUNDING)
    if step.precision is not None and ROUNDING[step.precision] > finest:
        other = replace(base.condition, dtype=step.precision)
    elif float(evidence.plain.residuals.max()) <= SMALL * evidence.tolerance and not base.condition.whole:
        other = replace(base.condition, change="opposite order")
        if base.condition.by_part:
            other = replace(base.condition, by_part=False)
    else:
        return None
    one, another = evidence.made(base), evidence.made(replace(base, condition=other))
    lengths = torch.maximum(evidence.total(one.square()).sqrt(), evidence.floors)
    return TIMES * evidence.total((one - another).square()).sqrt() / lengths


def opposite(step: TrainingStep) -> Changed:
    """The same examples in the opposite order."""
    turned = [x.flip(0) for x in step.inputs]
    return Changed(with_names_of(step.inputs, turned), map_tensors(lambda y: y.flip(0), step.target))


def plain_condition(step: TrainingStep, passes: GradientPasses) -> Condition:
    """How plain training computes: the whole batch in one forward where its parts depend on each other."""
    if step.num_parts == 1:
        return Condition()
    if has_batch_norm([step.model]) and step.model.training:
        return adding_up(passes, Condition())
    whole = passes.outputs([step.inputs])
    parts = passes.outputs(step.parts_of(step.inputs))
    if passes.random:
        return Condition(by_part=True)
    alike = all(map(close, whole, parts)) if len(whole) == len(parts) else False
    return adding_up(passes, Condition(by_part=alike))


def adding_up(passes: GradientPasses, condition: Condition) -> Condition:
    """The condition, or one of the whole batch's loss where that is no mean over what its parts have."""
    passes[condition]  # shows whether it is one
    return condition if passes.decomposes else Condition(whole=True)


def cannot_show(evidence: Evidence) -> dict[str, str]:
    """Mistakes that would leave the gradients of this batch as they are, or need something that was not given."""
    plain, step = evidence.plain, evidence.step
    told: dict[str, str] = {}
    for hypothesis in HYPOTHESES:
        if hypothesis.needs and next(hypothesis.variants(evidence, evidence.base, plain), None) is None:
            clips = "--clip" not in hypothesis.needs or step.clip is not None
            here = "--microbatches" in hypothesis.needs and step.num_parts > 1 and clips
            told[hypothesis.name] = "this batch cannot show it" if here else f"needs {hypothesis.needs}"
    return told
