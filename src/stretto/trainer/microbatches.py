"""Splits minibatches into micro-batches and these among replicas, and weights the loss of each part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from stretto.errors import UsageError
from stretto.losses import CrossEntropy, Loss, MeanCheck, Sum
from stretto.losses.comparison import Neighbours
from stretto.losses.mean_check import Check
from stretto.losses.minibatch_counts import Target
from stretto.methods import Method
from stretto.methods.advice import refusal
from stretto.methods.table import with_fewer
from stretto.nn.batch import (
    NO_TARGETS,
    Named,
    check_examples,
    check_names,
    common_length,
    cut,
    first_size,
    inputs_of,
    num_entries,
    target_of,
    to_device,
    with_names_of,
)
from stretto.schedule import Schedule
from stretto.schedule.even_split import part_sizes
from stretto.stage.trainer_arguments import Specification


@dataclass(frozen=True)
class MinibatchCut:
    """How a method cuts a minibatch among micro-batches and replicas, and what to say where it has too few examples."""

    method: Method
    schedule: Schedule
    replicas: int

    @property
    def pieces(self) -> int:
        return self.schedule.per_turn

    @property
    def parts(self) -> int:
        """The number of parts, of at least one example each."""
        return self.pieces * self.replicas

    def __str__(self) -> str:
        among = f" for each of {self.replicas} replicas" if self.replicas > 1 else ""
        return f"{self.pieces} micro-batches{among}"

    def too_few(self, examples: int, reason: str, *remedies: str) -> UsageError:
        """The refusal of so many examples: the reason, then the remedies and the method's own option."""
        own = self._own_remedy(examples // self.replicas)
        *first, last = [*remedies[:1], *own, *remedies[1:]]
        use = ", ".join([*first, f"or {last}" if first else last])
        return UsageError(refusal(self.method, f"{reason}: use {use}", cuts=True))

    def _own_remedy(self, most: int) -> list[str]:
        if self.method.planning is None or self.method.planning.cut is None or self.pieces == 1:
            return []
        fewer = with_fewer(self.method, most, self.schedule)
        return [f"method '{fewer}'"] if fewer is not None else ["fewer stages"]


class MinibatchSplitter:
    """Splits minibatches into micro-batches as `schedule` has them, and each of these among the replicas.

    `own` are the replicas here.

    A loss that is neither a mean over examples nor a sum and a count is refused where there are several parts.

    `reads_x`, `reads_y`: whether this process reads inputs and targets. `merges`: replicas merge weights, so that each
    counts the mean loss of its own examples; otherwise they add up gradients, and each has a share of the whole
    minibatch's mean. `head_reads_x`: the loss of a head here uses the inputs, too. `arguments` are those of stage 0's
    forward, if it is here: the names that a dict of inputs may have. `parts` is the number of parts of a minibatch.
    """

    def __init__(
        self,
        specification: Specification,
        schedule: Schedule,
        *,
        own: Sequence[int],
        merges: bool,
        reads_x: bool,
        reads_y: bool,
        head_reads_x: bool = False,
        arguments: tuple[Mapping[str, bool] | None, str] | None = None,
    ) -> None:
        loss = specification.loss
        self._arguments = arguments
        self._cross_entropy = loss if isinstance(loss, CrossEntropy) else None
        self._mean_check = None if self._cross_entropy is not None else MeanCheck(loss)
        self._replicas = specification.mesh.data
        self.cut = MinibatchCut(specification.method, schedule, self._replicas)
        self._pieces, self.parts = self.cut.pieces, self.cut.parts
        self._own = own
        self._merges = merges
        self.reads_x = reads_x
        self.reads_y = reads_y
        self._head_reads_x = head_reads_x
        self._may_lack_targets = reads_x and reads_y and self.parts == 1
        self._precision = specification.precision
        self._converts = specification.precision.converts
        self._device = specification.device
        self._sizes: dict[int, SplitSizes] = {}  # by the number of examples of a minibatch

    def loads(self, x: Any, y: Any) -> list[dict[str, Any]]:
        """The loader's values, by name, of each micro-batch of each replica here, replica after replica.

        Where nothing is cut, and one process has the first stage and the loss, y may be None, which the loss then gets.
        Raises UsageError for examples that are missing, or too few.
        """
        if (x is None and self.reads_x) or (y is None and self.reads_y and not self._may_lack_targets):
            self._refuse_none(x)
        refuse_list_of_examples(x, y)
        if self._device.type == "meta":
            raise UsageError("the trainer's device is 'meta', which holds no numbers: nothing can be trained there")
        read = inputs_of(x) if self.reads_x else None
        y = target_of(y) if self.reads_y else y
        examples = check_examples(read, y if self.reads_y else None, cuts=self.parts > 1)
        if self._arguments is not None and isinstance(read, Named):
            check_names(read, *self._arguments)
        if self.parts > 1 and (self.reads_x or self.reads_y):
            examples = first_size(read if y is None else y) if examples is None else examples
            self._refuse_few(examples)
        else:
            examples = 1
        inputs = None if read is None else self._by_replica(read)
        targets = self._targets(y, examples) if self.reads_y else None
        loads = []
        for replica in self._own:
            for piece in range(self._pieces):
                given = () if inputs is None else self._inputs(inputs[replica][piece])
                target = Target(None) if targets is None else targets[replica][piece]
                if self._head_reads_x:
                    target.inputs = given
                loads.append({"activation": given, "target": target})
        return loads

    def _refuse_none(self, x: Any) -> None:
        reader = "a head that reads it is" if self._head_reads_x else "stage 0 is"
        name, where = ("x", reader) if x is None and self.reads_x else ("y", "a loss is")
        lacks = f". Data without targets: {NO_TARGETS}" if name == "y" else ""
        raise UsageError(
            f"{name} is None in this process, where {where}: give step(x, y) both; "
            f"every process passes the same batches{lacks}"
        )

    def _refuse_few(self, examples: int) -> None:
        if examples < self.parts:
            raise self.cut.too_few(
                examples,
                f"{examples} examples cannot be cut into {self.cut}, as {self.cut.method} cuts them",
                "larger minibatches",
                "a loader that drops the last, short batch (DataLoader(..., drop_last=True))",
            )

    def _targets(self, y: Any, examples: int) -> list[list[Target]]:
        # By replica and micro-batch, with the check of a loss that may not be a mean over examples.
        split = self._sizes.get(examples) or self._split(examples)
        counted = self._cross_entropy is not None and self._cross_entropy.uneven(y)
        expected = 1.0
        if counted or self._mean_check is not None:
            expected = num_entries(y, examples) / (self._replicas if self._merges else 1)
        parts = self._by_replica(y)
        targets: list[list[Target]] = []
        for values, shares in zip(parts, split.shares, strict=True):
            targets.append([])
            for value, share in zip(values, shares, strict=True):
                targets[-1].append(Target(to_device(value, self._device), share, counted=counted, expected=expected))
        if self._mean_check is not None and self.parts > 1:
            self._set_checks(self._mean_check, y, parts, targets, split)
        return targets

    def _set_checks(
        self,
        mean_check: MeanCheck,
        y: Any,
        parts: Sequence[Sequence[Any]],
        targets: Sequence[Sequence[Target]],
        split: "SplitSizes",
    ) -> None:
        # What is to be called with the output and the loss of each micro-batch here.
        made_up = mean_check.due(y, split.sizes, split.first)
        together = self._replicas > 1 and not self._merges
        for replica in self._own:
            next_one = (replica + 1) % self._replicas
            beside = (parts[next_one], split.examples[next_one]) if together else None
            neighbours = mean_check.neighbours(parts[replica], split.examples[replica], beside)
            for number, target in enumerate(targets[replica]):
                first = made_up if not number and replica == self._own[0] else None
                if first is not None or neighbours is not None:
                    target.check = partial(self._check, first, neighbours, number, target.value)

    def _check(
        self,
        made_up: Check | None,
        neighbours: Neighbours | None,
        number: int,
        target: Any,
        loss: Loss,
        output: Any,
        value: Tensor | Sum,
    ) -> None:
        output = self._precision.outputs(output)
        if made_up is not None:
            made_up(loss, output, target)
        if neighbours is not None:
            neighbours.check(loss, number, output, value)

    def _by_replica(self, value: Any) -> list[list[Any]]:
        # Each replica's part of each micro-batch: a micro-batch has the same examples for any number of replicas.
        pieces = cut(value, self._pieces)
        if self._replicas == 1:
            return [pieces]
        parts = [cut(piece, self._replicas, "parts, one for each replica") for piece in pieces]
        return [list(of_replica) for of_replica in zip(*parts, strict=True)]

    def _split(self, examples: int) -> "SplitSizes":
        # The sizes and shares for this number of examples, kept for later minibatches of the same size.
        if self.parts == 1:
            split = SplitSizes([[1.0]], (examples,), examples, [[examples]])
        else:
            pieces = part_sizes(examples, self._pieces)
            sizes = list(zip(*(part_sizes(piece, self._replicas) for piece in pieces), strict=True))
            wholes = [sum(of_replica) if self._merges else examples for of_replica in sizes]
            shares = [
                [size / (whole or 1) for size in of_replica] for of_replica, whole in zip(sizes, wholes, strict=True)
            ]
            parts = tuple(size for piece in pieces for size in part_sizes(piece, self._replicas))
            compared = pieces if self._merges else parts
            first = part_sizes(pieces[0], self._replicas)[self._own[0]]
            split = SplitSizes(shares, compared, first, sizes)
        if len(self._sizes) > 1000:
            self._sizes.clear()
        self._sizes[examples] = split
        return split

    def _inputs(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        here = with_names_of(tensors, [tensor.to(self._device) for tensor in tensors])
        return self._precision.inputs(here) if self._converts else here


def refuse_list_of_examples(x: Any, y: Any) -> None:
    """Raise UsageError for lists of a tensor and of a dict for each example, as detectors take them."""
    if not (isinstance(x, list | tuple) and isinstance(y, list | tuple) and len(x) == len(y)):
        return
    if all(isinstance(part, Mapping) for part in y) and not common_length((x, y)):
        raise UsageError(
            f"x is a list of {len(x)} tensors and y one of as many dicts, one for each example, but a list is the "
            "arguments of stage 0: let collate_fn stack images of one size, x [N, C, H, W]; y may stay a list"
        )


class SplitSizes(NamedTuple):
    """How a number of examples is split.

    `shares`: each part's share of the examples in whose mean loss it counts, [replica][micro-batch]. `sizes`: the
    numbers of examples of the parts for which the loss is checked to be a mean. `first`: the number of examples of this
    process's first part. `examples`: those of each part, [replica][micro-batch].
    """

    shares: list[list[float]]
    sizes: tuple[int, ...]
    first: int
    examples: Sequence[Sequence[int]]
