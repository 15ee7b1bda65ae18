"""stretto doctor: check the environment, or a model."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from stretto.cli.output import aligned, print_json
from stretto.errors import UsageError
from stretto.options.import_object import is_function, unknown
from stretto.settings.command_line import ANY_OPTIMIZER, FLAG, OPTIONS, TEXTS, WHOLE, WHOLES, Option

EXAMPLES = 4  # of a data set, on which a network is tried
ADVISES_FOR = "adamw"  # unless an optimizer is named

if TYPE_CHECKING:
    from stretto.doctor.model_check import Diagnosis, ModuleFinding, Remark


@dataclass(frozen=True, kw_only=True)
class TriedFunctions:
    """What is tried on a model's examples."""

    loss: str | None = None
    """With --data, a loss as stretto train takes it: a step on the model's examples is tried, and an evaluation."""
    metric: Annotated[tuple[str, ...], TEXTS] = ()
    """Metrics, tried alike: NAME=path/to/file.py:function."""
    optimizer: Annotated[str | None, Parameter(help=f"An optimizer, tried alike: {ANY_OPTIMIZER}.")] = None


def doctor(
    *,
    model: str | None = None,
    model_options: Annotated[dict[str, Option] | None, OPTIONS] = None,
    data: str | None = None,
    functions: Annotated[TriedFunctions, Parameter(name="*")] = TriedFunctions(),
    example: Annotated[tuple[int, ...] | None, WHOLES] = None,
    stages: Annotated[int | None, WHOLE] = None,
    path: str | None = None,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Check what Stretto needs on this machine; exit with 1 if something that it cannot do without is missing.

    With --model: list the methods that each of its modules can be trained under, and exit with 1 if there is one for
    which the wanted weights cannot be guaranteed, if the model cannot be cut into stages, or if methods that cut
    minibatches refuse the loss.

    Parameters
    ----------
    model
        mlp, cnn, transformer, ...; or your own, path/to/file.py:function or package.module:function, which returns a
        module, a list of layers, or (module, example).
    model_options
        Its options: --model-options.width 256.
    data
        Data set of the network, or your own, path/to/file.py:function: its examples are tried.
    example
        Shape of an input batch of real numbers, 32,784, where the function gives no example.
    stages
        Stages to cut the model into; unless said otherwise one for each layer of an nn.Sequential, else one in all.
    path
        Where the model's list of blocks is, e.g. transformer.h, as for stretto.split.
    json
        Print one JSON object on stdout, nothing else.
    """
    for name, function in vars(functions).items():
        if function not in (None, ()) and (model is None or data is None):
            raise UsageError(f"{name} is tried on a model's examples: give --model and --data, too")
    if model is not None:
        in_parts = ""
        if functions != TriedFunctions():
            in_parts = try_functions(model, model_options or {}, data or "", functions)
        optimizer = functions.optimizer or ADVISES_FOR
        found = diagnosis_of(model, model_options or {}, data, example, stages, path, optimizer)
        diagnosis = replace(found, in_parts=in_parts)
        if data is not None and is_function(model) and functions == TriedFunctions():
            diagnosis = replace(diagnosis, remarks=(*diagnosis.remarks, *missing_loss(model, data)))
        if json:
            print_json({"model": model, **diagnosis.to_json()})
        else:
            print("\n".join(in_words(model, diagnosis)))
        return 0 if diagnosis.good else 1
    for name, value in (("example", example), ("stages", stages), ("path", path), ("data", data)):
        if value is not None:
            raise UsageError(f"{name} is about a model: give --model, too")
    return environment(json)


def try_functions(model: str, options: dict[str, Option], data: str, functions: TriedFunctions) -> str:
    """Try a step and an evaluation of the model as one stage. Raises UsageError for what does not work.

    Returns why a step in two parts does not, as with a loss that is no mean over examples; "" if it does.
    """
    from stretto.optim.by_name import takes_rate
    from stretto.settings.runs import TrainSettings, known
    from stretto.study.first_batches import refuse_evaluation
    from stretto.study.prepare import costs_of, prepare_trial, resolve

    optimizer = functions.optimizer or "auto"
    rate = 0.01 if functions.optimizer is not None and takes_rate(optimizer) else None
    settings = TrainSettings(
        model=model,
        model_options=options,
        data=data,
        loss=functions.loss or "auto",
        metric=functions.metric,
        optimizer=optimizer,
        lr=rate,
        stages=1,
        steps=1,
    )
    prepared = prepare_trial(resolve(settings))
    costs_of(prepared)
    refuse_evaluation(prepared)
    if not isinstance(prepared.computing, nullcontext):
        return ""  # the model has no values
    try:
        parted = prepare_trial(resolve(replace(settings, method="gpipe(microbatches=2)")))
        parted.trainer.step(*parted.dataset.train.first(known(parted.settings.batch_size)))
    except UsageError as error:
        return str(error).partition("\nin action")[0]
    return ""


def missing_loss(model: str, data: str) -> "list[Remark]":
    """A remark on targets that need a loss to be named."""
    from stretto.doctor.model_check import Remark
    from stretto.settings.runs import Settings
    from stretto.study.prepare import dataset, loss_of

    settings = Settings(model=model, data=data)
    try:
        loss_of(settings, dataset(settings))
    except UsageError as error:
        return [Remark("training", data, f"needs one thing more: {error}")]
    return []


def environment(json: bool) -> int:
    """Check this machine and print the findings; 1 if something is missing that Stretto cannot do without, else 0."""
    from stretto.doctor.environment import examine

    findings = examine()
    broken = [finding for finding in findings if finding.state == "broken"]
    if json:
        print_json({"ok": not broken, "checks": [finding.to_json() for finding in findings]})
    else:
        marks = {"good": "ok     ", "missing": "absent ", "broken": "BROKEN "}
        for finding in findings:
            print(f"{marks[finding.state]} {finding.name:<14} {finding.detail}")
        print("everything Stretto needs is here" if not broken else "what is marked BROKEN must be mended first")
    return 1 if broken else 0


def diagnosis_of(
    name: str,
    options: dict[str, Option],
    data: str | None,
    shape: tuple[int, ...] | None,
    stages: int | None,
    path: str | None,
    optimizer: str = ADVISES_FOR,
) -> "Diagnosis":
    """Import or build the model, and say which methods can train it, and what the advice for an optimizer is.

    `shape` is that of an input batch. Raises UsageError for a model or an example that there is not.
    """
    from stretto.doctor.model_check import advice_for, cut, diagnose, example_of, why_whole
    from stretto.optim.by_name import name_of_setting

    model, example = built_in(name, options, data) if ":" not in name else of_user(name, options, data)
    if shape is not None:
        if any(size < 1 for size in shape):
            raise UsageError(f"example={','.join(map(str, shape))}: every size is at least 1")
        example = example_of(shape, model)
    pieces = cut(model, stages, path, example)
    if example is None:
        from stretto.nn.shapes import example_for_linear

        example = example_for_linear([model])
    if example is None:
        raise UsageError(
            f"{name} gives no example, and what it takes cannot be told from its layers: give --data, of which the "
            "first examples are taken, or the shape of an input batch of real numbers, --example 32,784, or return "
            "(module, example)"
        )
    found = diagnose(model, pieces, example)
    whole = why_whole(model, pieces, example) if stages is None else ""
    advice = {} if whole else advice_for(pieces, name_of_setting(optimizer))
    return replace(found, whole=whole, advice=advice)


def built_in(name: str, options: dict[str, Option], data: str | None) -> tuple[Any, Any]:
    """A built-in network and a small batch of its data."""
    from stretto.models import MODELS
    from stretto.models.published import refuse_planned_only
    from stretto.nn.chain import Chain
    from stretto.settings.runs import DEFAULTS, Settings
    from stretto.study.prepare import build_model, dataset

    refuse_planned_only(name, options)
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    chosen = data or DEFAULTS[name].data
    settings = Settings(model=name, model_options=options, data=chosen)
    return Chain(*build_model(settings).layers), dataset(settings).train.first(EXAMPLES)[0]


def of_user(name: str, options: dict[str, Option], data: str | None) -> tuple[Any, Any]:
    """A user's network, and the example that it came with, or one of its data."""
    from stretto.models.user_model import user_model
    from stretto.nn.chain import Chain
    from stretto.settings.runs import Settings
    from stretto.study.prepare import dataset

    model, example = user_model(name, options)
    if data is not None:
        example, _ = dataset(Settings(model=name, data=data)).train.first(EXAMPLES)
    return (model if not isinstance(model, list) else Chain(*model)), example


def doubts(doubtful: "Sequence[ModuleFinding]") -> list[str]:
    """A table of modules, and what its columns mean."""
    from stretto.doctor.model_check import MEANING, methods_of

    rows = [("stage", "module", "kind", "parameters", *MEANING)]
    for module in doubtful:
        guaranteed = ["yes" if getattr(module, mechanism) else "NO" for mechanism in MEANING]
        rows.append((str(module.stage), module.name, module.kind, f"{module.parameters:,}", *guaranteed))
    meanings = [f"{each:<9}  {MEANING[each]}: {', '.join(methods)}" for each, methods in methods_of().items()]
    rest = "With any other method no weights change between a forward and its backward: every module will do."
    return [aligned(rows), "", *meanings, rest, ""]


def in_words(name: str, diagnosis: "Diagnosis") -> list[str]:
    """Lines: the modules that some methods cannot train, and why; the other modules in one line; remarks."""
    from stretto.doctor.model_check import OUTPUT, cutting_methods

    plural = "stage" if diagnosis.num_stages == 1 else "stages"
    examined = "; --stages N examines the stages of a run" if diagnosis.is_one_piece else ""
    doubtful = [module for module in diagnosis.modules if not module.good]
    good = [module for module in diagnosis.modules if module.good]
    lines = [f"{name} in {diagnosis.num_stages} {plural}, input {diagnosis.example}{examined}", ""]
    lines += doubts(doubtful) if doubtful else []
    if good:
        count = f"{len(good)} {'other ' * bool(doubtful)}module{'s' * (len(good) > 1)} with"
        number = sum(module.parameters - module.tied for module in good)
        lines += [f"{count} {number:,} parameters: every method can train them", ""]
    for objection in diagnosis.objections:
        mechanisms = " and ".join(objection.mechanisms)
        lines.append(f"{objection.module} ({objection.kind}), {mechanisms}: {objection.reason}; {objection.remedy}")
    if diagnosis.shares:
        lines.append(f"stages have {', '.join(f'{share:.1%}' for share in diagnosis.shares)} of the cost")
    if diagnosis.uneven:
        lines.append(f"mind: {diagnosis.uneven}")
    alike: dict[tuple[str, str], list[str]] = {}
    for remark in diagnosis.remarks:
        alike.setdefault((remark.kind, remark.remark), []).append(remark.module)
    lines += [f"mind: {', '.join(names)} ({kind}) {remark}" for (kind, remark), names in alike.items()]
    if diagnosis.whole:
        lines.append(f"it cannot be cut into stages, so that no run can train it in several: {diagnosis.whole}")
    if diagnosis.in_parts:
        lines.append(
            f"train refuses replicas, and methods that cut a minibatch ({', '.join(cutting_methods())}): "
            f"{diagnosis.in_parts}"
        )
    lines += [each["why"] for each in diagnosis.advice.values()]
    but = ", but not every method takes the loss" if diagnosis.in_parts else ""
    is_odd = any(remark.module == OUTPUT for remark in diagnosis.remarks)
    but += ", but local methods want a head of your own" if is_odd else ""
    return [*lines, "see those marked NO" if diagnosis.objections else f"every method's weights can be guaranteed{but}"]
