"""The table of heads by name, and `build`, which makes one."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import TypeVar

from torch import Tensor, nn

from stretto.errors import UsageError, nearest
from stretto.heads import man, plain, segprop, solo
from stretto.heads.auglocal import auglocal
from stretto.heads.gradients import GRADIENT_HEADS
from stretto.heads.head import REMEDY, First, HeadKind, HeadReadings, Network, Site
from stretto.heads.infopro import infopro
from stretto.heads.solo import blocks
from stretto.options.checks import function, of_kind, refuse, shown, whole
from stretto.options.import_object import import_object
from stretto.options.named import parse, resolve
from stretto.options.named import whole as at_least_one
from stretto.options.user_errors import called, explained
from stretto.schedule import Reach

Build = TypeVar("Build", bound=Callable[..., nn.Module])
NAME = re.compile(r"[A-Za-z0-9][\w-]*")
FITTING = "a function of the numbers of dimensions of the stage's and the model's output that returns True or False"
CALLED_WITH = (
    ". It is called with a stretto.heads.Site: at.shape is the stage's output for a batch, at.output the model's, "
    "at.classes the length of the latter's last dimension"
)
UNFIT = "none of the built-in heads fits"
ANYTHING = "the stage's output -> the model's output"
TOKENS = "[N, T, d] -> [N, T, V]"
HEADS: dict[str, HeadKind] = {
    "linear": HeadKind(lambda f, o: f == 2 and o == 2, plain.linear, "[N, d] -> [N, K]", plain=True),
    "pooled": HeadKind(lambda f, o: f >= 3 and o == 2, plain.pooled, "[N, C, ...] -> [N, K]", plain=True),
    "sequence": HeadKind(lambda f, o: f == 3 and o == 2, plain.sequence, "[N, T, d] -> [N, K]", plain=True),
    "language": HeadKind(lambda f, o: f == 3 and o == 3, plain.language, TOKENS, plain=True),
    "two-layer": HeadKind(plain.layered, plain.two_layer, f"[N, ...] -> [N, K] or {TOKENS}"),
    "auglocal": HeadKind(lambda f, o: True, auglocal, ANYTHING, several=True, of_network=True),
    "blocks": HeadKind(lambda f, o: f == 3 and o == 3, blocks, TOKENS, several=True, of_network=True),
    "infopro": HeadKind(plain.layered, infopro, f"[N, ...] -> [N, K] or {TOKENS}", several=True, of_network=True),
    "man": HeadKind(
        plain.layered, man.man, f"[N, ...] -> [N, K] or {TOKENS}", several=True, of_network=True, reads=man.READING
    ),
    "segprop": HeadKind(
        lambda f, o: True, segprop.segprop, ANYTHING, several=True, of_network=True, shares=segprop.shared_by
    ),
    "solo": HeadKind(
        lambda f, o: f == 3 and o == 3, solo.solo, TOKENS, several=True, of_network=True, reads=solo.READING
    ),
}


def register(
    name: str, *, takes: str = ANYTHING, dims: Callable[[int, int], bool] = lambda stage, model: True
) -> Callable[[Build], Build]:
    """Put a head in the table: `@stretto.heads.register("mine")` above a function of a `Site` that returns a module.

    dims: a function of the numbers of dimensions of a stage's first tensor and of the model's output, which returns
    whether the head fits them; takes: the same in words. Register in every process; `head=path/to/file.py:function`
    uses a function without registering it. Raises UsageError for a name that another function has.
    """
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        refuse("heads.register: name", name, "letters, digits and hyphens, such as 'my-head'")
    of_kind("heads.register: takes", takes, str, "words, such as '[N, d] -> [N, K]'")
    function("heads.register: dims", dims, FITTING, 2)

    def registered(build: Build) -> Build:
        wanted = "a function of a stretto.heads.Site that returns a module"
        function(f"heads.register({name!r})", build, wanted, 1, options=True)
        taken = HEADS.get(name)
        same = taken is not None and identity(taken.build) == identity(build)
        if name == "auto" or (taken is not None and not same):
            raise UsageError(f"there is a head {name!r} already: choose another name")
        fitting = partial(called, "heads.register: dims", dims, wanted=FITTING)
        HEADS[name] = HeadKind(fitting, checked(name, build), takes)
        return build

    return registered


def identity(build: Callable[..., nn.Module]) -> tuple[str, str]:
    """A function's module and name: still the same after its file or notebook cell has run again."""
    return str(build.__module__), getattr(build, "__qualname__", type(build).__qualname__)


def imported_head(text: str) -> HeadKind:
    """The head `path/to/file.py:function`, where the function takes a `Site`, and options as keywords.

    Raises UsageError if there is no such function.
    """
    build = import_object(text, "head")
    if not callable(build):
        raise UsageError(f"head {text!r} is {shown(build)}: give a function of a stretto.heads.Site")
    return HeadKind(lambda stage, model: True, checked(text, build), ANYTHING)


def checked(name: str, build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A user's function that builds a head. Its errors become UsageError, which names it."""

    @wraps(build)
    def built(at: Site, **options: object) -> nn.Module:
        with explained(f"head {name} raised", CALLED_WITH):
            return build(at, **options)

    return built


def headless(reach: Reach, given: Sequence[nn.Module | None] | None) -> list[int]:
    """The stages that need a head, and for which the user has not `given` one."""
    return [stage for stage in reach.heads[:-1] if given is None or stage >= len(given) or given[stage] is None]


def sharing(
    name: str, reach: Reach, given: Sequence[nn.Module | None] | None, stages: Sequence[nn.Module]
) -> Mapping[int, Sequence[nn.Parameter]] | None:
    """The parameters of other `stages` that the head behind a stage shares and trains; None for heads that share none.

    Raises UsageError for an option that the head does not have, or a network that does not have its layers.
    """
    bare, options = parse(name, "head")
    kind = HEADS.get(bare)
    if kind is None or kind.shares is None:
        return None
    missing = headless(reach, given)
    return kind.shares(stages, missing, **resolve(f"head {bare!r}", kind.build, options)) if missing else {}


def readings(
    name: str, reach: Reach, given: Sequence[nn.Module | None] | None, stages: Sequence[nn.Module]
) -> HeadReadings:
    """The weights that heads of a name read of other `stages`, behind all stages without a `given` head.

    Nothing where the owner has no such layers. Raises UsageError for an option that the head does not have.
    """
    bare, options = parse(name, "head")
    kind = HEADS.get(bare)
    if kind is None or kind.reads is None:
        return HeadReadings()
    chosen = resolve(f"head {bare!r}", kind.build, options)
    every = chosen["every"]
    at_least_one(f"head {bare!r}", "every", every)
    assert isinstance(every, int), "a whole number"
    missing = headless(reach, given)
    owner = kind.reads.owner
    readers = tuple((owner(stage, reach.num_stages), stage, every) for stage in missing)
    found = HeadReadings(bare, kind.reads, chosen, readers, reach.num_stages)
    lending = [reader for reader in readers if found.lent(reader[0], stages[reader[0]])]
    return replace(found, readers=tuple(lending))


def build(
    name: str, stage: int, features: tuple[Tensor, ...], output: Tensor, network: Network | None = None
) -> nn.Module:
    """Build the head `name` for a stage with the output `features`, in a model with the output `output`, for one batch.

    "auto" chooses by the numbers of dimensions. Options follow the name, "two-layer(width=64)". Some heads also need
    the `network`. Raises UsageError for an unknown name or option, for a head that does not fit, and for "auto" unless
    exactly one plain head fits.
    """
    check_site(name, stage, features, output)
    return build_at(name, Site(stage, features, output, network), HEADS)


def build_head_at(name: str, at: Site, predicts: bool) -> nn.Module:
    """Build the head `name` for a place; with `predicts` one of `GRADIENT_HEADS`. Errors as in `build`."""
    check_site(name, at.stage, at.features, at.output)
    return build_at(name, at, GRADIENT_HEADS if predicts else HEADS)


def check_site(name: str, stage: int, features: tuple[Tensor, ...], output: Tensor) -> None:
    """Raise UsageError for arguments of `build` that are of another kind."""
    of_kind("head", name, str, f"the name of a head, one of {', '.join(HEADS)}, auto")
    whole("stage", stage)
    for what, tensors in (("features", features), ("output", (output,))):
        if (
            not isinstance(tensors, tuple | list)
            or not tensors
            or not all(isinstance(tensor, Tensor) for tensor in tensors)
        ):
            refuse(what, tensors, "tensors: the outputs of the stage and the model for one batch")
        if not all(tensor.dim() for tensor in tensors):
            refuse(what, tensors, "tensors whose first dimension counts the examples")


def build_at(name: str, at: Site, kinds: Mapping[str, HeadKind]) -> nn.Module:
    """Build the head `name`, one of `kinds`, "auto" or a user's function, for a place."""
    bare, options = parse(name, "head")
    imported = imported_head(bare) if ":" in bare else None
    if imported is not None and kinds is GRADIENT_HEADS:
        imported = replace(imported, several=True)
    if imported is None and bare != "auto" and bare not in kinds:
        raise UsageError(f"unknown head {bare!r}: {nearest(bare, [*kinds, 'auto'])}")
    features, output = at.features, at.output
    first = features[0]
    fitting = [kind for kind in kinds.values() if kind.plain and kind.dims(first.dim(), output.dim())]
    if bare != "auto":
        chosen = imported or kinds[bare]
        if not chosen.dims(first.dim(), output.dim()):
            raise UsageError(f"head {bare!r} goes {chosen.takes}, but {at.shapes}; {REMEDY}")
    elif len(fitting) == 1 and first.is_floating_point():
        chosen = fitting[0]
    else:
        names = " or ".join(f"head={key} ({kind.takes})" for key, kind in kinds.items() if kind in fitting)
        why = f"write one of them behind the method, as in 'greedy(head=...)': {names}" if fitting else UNFIT
        raise UsageError(f"cannot choose a head: {at.shapes}; {why}. {REMEDY}")
    given = resolve(f"head {bare!r}", chosen.build, options)
    head = chosen.build(at, **given)
    if not isinstance(head, nn.Module):
        raise UsageError(f"head {bare!r} returned {shown(head)}: return an nn.Module")
    return head if len(features) == 1 or chosen.several else First(head)
