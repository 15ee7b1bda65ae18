"""stretto diagnose: what is wrong with the gradients of one step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from stretto.cli.output import aligned, print_json
from stretto.errors import UsageError, nearest
from stretto.options.import_object import is_function, is_model_folder
from stretto.settings.command_line import FLAG, NUMBER, OPTIONS, TEXTS, WHOLE, Option

if TYPE_CHECKING:
    from stretto.analysis.diagnosis.answer import Answer

ROWS = 12  # of the table of parameters
PRECISIONS = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a trainer saved."""

    gradients: str | None = None
    """Gradients of the batch: safetensors, torch.save, a folder; or path/to/file.py:function, which returns a dict."""
    weights: str | None = None
    """Weights of the step; those that the model's function gives unless said otherwise."""
    earlier: str | None = None
    """Weights some updates before, for gradients that are stale."""
    activations: str | None = None
    """Outputs in the trainer's forward, by module, of the whole batch: of what nothing explains, the first that differs
    is told."""
    after: str | None = None
    """Weights after the step, with --optimizer: instead of gradients."""
    optimizer: str | None = None
    """path/to/file.py:function, which takes parameters and returns the optimizer of the step."""
    optimizer_state: str | None = None
    """The optimizer's state before the step, as its state_dict() saved by torch.save."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """How a trainer was told to compute the step."""

    method: str | None = None
    """The schedule, by Stretto's name: "1f1b(microbatches=8)" says --microbatches, too."""
    microbatches: Annotated[int | None, WHOLE] = None
    """Micro-batches of a minibatch; 1 unless said otherwise."""
    accumulation: Annotated[int, WHOLE] = 1
    """Minibatches before an update."""
    replicas: Annotated[int, WHOLE] = 1
    """Data-parallel replicas: the batch is that of all, one after the other."""
    tensor: Annotated[int, WHOLE] = 1
    """Processes that share a layer."""
    stages: Annotated[int, WHOLE] = 1
    """Stages of the pipeline."""
    cut: Annotated[tuple[str, ...], TEXTS] = ()
    """First module of each stage but the first; read off the gradients unless said."""
    clip: Annotated[float | None, NUMBER] = None
    """Bound on the norm; gradients were saved after they were clipped."""
    loss_scale: Annotated[float | None, NUMBER] = None
    """Loss scale of mixed precision."""
    precision: str | None = None
    """The coarsest dtype that was meant: fp32, fp16, bf16."""


def diagnose(
    *,
    model: str | None = None,
    model_options: Annotated[dict[str, Option] | None, OPTIONS] = None,
    batch: str | None = None,
    loss: str = "auto",
    saved: Annotated[Saved, Parameter(name="*")] = Saved(),
    told: Annotated[Told, Parameter(name="*")] = Told(),
    page: Path | None = None,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Say what is wrong with the gradients that a trainer, of whatever kind, came to on one batch.

    They are compared with those of plain PyTorch, and with what known mistakes make of them. Exit status: 0 equal, 1
    explained, 3 unexplained, 2 a mistake of use.

    Parameters
    ----------
    model
        path/to/file.py:function or package.module:function, which returns the module; or hf:FOLDER.
    model_options
        Its options: --model-options.width 256.
    batch
        path/to/file.py:function, which returns (inputs, targets); or a file of safetensors with targets, or labels,
        and inputs by the names of the model's arguments.
    loss
        One of torch.nn.functional, or path/to/file.py:function, which takes (output, target).
    page
        File to write a page into, with the layers as a strip.
    json
        Print one JSON object on stdout, nothing else.
    """
    for name, value in (("model", model), ("batch", batch), ("gradients", saved.gradients or saved.after)):
        if value is None:
            raise UsageError(
                f"diagnose needs a {name}: stretto diagnose --model own.py:build --batch own.py:batch --loss "
                "cross_entropy --gradients gradients.safetensors"
            )
    answer = answer_of(str(model), model_options or {}, str(batch), loss, saved, told)
    if page is not None:
        from stretto.report.diagnosis import write_page

        write_page(answer, page)
    if json:
        print_json(answer.to_json())
    else:
        print("\n".join(in_words(answer)))
    return answer.status


def answer_of(model: str, options: Mapping[str, Any], batch: str, loss: str, saved: Saved, told: Told) -> "Answer":
    """Build the model, read the batch and the files, and ask."""
    import torch

    from stretto.analysis.diagnosis.api import diagnose as ask
    from stretto.analysis.diagnosis.names import read_batch
    from stretto.losses.value import AUTO, named_loss, suitable_loss
    from stretto.models.user_model import user_model
    from stretto.nn.chain import Chain
    from stretto.nn.deferred import fill
    from stretto.options.import_object import import_object

    if not (is_function(model) or is_model_folder(model)):
        raise UsageError(f"model {model!r}: give path/to/file.py:function, package.module:function or hf:FOLDER")
    if told.precision is not None and told.precision not in PRECISIONS:
        raise UsageError(f"precision {told.precision!r}: {nearest(told.precision, PRECISIONS)}")
    if saved.after is not None and saved.optimizer is None:
        raise UsageError(
            "after: the weights after a step depend on the optimizer: give --optimizer own.py:function, too"
        )
    made, _ = user_model(model, options)
    module = Chain(*made) if isinstance(made, list) else made
    if saved.weights is None and not is_model_folder(model):
        refuse_drawn(model, options, module)
    fill(module, mapped=True)
    inputs, target = read_batch(batch)
    known = {
        **vars(told),
        "microbatches": microbatches_of(told),
        "precision": None if told.precision is None else getattr(torch, PRECISIONS[told.precision]),
    }
    known.pop("method")
    return ask(
        module,
        (inputs, target),
        suitable_loss(inputs, target, batch) if loss == AUTO else named_loss(loss),
        given(saved.gradients, "gradients"),
        weights=given(saved.weights, "weights"),
        earlier=given(saved.earlier, "earlier"),
        activations=given(saved.activations, "activations"),
        after=given(saved.after, "after"),
        optimizer=None if saved.optimizer is None else import_object(saved.optimizer, "optimizer"),
        optimizer_state=given(saved.optimizer_state, "optimizer_state"),
        **known,
    )


def refuse_drawn(model: str, options: Mapping[str, Any], module: Any) -> None:
    """Raise UsageError for a function whose module has other weights at each call, which no trainer's can be."""
    from torch import equal, nn

    from stretto.models.user_model import user_model

    again, _ = user_model(model, options)
    others = (nn.ModuleList(again) if isinstance(again, list) else again).parameters()
    if not all(map(equal, module.parameters(), others)):
        raise UsageError(
            f"{model} gives other weights at each call, so that none are the trainer's: seed it, "
            "torch.manual_seed(0), or give --weights"
        )


def microbatches_of(told: Told) -> int:
    """The number that was told, or that of the method. Raises UsageError where they differ, or for no such method."""
    from stretto.methods import method
    from stretto.options.named import parse

    if told.method is None:
        return 1 if told.microbatches is None else told.microbatches
    method(told.method)
    of_method = parse(told.method)[1].get("microbatches")
    if None not in (of_method, told.microbatches) and of_method != told.microbatches:
        raise UsageError(f"microbatches={told.microbatches} and method {told.method!r} contradict each other: give one")
    return int(next((each for each in (told.microbatches, of_method) if each is not None), 1))


def given(text: str | None, what: str) -> Any:
    """What a function returns, or the path of a file; None if nothing was given."""
    from stretto.options.import_object import call

    return None if text is None else call(text, what, {}) if is_function(text) else Path(text)


def in_words(answer: "Answer") -> list[str]:
    """The sentence, then the table of parameters that differ, and what this batch cannot show."""
    lines = [answer.sentence + "."]
    if answer.names:
        pairs = list(answer.names.items())
        lines.append(f"names: {', '.join(f'{name} is {own}' for name, own in pairs[:3])}{', ...' * (len(pairs) > 3)}")
    wrong = [row for row in answer.rows if row.error > answer.tolerance]
    if wrong:
        rows = [
            (row.name, f"{row.error:.1e}", " and ".join(row.explained_by) or "-", f"{row.residual:.1e}")
            for row in wrong[:ROWS]
        ]
        rows.insert(0, ("parameter", "differs by", "explained by", "what is left"))
        more = [f"... and {len(wrong) - ROWS} more; --json has all"] if len(wrong) > ROWS else []
        lines += [
            "",
            aligned(rows),
            *more,
            f"relative to each gradient's length; up to {answer.tolerance:.0e} is rounding",
        ]
    for each in answer.alternatives[:3]:
        lines.append(f"also looked at: {each.name} leaves {each.residual:.1e} ({each.what})")
    hidden: dict[str, list[str]] = {}
    for name, why in answer.cannot_show.items():
        hidden.setdefault(why, []).append(name)
    groups = [f"{', '.join(names)} ({why})" for why, names in hidden.items()]
    return [*lines, *([f"not looked for: {'; '.join(groups)}"] if groups else [])]
