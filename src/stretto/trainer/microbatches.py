"""From a minibatch to what is loaded of each micro-batch: every replica's part of it, and how much its loss counts."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from stretto.errors import UsageError
from stretto.losses import CrossEntropy, MeanCheck
from stretto.nn.batch import (
    Named,
    check_examples,
    check_names,
    cut,
    entries,
    first_size,
    inputs_of,
    like,
    moved,
    target_of,
)
from stretto.schedule.even_split import part_sizes
from stretto.stage.specification import Specification
from stretto.stage.stage import Target


class MinibatchSplitter:
    """Deals minibatches out: to `pieces` micro-batches, and each of these to the replicas, of which `own` live here.

    A loss that is no mean over examples, and gives no sum and count either, is refused where there are several parts.

    This process reads inputs, or targets, only where it says so. Replicas that `merges` weights count the mean loss of
    their own examples; others add up gradients, and have shares of the whole minibatch's mean. `tells_x`: a head's loss
    here wants the inputs, too. `arguments` are stage 0's, if it lives here: what a dict of inputs may name.
    """

    def __init__(
        self,
        specification: Specification,
        pieces: int,
        *,
        own: Sequence[int],
        merges: bool,
        reads_x: bool,
        reads_y: bool,
        tells_x: bool = False,
        arguments: tuple[Mapping[str, bool] | None, str] | None = None,
    ) -> None:
        loss = specification.loss
        self._arguments = arguments
        self._cross_entropy = loss if isinstance(loss, CrossEntropy) else None
        self._mean_check = None if self._cross_entropy is not None else MeanCheck(loss)
        self._pieces = pieces
        self._replicas = specification.mesh.data
        self._parts = pieces * self._replicas
        self._own = own
        self._merges = merges
        self._reads_x = reads_x
        self._reads_y = reads_y
        self._tells_x = tells_x
        self._precision = specification.precision
        self._device = specification.device
        self._deals: dict[int, SplitSizes] = {}  # by number of examples

    def loads(self, x: Any, y: Any) -> list[dict[str, Any]]:
        """Of each own replica each micro-batch. Raises UsageError for examples that are missing, or too few."""
        if (x is None and self._reads_x) or (y is None and self._reads_y):
            self._refuse_none(x)
        if self._device.type == "meta":
            raise UsageError("the trainer's device is 'meta', which holds no numbers: nothing can be trained there")
        read = inputs_of(x) if self._reads_x else None
        y = target_of(y) if self._reads_y else y
        examples = check_examples(read, y if self._reads_y else None, cuts=self._parts > 1)
        if self._arguments is not None and isinstance(read, Named):
            check_names(read, *self._arguments)
        if self._parts > 1 and (self._reads_x or self._reads_y):
            examples = first_size(read if y is None else y) if examples is None else examples
            self._refuse_few(examples)
        else:
            examples = 1
        inputs = None if read is None else self._parted(read)
        targets = self._targets(y, examples) if self._reads_y else None
        made = []
        for replica in self._own:
            for piece in range(self._pieces):
                given = () if inputs is None else self._inputs(inputs[replica][piece])
                target = Target(None) if targets is None else targets[replica][piece]
                if self._tells_x:
                    target.inputs = given
                made.append({"activation": given, "target": target})
        return made

    def _refuse_none(self, x: Any) -> None:
        reader = "a head that reads it is" if self._tells_x else "stage 0 is"
        name, where = ("x", reader) if x is None and self._reads_x else ("y", "a loss is")
        raise UsageError(f"{name} is None in this process, where {where}: every process passes the same batches")

    def _refuse_few(self, examples: int) -> None:
        if examples < self._parts:
            among = f" for each of {self._replicas} replicas" if self._replicas > 1 else ""
            raise UsageError(
                f"{examples} examples cannot be cut into {self._pieces} micro-batches{among}: use larger minibatches, "
                "fewer microbatches=, or a loader that drops the last, short batch (DataLoader(..., drop_last=True))"
            )

    def _targets(self, y: Any, examples: int) -> list[list[Target]]:
        # Of each replica; what differs from a mean over examples is counted, and looked for.
        deal = self._deals.get(examples) or self._deal(examples)
        counted = self._cross_entropy is not None and self._cross_entropy.uneven(y)
        expected = 1.0
        if counted or self._mean_check is not None:
            expected = entries(y, examples) / (self._replicas if self._merges else 1)
        targets: list[list[Target]] = []
        for own, shares in zip(self._parted(y), deal.shares, strict=True):
            targets.append([])
            for part, share in zip(own, shares, strict=True):
                value = moved(part, self._device)
                targets[-1].append(Target(value, share, counted=counted, expected=expected))
        if self._mean_check is not None and self._parts > 1:
            check = self._mean_check.due(y, deal.sizes, deal.first)
            if check is not None:
                targets[self._own[0]][0].check = lambda output: check(self._precision.outputs(output))
        return targets

    def _parted(self, value: Any) -> list[list[Any]]:
        # Of each replica its micro-batches: each micro-batch is dealt out, so that its examples are what they were.
        pieces = cut(value, self._pieces)
        if self._replicas == 1:
            return [pieces]
        parted = [cut(piece, self._replicas, "parts, one for each replica") for piece in pieces]
        return [list(own) for own in zip(*parted, strict=True)]

    def _deal(self, examples: int) -> "SplitSizes":
        # How so many examples are dealt out: the same for every minibatch of that size.
        if self._parts == 1:
            deal = SplitSizes([[1.0]], (examples,), examples)
        else:
            pieces = part_sizes(examples, self._pieces)
            sizes = list(zip(*(part_sizes(piece, self._replicas) for piece in pieces), strict=True))
            wholes = [sum(own) if self._merges else examples for own in sizes]
            shares = [[size / (whole or 1) for size in own] for own, whole in zip(sizes, wholes, strict=True)]
            looked = pieces if self._merges else tuple(s for piece in pieces for s in part_sizes(piece, self._replicas))
            deal = SplitSizes(shares, looked, part_sizes(pieces[0], self._replicas)[self._own[0]])
        if len(self._deals) > 1000:
            self._deals.clear()
        self._deals[examples] = deal
        return deal

    def _inputs(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        here = like(tensors, [tensor.to(self._device) for tensor in tensors])
        return self._precision.inputs(here)


class SplitSizes(NamedTuple):
    """How a number of examples is dealt out.

    `shares` are each part's share of the examples whose mean loss it belongs to, [replica][micro-batch]; `sizes` are
    the parts that a mean is compared for, `first` is the size of this process's first one.
    """

    shares: list[list[float]]
    sizes: tuple[int, ...]
    first: int
