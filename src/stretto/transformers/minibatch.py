"""Joins the batches of gradient accumulation into one minibatch, padded to one length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.nn.batch import IGNORED

Inputs = dict[str, Tensor]
MASKS = {"input_ids": "attention_mask", "decoder_input_ids": None}  # what says which entries are padding


@dataclass(frozen=True)
class Padding:
    """How batches are padded: the id for padding, whether on the left, and the length that each input has at least.

    `lengths` are those of inputs whose length is fixed, as stages cut from an exported graph need it.
    """

    token: int = 0
    left: bool = False
    encoder_decoder: bool = False
    lengths: Mapping[str, int] = field(default_factory=dict)

    def value(self, name: str) -> int | None:
        """What an input is padded with; None for one that is not known."""
        known = {"input_ids": self.token, "decoder_input_ids": self.token, "labels": IGNORED}
        zeros = ("attention_mask", "decoder_attention_mask", "token_type_ids")
        return 0 if name in zeros else known.get(name)

    def pads_left(self, name: str) -> bool:
        """Whether an input is padded on its left; a decoder, which looks back only, always on its right."""
        return self.left and not (self.encoder_decoder and (name == "labels" or name.startswith("decoder_")))


def tensors_of(inputs: Mapping[str, Any]) -> Inputs:
    """The tensors of a collator's batch. Raises UsageError for anything else in it."""
    given = {name: value for name, value in inputs.items() if value is not None}
    for name, value in given.items():
        if not isinstance(value, Tensor) or not value.dim():
            what = "a single number" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise UsageError(
                f"the data collator's batch has {name!r}, {what}: only tensors whose first dimension counts the "
                "examples can be cut into micro-batches. Leave it out of the batch"
            )
    return given


def joined(batches: Sequence[Inputs], padding: Padding) -> Inputs:
    """One minibatch of all examples. Raises UsageError for batches that do not fit each other."""
    names = list(batches[0])
    for batch in batches[1:]:
        if set(batch) != set(names):
            raise UsageError(
                f"the batches of one step have different inputs, {', '.join(names)} and {', '.join(batch)}: the data "
                "collator has to give the same ones"
            )
    minibatch = {name: cat(name, [batch[name] for batch in batches], batches, padding) for name in names}
    for name, length in padding.lengths.items():
        if name in minibatch and minibatch[name].shape[1] > length:
            raise UsageError(
                f"{name} has length {minibatch[name].shape[1]}, but the stages are cut from an exported graph for "
                f"length {length}, that of the first batch: let the data collator pad to one length, "
                '(padding="max_length", max_length=...)'
            )
    return minibatch


def cat(name: str, parts: Sequence[Tensor], batches: Sequence[Inputs], padding: Padding) -> Tensor:
    """The tensors of one input, one below the other, padded to the longest."""
    if len({part.dim() for part in parts}) > 1 or len({part.shape[2:] for part in parts}) > 1:
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise UsageError(f"{name} has the shapes {shapes} in the batches of one step: they cannot be joined")
    if parts[0].dim() < 2:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))
    length = max(*(part.shape[1] for part in parts), padding.lengths.get(name, 0))
    if all(part.shape[1] == length for part in parts):
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))
    refuse_unpaddable(name, parts, batches, padding)
    return torch.cat([padded(part, length, padding.value(name), left=padding.pads_left(name)) for part in parts])


def padded(part: Tensor, length: int, value: int | None, *, left: bool) -> Tensor:
    more = length - part.shape[1]
    return torch.nn.functional.pad(part, (more, 0) if left else (0, more), value=value)


def refuse_unpaddable(name: str, parts: Sequence[Tensor], batches: Sequence[Inputs], padding: Padding) -> None:
    """Raise UsageError for an input of different lengths that padding would change."""
    lengths = ", ".join(str(part.shape[1]) for part in parts)
    if padding.value(name) is None or parts[0].dim() > 2:
        raise UsageError(
            f"{name} has the lengths {lengths} in the batches of one step, and nothing says how to pad it: let the "
            "data collator pad to one length"
        )
    mask = MASKS.get(name)
    if mask is not None and any(mask not in batch for batch in batches):
        raise UsageError(
            f"{name} has the lengths {lengths} in the batches of one step and no {mask} that would tell padding from "
            "text: let the data collator give one, or pad to one length"
        )
