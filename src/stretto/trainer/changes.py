"""What a user may change after a Trainer was made: followed, or found at the next step and refused by name.

The weights that are trained, the modules of stages and what a recorded forward has made of a model's attributes are
settled when the Trainer is made. A plain loop would honour a change from the next step on. Weights may be set by hand
between steps: whatever else has copies of them follows, or the step is refused.
"""

import copy
import dis
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from stretto.errors import UsageError
from stretto.nn.carried_attributes import CONTAINERS, PLAIN, own_attributes
from stretto.nn.hooks import REMEDY, hooks_of
from stretto.nn.nested import attributes
from stretto.nn.preserve import unique
from stretto.nn.sharded_modules import is_sharded
from stretto.options.checks import shown
from stretto.options.object_digest import methods_of_forward, names_in
from stretto.replicas import Sync
from stretto.stage.stage import Stage

AGAIN = "do so before the Trainer is made, or make another one, which may go on with this one's weights"
ABSENT = object()
LOADS = {"LOAD_ATTR", "LOAD_METHOD"}
LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # whose own mode decides nothing
UNSEEN = (
    "was set by hand through .data, which leaves no trace, so that copies of it (replicas, float32 masters) could not "
    "follow: change weights under torch.no_grad(), as in p.clamp_(-1, 1), or by load_state_dict"
)


class Settled:
    """What was settled when a Trainer was made. `check` takes about 50 ns for each module, parameter and attribute."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        model: nn.Module | None,
        elsewhere: Mapping[int, nn.Module],
        *,
        in_parts: bool,
        modes: Mapping[nn.Module, bool],
    ) -> None:
        """`elsewhere` are stages of other processes, as far as they are known here.

        `modes` are those of the model's modules when it was cut, of modules that were not left where they were.

        `in_parts`: several micro-batches go through the stages before an update.
        """
        inside = unique([*stages.values()])
        lost = [] if model is None else [module for module in unique([model]) if module not in set(inside)]
        self._parameters = [p for module in inside for p in module.parameters(recurse=False)]
        self._trained = [p.requires_grad for p in self._parameters]
        self._entries = [
            (vars(module)["_modules"], name, child)
            for module in (*inside, *lost)
            for name, child in module._modules.items()
        ]
        self._entries += {
            (id(where), name): (where, name, value) for module in lost for where, name, value in read_by(module)
        }.values()
        self._hooks = [(hooks, len(hooks)) for module in lost for hooks in hooks_of(module)]
        self._groups = [(optimizer, group_sizes(optimizer)) for optimizer in optimizers]
        self._stages, self._model = stages, model
        cut = [module for module in lost if module in modes and type(module) not in LISTS]
        self._cut, self._modes = cut, [modes[module] for module in cut]
        known = set() if model is None else set(model.modules())
        self._added = [(module, module.training) for module in inside if module not in known] if cut else []
        self._as_cut = True
        holders: dict[int, list[tuple[int, str, Tensor]]] = {}
        for index, stage in {**stages, **elsewhere}.items():
            for name, buffer in stage.named_buffers():
                holders.setdefault(id(buffer), []).append((index, name, buffer))
        self._shared = [
            (buffer, buffer._version, f"{index}.{name}", others[0][0])
            for (index, name, buffer), *others in holders.values()
            if others and (in_parts or not {index, *(other for other, *_ in others)} <= stages.keys())
        ]

    def check(self) -> None:
        """Raise UsageError if something has changed that is settled."""
        if [p.requires_grad for p in self._parameters] != self._trained:
            raise UsageError(self._said_of_parameters())
        for where, name, value in self._entries:
            now = where.get(name, ABSENT)
            if now is not value and differs(now, value):
                raise UsageError(self._said_of_entry(where, name, value, now))
        for hooks, number in self._hooks:
            if len(hooks) > number:
                path = self._place(hooks)
                raise UsageError(
                    f"a hook was added to {path} after the Trainer was made, but no stage calls that module: {REMEDY}"
                )
        if [module.training for module in self._cut] != self._modes or not self._as_cut:
            self._follow_modes()
        for optimizer, sizes in self._groups:
            if (present := group_sizes(optimizer)) != sizes:
                raise UsageError(
                    f"an optimizer has {len(present)} groups of {present} parameters now, and had {sizes} when the "
                    f"Trainer was made: {AGAIN}"
                )
        for buffer, version, title, other in self._shared:
            if buffer._version != version:
                raise UsageError(
                    f"training changes the buffer {title}, which stage {other} has, too: on several processes each "
                    "would keep its own, and micro-batches would not come to it in a plain loop's order. Give each "
                    "stage a module of its own, or put both calls into one stage"
                )

    def _follow_modes(self) -> None:
        # What was recorded of the model follows model.eval() and model.train(), but no mode of a single module.
        now = [module.training for module in self._cut]
        self._as_cut = now == self._modes
        if any(now) and not self._as_cut and (not all(now) or any(self._modes)):
            module = next(each for each, one, then in zip(self._cut, now, self._modes, strict=True) if one != then)
            modes = ("evaluation", "training")
            raise UsageError(
                f"{self._place(vars(module))} is in {modes[module.training]} mode now, and was in "
                f"{modes[not module.training]} mode when its model was cut, which its stages go on with: put the whole "
                "model into evaluation or training, or split it again"
            )
        for module, trains in self._added:
            module.training = trains if self._as_cut else all(now)

    def _said_of_parameters(self) -> str:
        changed = {id(p) for p, then in zip(self._parameters, self._trained, strict=True) if p.requires_grad != then}
        names = list(
            dict.fromkeys(
                f"{index}.{name}"
                for index, stage in self._stages.items()
                for name, parameter in stage.named_parameters()
                if id(parameter) in changed
            )
        )
        first = next(p for p in self._parameters if id(p) in changed)
        verb = "requires a gradient now, and did not" if first.requires_grad else "requires no gradient now, and did"
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        return f"{names[0]}{more} {verb} when the Trainer was made: {AGAIN}"

    def _said_of_entry(self, where: Any, name: str, value: object, now: object) -> str:
        place = self._place(where)
        if isinstance(value, nn.Module):
            kinds = "nothing" if now is ABSENT else f"another {type(now).__name__}"
            return f"{place} has {kinds} as {name!r} since the Trainer was made: {AGAIN}"
        told = "another tensor" if isinstance(value, Tensor) else "nothing" if now is ABSENT else shown(now)
        return (
            f"{place} has {name}={told} now, and had {shown(value)} when it was split: "
            "its stages go on with that; split it and make the Trainer again, or let a module that is called as it is "
            "read the attribute"
        )

    def _place(self, held: Any) -> str:
        # The module that holds these attributes, modules or hooks.
        roots = [(f"stage {index}", stage) for index, stage in self._stages.items()]
        if self._model is not None:
            roots.append((type(self._model).__name__, self._model))
        for title, root in roots:
            for path, module in root.named_modules():
                if any(held is each for each in (vars(module), module._modules, *hooks_of(module))):
                    return f"{path} of {title}" if path else title
                for name, value in vars(module).items():
                    if held is getattr(value, "__dict__", None):
                        return f"{f'{path}.{name}'.lstrip('.')} of {title}"
        return "a module"


def settled(stages: Mapping[int, Stage], given: Iterable[object], *, in_parts: bool) -> Settled:
    """What is settled for this process's stages; `given` is what the Trainer was given as stages."""
    elsewhere = {i: stage for i, stage in enumerate(given) if i not in stages and isinstance(stage, nn.Module)}
    model = given if isinstance(given, nn.Sequential) else getattr(given, "model", None)  # of splitting.Stages
    optimizers = [stage.optimizer for stage in stages.values() if stage.optimizer is not None]
    modules = {index: stage.module for index, stage in stages.items()}
    modes = getattr(given, "modes", {})
    return Settled(modules, optimizers, model, elsewhere, in_parts=in_parts, modes=modes)


def group_sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def differs(now: object, value: object) -> bool:
    """Whether an entry is another one; tensors are the same only if they are one."""
    if isinstance(value, nn.Module | Tensor):
        return True
    try:
        return bool(now != value)
    except (RuntimeError, ValueError):  # other tensors or arrays in a container
        return True


def read_by(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """What a module's forward reads of its attributes: where they are held, their names and values.

    Of a container a copy is the value. Of another object what the forward reads as `self.options.power` is, too.
    """
    (names, chains), own = reads_of_forward(type(module)), own_attributes(module)  # type: ignore[arg-type]
    for name in names:
        value = own.get(name, ABSENT)
        if isinstance(value, CONTAINERS):
            value = copy.copy(value)
        if isinstance(value, (*PLAIN, Tensor, *CONTAINERS, tuple)) or attributes(value):
            yield vars(module), name, value
    for name, inner in chains:
        held = getattr(own.get(name), "__dict__", {})
        if not isinstance(own.get(name), Tensor | nn.Module) and isinstance(held.get(inner, ABSENT), PLAIN):
            yield held, inner, held[inner]


@lru_cache(maxsize=256)
def reads_of_forward(kind: type[nn.Module]) -> tuple[list[str], list[tuple[str, str]]]:
    """The names that a forward mentions, and what it reads of an attribute: (a, b) of x.a.b."""
    codes = [method.__code__ for method in methods_of_forward(kind)]
    return sorted(set[str]().union(*map(names_in, codes))), sorted(set[tuple[str, str]]().union(*map(chains_in, codes)))


def chains_in(code: CodeType) -> set[tuple[str, str]]:
    """The attributes that code reads of an attribute: (a, b) of x.a.b; functions inside it included."""
    loads = [each.argval if each.opname in LOADS else None for each in dis.get_instructions(code)]
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {(one, two) for one, two in pairwise(loads) if one and two}.union(*map(chains_in, inner))


Stages = Mapping[int, Stage]
Place = tuple[
    str, dict[str, Tensor | None], str
]  # the name of a parameter or buffer, its module's dict, its name there
Mark = tuple[Tensor | None, int, int]  # a tensor, its memory, and how often it was written to


class SetByHand:
    """What weights were after the last step. Where copies are held, `check` takes some 200 ns for each tensor.

    Float32 masters, the copies of emulated replicas, servers, the outer step of replicas and minibatches in flight hold
    weights of their own, which would come back without a word.
    """

    def __init__(self, replicas: Sequence[Stages], sync: Sync, *, data: int, lag: int) -> None:
        """`replicas` are those of this process, of `data` in all; `lag` is how many minibatches may be in flight."""
        self._own, *self._copies = replicas
        self._sync, self._data, self._lag = sync, data, lag
        self._masters = any(stage.masters.copies for stages in replicas for stage in stages.values())
        kept = data > 1 and (sync.serving is not None or sync.agreement != "A" or sync.shares_optimizer)
        watches = bool(self._masters or self._copies or kept or lag)
        self._places = places_of(self._own, buffers=data > 1) if watches else []
        self._marks = self._marked()
        self._began = False

    def _marked(self) -> list[Mark]:
        return [mark(held.get(name)) for _, held, name in self._places]

    def _changed(self) -> list[int]:
        # The numbers of the places whose tensors are not as they were.
        return [
            number
            for number, (now, then) in enumerate(zip(self._marked(), self._marks, strict=True))
            if now[0] is not then[0] or now[1:] != then[1:]
        ]

    def remember(self) -> None:
        """Take the weights as they are for what training has made of them."""
        self._marks = self._marked()

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """In this block training itself may change weights and buffers."""
        changed, before = self._changed(), self._marks
        try:
            yield
        finally:
            self._marks = self._marked()
            for number in changed:
                self._marks[number] = before[number]

    def check(self, steps: int, *, drained: bool) -> None:
        """Let copies follow what was changed since, before the step after so many. Raises UsageError where they cannot.

        `drained`: no minibatch is in flight. What no version counter tells (`parameter.data.clamp_`) is looked for by
        value before the first step, where copies follow, and before steps 2, 3, 5, 9, ..., where it is refused.
        """
        if not self._places:
            return
        if self._masters and not self._began:  # also what no version counter tells: parameter.data.copy_
            self._follow(self._own)
        self._began = True
        if changed := self._changed():
            self._refuse(changed, drained)
            self._copy(changed)
        elif steps and not steps & (steps - 1):
            self._compare()

    def _compare(self) -> None:
        # Masters with their parameters, and copies with the first replica's parameters.
        for stages in (self._own, *self._copies) if not self._sync.shares_optimizer else ():
            for index, stage in stages.items():
                for parameter, master in stage.masters.copies.items():
                    if not same(parameter, master.detach().to(parameter.dtype)):
                        raise UsageError(f"a weight of stage {index} {UNSEEN}")
        places = places_of(self._own, buffers=False)
        for replica in self._copies if self._sync.agreement == "A" else ():
            for (title, held, name), (_, other, _) in zip(places, places_of(replica, buffers=False), strict=True):
                one, two = held[name], other[name]
                if one is None or two is None or same(one, two, rtol=1e-3):
                    continue
                raise UsageError(f"{title} {UNSEEN}")

    def _refuse(self, changed: Sequence[int], drained: bool) -> None:
        for number in changed:
            title, held, name = self._places[number]
            before, memory, _ = self._marks[number]
            now = held.get(name)
            if isinstance(before, nn.Parameter) and now is not before:
                raise UsageError(
                    f"{title} is another parameter since the last step, which no optimizer has: change its values in "
                    "place, under torch.no_grad(), or make the Trainer again"
                )
            lost = self._masters or mark(now)[1] != memory  # a share of the optimizer steps views of the memory
            shared = self._sync.shares_optimizer and not self._copies and lost
            if self._data > 1 and (self._sync.serving is not None or shared):
                raise UsageError(
                    f"{title} was set by hand since the last step; under sync={self._sync} other copies of it train: "
                    "set weights before the Trainer is made"
                )
        what = f"{self._places[changed[0]][0]} was set by hand since the last step"
        if self._data > 1 and self._sync.agreement != "A" and not self._fresh:
            raise UsageError(
                f"{what}; under sync={self._sync} replicas differ between their meetings, and would not all have it: "
                "set weights before the first step, or choose sync='all-reduce'"
            )
        if self._lag and not drained:
            raise UsageError(
                f"{what}, while minibatches are in flight that were computed with it: call flush() before weights are "
                "set"
            )

    @property
    def _fresh(self) -> bool:
        return not any(stage.updates for stage in self._own.values())

    @torch.no_grad()
    def _copy(self, changed: Sequence[int]) -> None:
        for replica in self._copies:
            places = places_of(replica, buffers=True)
            for number in changed:
                _, held, name = self._places[number]
                _, other, there = places[number]
                given, taking = held.get(name), other.get(there)
                if given is None or taking is None:
                    continue
                if given.shape == taking.shape:
                    taking.copy_(given)
                else:  # a buffer that grew, such as a mask
                    other[there] = given.clone()
        for stages in (self._own, *self._copies):
            self._follow(stages)
            if self._fresh and self._data > 1:
                for stage in stages.values():
                    stage.begin_agreement()

    def _follow(self, stages: Stages) -> None:
        for stage in stages.values():
            stage.follow_weights()


def places_of(stages: Stages, *, buffers: bool) -> list[Place]:
    """Where the weights of stages are that their optimizers step; with frozen ones and buffers if `buffers`."""
    places: list[Place] = []
    for index, stage in stages.items():
        for title, part in ((str(index), stage.module), (f"heads.{index}", stage.head)):
            if part is None or is_sharded(part):
                continue
            for path, module in part.named_modules():
                prefix = f"{title}.{path}".rstrip(".")
                for name, parameter in module._parameters.items():
                    if parameter is not None and (buffers or parameter.requires_grad) and not stage.borrows(parameter):
                        places.append((f"{prefix}.{name}", cast(Any, module._parameters), name))
                if buffers:
                    places += [(f"{prefix}.{name}", module._buffers, name) for name in module._buffers]
    return places


def mark(tensor: Tensor | None) -> Mark:
    """What changes when a tensor is replaced, given other memory, or written to in place."""
    if tensor is None:
        return None, 0, 0
    if isinstance(tensor, FakeTensor):  # which warns of being asked for its memory
        return tensor, 0, tensor._version
    try:
        memory = tensor.data_ptr()
    except RuntimeError:  # sparse tensors have none, nor those without values
        memory = 0
    return tensor, memory, 0 if tensor.is_inference() else tensor._version


def same(one: Tensor, other: Tensor, rtol: float = 0.0) -> bool:
    """Whether two tensors are equal, or nearly, where both may hold what is not a number: training may diverge."""
    return torch.equal(one, other) or torch.allclose(one, other, rtol=rtol, atol=1e-8 if rtol else 0, equal_nan=True)
