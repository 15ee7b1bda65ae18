"""The heads by name."""

from torch import Tensor, nn

from stretto.errors import UsageError, nearest
from stretto.heads import plain
from stretto.heads.auglocal import auglocal
from stretto.heads.head import REMEDY, First, HeadKind, Network, Site
from stretto.heads.infopro import infopro
from stretto.heads.solo import solo
from stretto.options.checks import of_kind, refuse, whole
from stretto.options.named import resolve
from stretto.options.parse import parse

HEADS: dict[str, HeadKind] = {
    "linear": HeadKind(lambda f, o: f == 2 and o == 2, plain.linear, "[N, d] -> [N, K]", plain=True),
    "pooled": HeadKind(lambda f, o: f >= 3 and o == 2, plain.pooled, "[N, C, ...] -> [N, K]", plain=True),
    "sequence": HeadKind(lambda f, o: f == 3 and o == 2, plain.sequence, "[N, T, d] -> [N, K]", plain=True),
    "language": HeadKind(lambda f, o: f == 3 and o == 3, plain.language, "[N, T, d] -> [N, T, V]", plain=True),
    "two-layer": HeadKind(plain.layered, plain.two_layer, "[N, ...] -> [N, K] or [N, T, d] -> [N, T, V]"),
    "auglocal": HeadKind(lambda f, o: True, auglocal, "what a stage gives -> what the model gives", several=True),
    "infopro": HeadKind(plain.layered, infopro, "[N, ...] -> [N, K]", several=True),
    "solo": HeadKind(lambda f, o: f == 3 and o == 3, solo, "[N, T, d] -> [N, T, V]", several=True),
}


def build(
    name: str, stage: int, features: tuple[Tensor, ...], output: Tensor, network: Network | None = None
) -> nn.Module:
    """A head called `name` for a stage that gives `features`, in a model that gives `output` (both for one batch).

    "auto" chooses by the number of dimensions. Options stand behind a name, "two-layer(width=64)". `network` is what
    some heads are built from. Raises UsageError where no kind fits, or more than one.
    """
    of_kind("head", name, str, f"the name of a head, one of {', '.join(HEADS)}, auto")
    whole("stage", stage)
    for what, tensors in (("features", features), ("output", (output,))):
        if (
            not isinstance(tensors, tuple | list)
            or not tensors
            or not all(isinstance(each, Tensor) for each in tensors)
        ):
            refuse(what, tensors, "tensors: what the stage and the model give for one batch")
        if not all(each.dim() for each in tensors):
            refuse(what, tensors, "tensors whose first dimension is the examples'")
    bare, options = parse(name, "head")
    if bare != "auto" and bare not in HEADS:
        raise UsageError(f"unknown head {bare!r}: {nearest(bare, [*HEADS, 'auto'])}")
    at = Site(stage, features, output, network)
    first = features[0]
    fitting = [kind for kind in HEADS.values() if kind.plain and kind.dims(first.dim(), output.dim())]
    if bare != "auto":
        chosen = HEADS[bare]
        if not chosen.dims(first.dim(), output.dim()):
            raise UsageError(f"head {bare!r} goes {chosen.takes}, but {at.shapes}; {REMEDY}")
    elif len(fitting) == 1 and first.is_floating_point():
        chosen = fitting[0]
    else:
        names = " or ".join(f"head={key!r} ({kind.takes})" for key, kind in HEADS.items() if kind in fitting)
        why = f"say {names}" if fitting else "none of the built-in heads fits"
        raise UsageError(f"cannot choose a head: {at.shapes}; {why}. {REMEDY}")
    head = chosen.build(at, **resolve(f"head {bare!r}", chosen.build, options))
    return head if len(features) == 1 or chosen.several else First(head)
