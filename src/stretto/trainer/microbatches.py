"""From a minibatch to what is loaded of each micro-batch: every replica's part of it, and how much its loss counts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from stretto.errors import UsageError
from stretto.losses import CrossEntropy, Loss, MeanCheck
from stretto.nn.batch import (
    check_examples,
    check_names,
    cut,
    entries,
    first_size,
    inputs_of,
    inputs_on,
    target_of,
    target_on,
)
from stretto.schedule.even_split import part_sizes
from stretto.stage.precision import Precision
from stretto.stage.stage import Target


class Dealer:
    """Deals minibatches out: to `pieces` micro-batches, and each of these to `replicas`, of which `own` live here.

    A `loss` that is no mean over examples, and gives no sum and count either, is refused where there are several parts.

    This process reads inputs, or targets, only where it says so. Replicas that `merges` weights count the mean loss of
    their own examples; others add up gradients, and have shares of the whole minibatch's mean. `tells_x`: a head's loss
    here wants the inputs, too. `arguments` are stage 0's, if it lives here: what a dict of inputs may name.
    """

    def __init__(
        self,
        pieces: int,
        replicas: int,
        *,
        own: Sequence[int],
        merges: bool,
        reads_x: bool,
        reads_y: bool,
        tells_x: bool = False,
        arguments: tuple[Mapping[str, bool] | None, str] | None = None,
        loss: Loss,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self._arguments = arguments
        self._loss = loss
        self._mean_check = MeanCheck(loss)
        self._pieces = pieces
        self._replicas = replicas
        self._own = own
        self._merges = merges
        self._reads_x = reads_x
        self._reads_y = reads_y
        self._tells_x = tells_x
        self._precision = precision
        self._device = device

    def loads(self, x: Any, y: Any) -> list[dict[str, Any]]:
        """Of each own replica each micro-batch. Raises UsageError for examples that are missing, or too few."""
        reader = "a head that reads it is" if self._tells_x else "stage 0 is"
        for name, value, where in (("x", x, reader * self._reads_x), ("y", y, "a loss is" * self._reads_y)):
            if value is None and where:
                raise UsageError(
                    f"{name} is None in this process, where {where}: every process passes the same batches"
                )
        if self._device.type == "meta":
            raise UsageError("the trainer's device is 'meta', which holds no numbers: nothing can be trained there")
        x = inputs_of(x) if self._reads_x else x
        y = target_of(y) if self._reads_y else y
        read = x if self._reads_x else None
        check_examples(read, y if self._reads_y else None, cuts=self._pieces * self._replicas > 1)
        if read is not None and self._arguments is not None:
            check_names(read, *self._arguments)
        examples = first_size(y if x is None else x) if self._pieces * self._replicas > 1 else 1
        if examples < self._pieces * self._replicas and (self._reads_x or self._reads_y):
            among = f" for each of {self._replicas} replicas" if self._replicas > 1 else ""
            raise UsageError(
                f"{examples} examples cannot be cut into {self._pieces} micro-batches{among}: use larger minibatches, "
                "fewer microbatches=, or a loader that drops the last, short batch (DataLoader(..., drop_last=True))"
            )
        nothing = [[None] * self._pieces] * self._replicas
        x_parts = self._parted(x) if self._reads_x else nothing
        targets = self._targets(y, examples) if self._reads_y else [[Target(None)] * self._pieces] * self._replicas
        return [
            self._load(*parts)
            for replica in self._own
            for parts in zip(x_parts[replica], targets[replica], strict=True)
        ]

    def _targets(self, y: Any, examples: int) -> list[list[Target]]:
        # Of each replica; what differs from a mean over examples is counted, and looked for.
        counted = isinstance(self._loss, CrossEntropy) and self._loss.uneven(y)
        expected = entries(y, examples) / (self._replicas if self._merges else 1)
        targets = [
            [Target(part, share, counted=counted, expected=expected) for part, share in zip(*own, strict=True)]
            for own in zip(self._parted(y), self._shares(examples), strict=True)
        ]
        if not counted and self._pieces * self._replicas > 1:
            sizes = part_sizes(examples, self._pieces)
            first = part_sizes(sizes[0], self._replicas)[self._own[0]]
            if not self._merges:
                sizes = tuple(size for piece in sizes for size in part_sizes(piece, self._replicas))
            check = self._mean_check.due(y, sizes, first)
            if check is not None:
                targets[self._own[0]][0].check = lambda output: check(self._precision.outputs(output))
        return targets

    def _parted(self, value: Any) -> list[list[Any]]:
        # Of each replica its micro-batches: each micro-batch is dealt out, so that its examples are what they were.
        pieces = cut(value, self._pieces)
        parted = [cut(piece, self._replicas, "parts, one for each replica") for piece in pieces]
        return [list(own) for own in zip(*parted, strict=True)]

    def _shares(self, examples: int) -> list[list[float]]:
        if self._pieces * self._replicas == 1:
            return [[1.0]]
        pieces = part_sizes(examples, self._pieces)
        sizes = list(zip(*(part_sizes(each, self._replicas) for each in pieces), strict=True))
        wholes = [sum(own) if self._merges else examples for own in sizes]
        return [[size / (whole or 1) for size in own] for own, whole in zip(sizes, wholes, strict=True)]

    def _load(self, x: Any, target: Target) -> dict[str, Any]:
        inputs = () if x is None else self._precision.inputs(inputs_on(x, self._device))
        value = None if target.value is None else target_on(target.value, self._device)
        return {
            "activation": inputs,
            "target": replace(target, value=value, inputs=inputs if self._tells_x else ()),
        }
