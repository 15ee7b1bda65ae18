"""The answer: a sentence, the mistakes, a table by parameter, and what this batch cannot show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stretto.analysis.diagnosis.evidence import Evidence
from stretto.analysis.diagnosis.hypotheses.hypothesis import numbers
from stretto.analysis.diagnosis.search import Explanation
from stretto.analysis.diagnosis.step import groups
from stretto.errors import UsageError

EQUAL, EXPLAINED, UNEXPLAINED = "equal", "explained", "unexplained"
FEW = 0.2  # the share of a gradient's elements up to which they are named
STATUS = {EQUAL: 0, EXPLAINED: 1, UNEXPLAINED: 3}


@dataclass(frozen=True, kw_only=True)
class FoundMistake:
    """A mistake: its name and options, what it does, the parameters, what it leaves, and what explains as much."""

    name: str
    options: Mapping[str, Any]
    what: str
    parameters: Sequence[str]
    residual: float
    same_as: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """As --json prints it."""
        return {
            **vars(self),
            "options": dict(self.options),
            "parameters": [*self.parameters],
            "same_as": [*self.same_as],
        }


@dataclass(frozen=True, kw_only=True)
class ParameterRow:
    """A parameter: how far its gradient is from plain training's, relative to its length, and what explains it."""

    name: str
    error: float
    explained_by: Sequence[str]
    residual: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is wrong with a step's gradients. `verdict` is equal, explained or unexplained.

    `hypotheses` together explain what is wrong, the largest effect first; `alternatives` explain most beside them.
    `cannot_show` says which mistakes this batch would not show, and why. `names` are those that were matched.
    `tolerance`: residuals up to this are rounding.
    """

    verdict: str
    sentence: str
    hypotheses: Sequence[FoundMistake]
    alternatives: Sequence[FoundMistake]
    rows: Sequence[ParameterRow]
    cannot_show: Mapping[str, str]
    names: Mapping[str, str]
    tolerance: float

    @property
    def status(self) -> int:
        """The exit status of the command: 0 equal, 1 explained, 3 unexplained."""
        return STATUS[self.verdict]

    def __str__(self) -> str:
        return self.sentence

    def to_json(self) -> dict[str, Any]:
        """As --json prints it."""
        return {
            "verdict": self.verdict,
            "sentence": self.sentence,
            "hypotheses": [each.to_json() for each in self.hypotheses],
            "alternatives": [each.to_json() for each in self.alternatives],
            "parameters": [{**vars(row), "explained_by": [*row.explained_by]} for row in self.rows],
            "cannot_show": dict(self.cannot_show),
            "names": dict(self.names),
            "tolerance": self.tolerance,
        }


def findings(evidence: Evidence, chosen: Explanation, others: Sequence[Explanation]) -> list[FoundMistake]:
    """The mistakes of an explanation, the one that concerns most first."""
    made = []
    for number, (mistake, concerned) in enumerate(zip(chosen.mistakes, chosen.concerned, strict=True)):
        rest = chosen.names[:number] + chosen.names[number + 1 :]
        same = [
            name
            for other in others
            for name in other.names
            if len(other.names) == len(chosen.names)
            and name != mistake.hypothesis.name
            and sorted((*rest, name)) == sorted(other.names)
        ]
        left = chosen.residuals[list(concerned)].max().item() if concerned else 0.0
        names = [evidence.entries[index].name for index in concerned]
        found = FoundMistake(
            name=mistake.hypothesis.name,
            options=mistake.variant.options,
            what=mistake.variant.what,
            parameters=names,
            residual=left,
            same_as=list(dict.fromkeys(same)),
        )
        made.append(found)
    return sorted(made, key=lambda each: -len(each.parameters))


def where(evidence: Evidence, names: Sequence[str]) -> str:
    """Some parameters in words: all, whole stages, a range in the order of the model, or their names."""
    every = [entry.name for entry in evidence.entries]
    if len(names) == len(every):
        return "of every parameter"
    if len(names) <= 2:
        return f"of {' and of '.join(names)}"
    stages = groups(evidence.step)
    chosen = [number for number, stage in enumerate(stages) if set(stage) <= set(names)]
    if chosen and sorted(name for number in chosen for name in stages[number]) == sorted(names):
        return f"of stage{'s' * (len(chosen) > 1)} {numbers(chosen)} of {len(stages)}"
    places = [every.index(name) for name in names]
    if places == list(range(places[0], places[-1] + 1)):
        return f"of {len(names)} of {len(every)} parameters, from {names[0]} to {names[-1]},"
    return f"of {len(names)} of {len(every)} parameters ({', '.join(names[:3])}, ...)"


def sentence_of(evidence: Evidence, found: Sequence[FoundMistake]) -> str:
    """The answer in a sentence."""
    parts = [f"the gradient {where(evidence, each.parameters)} {each.what}" for each in found]
    text = "; and ".join(parts)
    same = [name for each in found for name in each.same_as]
    told = f". On this batch that looks the same as {', '.join(dict.fromkeys(same))}" if same else ""
    return text[0].upper() + text[1:] + told


def rows_of(evidence: Evidence, explanation: Explanation | None) -> list[ParameterRow]:
    """The table, in the order of the model."""
    plain = evidence.plain.residuals
    left = plain if explanation is None else explanation.residuals
    made = []
    for index, entry in enumerate(evidence.entries):
        names = []
        if explanation is not None:
            pairs = zip(explanation.names, explanation.concerned, strict=True)
            names = [name for name, concerned in pairs if index in concerned]
        made.append(
            ParameterRow(name=entry.name, error=float(plain[index]), explained_by=names, residual=float(left[index]))
        )
    return made


def where_to_look(evidence: Evidence) -> str:
    """Where gradients, or outputs that were given, begin to differ, in words."""
    if evidence.step.activations:
        return first_output(evidence)
    good = evidence.good(evidence.plain.residuals)
    wrong = torch.nonzero(~good).flatten().tolist()
    first, last = (evidence.entries[wrong[place]].name for place in (0, -1))
    if wrong == list(range(wrong[-1] + 1)) and not bool(good.all()) and wrong[-1] + 1 < len(good):
        return f"every gradient up to {last} differs, all after it are right: look at the backward of what follows it"
    if len(wrong) == len(good):
        drawn = "; the model draws random numbers (dropout): turn that off for the step" * evidence.passes.random
        told = "look at the loss, at the batch and at the weights before single layers, or give --activations, too"
        return f"every gradient differs: {told}{drawn}"
    told = f"{len(wrong)} of {len(good)} gradients differ, the first is {first}, the last {last}"
    return told + few_elements(evidence, wrong)


def few_elements(evidence: Evidence, wrong: Sequence[int]) -> str:
    """Which elements of gradients differ, in words, where that is a few of each; else nothing."""
    made, told = evidence.made(evidence.base), []
    for index in wrong:
        given, plain = (evidence.entry(values, index) for values in (evidence.given, made))
        apart = torch.nonzero((given - plain).abs() > evidence.tolerance * plain.abs().max()).flatten().tolist()
        whole = evidence.step.parameters[evidence.entries[index].parameter].numel() == len(plain)
        if not apart or not whole or len(apart) > FEW * len(plain):
            return ""
        told.append(f"{len(apart)} of {len(plain)} elements of {evidence.entries[index].name} ({numbers(apart[:4])})")
    return f"; of each only a few elements do: {', '.join(told[:3])}{', ...' * (len(told) > 3)}"


def first_output(evidence: Evidence) -> str:
    """The first output that differs from plain training's. Raises UsageError for one of another shape."""
    step = evidence.step
    parts = step.parts_of(step.inputs) if evidence.base.condition.by_part else [step.inputs]
    for name, output in evidence.passes.activations([*step.activations], parts).items():
        given = step.activations[name]
        if given.shape != output.shape:
            raise UsageError(
                f"diagnose: the output of {name or 'the model'} in activations is {list(given.shape)}, and "
                f"{list(output.shape)} for the whole batch: join those of micro-batches and replicas in order"
            )
        left = float((given.double() - output.double()).norm()) / (float(output.double().norm()) or 1.0)
        if not left <= evidence.rounding:
            where = name or "the model"
            return f"the output of {where} is the first that differs, by {left:.1e} of it: look at its forward"
    return "every output that was given is right: look at the loss and the backward"
