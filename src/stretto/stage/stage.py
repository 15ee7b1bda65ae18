"""What each action does to the tensors of one stage: shared by every interpreter that trains."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.heads.head import LocalLoss
from stretto.heads.solo import SharedReadout
from stretto.losses.counting import Counting, divide, message, shared_divisor
from stretto.losses.sums import Sum
from stretto.losses.value import Loss, call, mean_and_weight
from stretto.nn.batch import like, moved, tensors_in
from stretto.nn.buffers import Buffers, Snapshot, exchanged
from stretto.nn.input_errors import is_misfit, told
from stretto.nn.preserve import home
from stretto.nn.seeding import ForwardSeeds
from stretto.nn.shapes import describe, summary
from stretto.nn.sharded_modules import gathered, is_sharded, local, shares, whole
from stretto.nn.state_check import check_part, check_weights, fitting
from stretto.nn.tied_weights import Borrower, Lender, taken
from stretto.optim import Masters
from stretto.optim.loading import load
from stretto.options.checks import shown
from stretto.replicas.agreement import Agreement
from stretto.schedule import KINDS, Rules
from stretto.stage.specification import Specification
from stretto.weights import Weights

Tensors = tuple[Tensor, ...]
Gradient = tuple[Tensor | None, ...]  # one for each tensor of an activation
Kinds = tuple[tuple[torch.dtype, torch.Size], ...]
Norms = Callable[[Sequence[Tensor]], Tensor]  # of parameters' gradients, [number of gradients]

VERSION, GRADIENT = attrgetter("_version"), attrgetter("grad")


@dataclass(slots=True)
class Target:
    """What a head's loss compares with, and the share of the minibatch's examples that this micro-batch holds.

    `counted`: torch's own losses are to give a sum and a count. `expected` is about what the whole minibatch counts:
    the sums of its micro-batches are divided by it at first. `check` is called with the output if a mean is given.
    """

    value: Any
    share: float = 1.0
    inputs: Tensors = ()  # the model's own, where a head's loss wants them
    counted: bool = False
    expected: float = 1.0
    check: Callable[[Any], None] | None = None


@dataclass(slots=True)
class Graph:
    """What one forward keeps for its backward. `updates` is how many updates the weights it saw had had.

    Of a forward that has been run again, `updates` is the first one's, `recomputed` is how many there then were.
    `divisor` is what its loss adds to the divisor of the gradients of its update, where the loss gives sums.
    """

    inputs: Tensors
    outputs: Tensors
    loss: Tensor | None
    version: Any
    updates: int
    tied: Mapping[int, nn.Parameter] = field(default_factory=dict)  # the leaves of weights that another stage owns
    cut: Tensors = ()  # where the head's graph is cut from the module's, if the backward has two sweeps
    head_gradients: list[Tensor | None] = field(default_factory=list)
    recomputed: int | None = None
    divisor: Tensor | None = None


@dataclass(slots=True)
class ForwardState:
    """What one forward without a graph saw, for its recompute: a version, its number of updates, the buffers before."""

    version: Any
    updates: int
    buffers: Snapshot
    tied: Mapping[int, nn.Parameter]


class PhaseSettings(NamedTuple):
    """How a stage trains for a while: which weights its passes see, and its update, told how many came before.

    `step` is None for the optimizer's own. `clip` is how large gradients may be at an update: those of all stages
    together if they have told each other (R), else the stage's own.
    """

    weights: Weights
    step: Callable[[int], object] | None
    clip: float | None = None


@dataclass(kw_only=True, eq=False)
class StageParts:
    """What one stage consists of.

    `head` is None where the stage has no head, or is the last and its module's output is the model's. `optimizer` is
    None where nothing is trained, `scheduler` where nobody steps one here. `masters` are what the optimizer steps in
    place of low-precision parameters. `lends` and `borrows` say which parameters it shares with other stages.
    `agreement` is its part in what the copies of this stage in other replicas do together. `norms` takes gradients'
    norms where a process holds parts of them only. `seeds` are started before each forward, so that what a stage draws
    (dropout) depends on nothing else.
    """

    index: int
    module: nn.Module
    head: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    masters: Masters = field(default_factory=Masters)
    lends: Lender | None = None
    borrows: Borrower | None = None
    agreement: Agreement | None = None
    norms: Norms | None = None
    seeds: ForwardSeeds | None = None


class Stage:
    """One stage's module, head, weights and optimizer, and the six things that can happen to them.

    `practice` is how it trains at first; `apply_phase` changes that. Where `rules` split its backward, that comes as I
    and W; where they recompute, forwards keep no graph and C makes it.
    """

    def __init__(self, parts: StageParts, specification: Specification, rules: Rules, practice: PhaseSettings) -> None:
        index, module, head, reach = parts.index, parts.module, parts.head, rules.reach
        self._split = index in rules.split
        mean = specification.method.combine == "mean"
        assert self._split or reach.one_sweep(index), f"stage {index} needs I and W: it sends less than it uses"
        assert not mean or self._split or len(reach.losses(index)) == 1, f"stage {index}: a mean of losses needs I, W"
        self.index = index
        self.module = module
        self.head = head
        self.optimizer = parts.optimizer
        self.scheduler = parts.scheduler
        self.weights, self._step, self._clip = practice
        self.loss = specification.precision.loss(specification.loss)
        self.updates = 0
        self._recompute = index in rules.recompute
        self._buffers = Buffers([part for part in (module, head) if part is not None])
        self._took: Kinds | None = None  # of the first micro-batch that came through
        self._tried = False  # whether a forward has been run whose graph was not kept
        self._is_last = index == reach.num_stages - 1
        self._has_loss = reach.hops[index] is not None
        self._sends = bool(reach.carried(index))
        self._head_parameters = [p for p in head.parameters() if p.requires_grad] if head is not None else []
        self._lends, self._borrows = parts.lends, parts.borrows
        # Each once: a head may use weights of its stage.
        parameters = list(dict.fromkeys(p for part in (module, head) if part is not None for p in part.parameters()))
        self._parameters = parameters if parts.borrows is None else parts.borrows.own(parameters)
        self.masters = parts.masters
        self._parameters += self.masters.copies.values()
        self._autocast = specification.precision.autocast(specification.device)
        self.agreement = parts.agreement
        self._own_norms: Norms = parts.norms or own_norms
        self._begun = False  # whether a gradient has been computed since the last update
        self._counting = Counting(rules.per_update, self.agreement)
        self._divisors: list[Tensor] = []  # of the gradients since the last update, a micro-batch each
        self._divisor: float | None = None  # of this update, once its gradients have been divided
        self._changes_input = begins_in_place(module)
        self._scale = 1 / len(reach.losses(index)) if mean else 1.0
        self._seeds = parts.seeds
        # For each gradient sent down: whether the own head's is part of it, and which of the arriving ones.
        arriving = reach.arriving(index)
        self._num_arriving = len(arriving)
        self._outgoing = [
            (reach.stop(index) == stop, arriving.index(stop) if stop in arriving else None)
            for stop in reach.carried(index)
        ]
        self._run: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "B": self._backward,
            "I": self._input_gradient,
            "W": self._weight_gradient,
            "A": self._add_up,
            "R": self._reduce,
            "U": self._update,
            "M": self._merge,
        }

    def run(
        self, kind: str, microbatch: int, operands: Mapping[str, Any], version: int | None = None
    ) -> dict[str, Any]:
        """Do one action on what it needs, keyed by the values' names in `schedule.rules`; return what it makes.

        `version` is how many updates the weights have had that a forward is to see; None for the current ones.
        """
        try:
            if kind == "F":
                wanted = self.updates if version is None else version
                run = self._first_forward if self._recompute else self._forward
                with self.context():
                    made = run(microbatch, operands, wanted)
                if self._took is None:
                    self._took = kinds_of(operands)
                return made
            if kind == "C":
                with self.context():
                    return self._second_forward(microbatch, operands)
            return self._run[kind](operands)
        except Exception as error:
            where = f"in action {self.index}{kind}{microbatch}: stage {self.index}, micro-batch {microbatch}"
            misfit = self._misfit(kind, operands, error)
            if misfit is not None:
                misfit.add_note(where)
                raise misfit from error
            error.add_note(where)
            raise

    def _misfit(self, kind: str, operands: Mapping[str, Any], error: Exception) -> UsageError | None:
        # What to say in an error's place, if it comes of a batch of another kind than this stage has trained with.
        if not is_misfit(error):
            return None
        found = kinds_of(operands) if "activation" in operands else self._took
        if self._took == found and self.updates and not isinstance(error, IndexError):
            return None
        target = operands.get("target")
        came = f"stage {self.index - 1} gives" if self.index else "it is given"
        what = (
            f"cannot take what {came}, {describe(operands['activation'])}"
            if "activation" in operands
            else (f"fails in its {KINDS[kind]}")
        )
        against = f", with the target {shown(target.value)}" if target is not None else ""
        return UsageError(
            f"stage {self.index} ({summary(self.module)}) {what}{against}: {told(error)}. Give batches that the stages "
            "and the loss can take; Trainer(example=x) checks the stages before"
        )

    def context(self) -> AbstractContextManager[object]:
        """What a forward runs in, with its head and its loss, as `Precision.forward` says; make one for each."""
        torch.clear_autocast_cache()
        return self._autocast()

    def apply_phase(self, practice: PhaseSettings, recompute: bool) -> None:
        """Train otherwise from now on; nothing may be in flight."""
        self.weights, self._step, self._clip = practice
        self._recompute, self._tried = recompute, False

    def state_dict(self) -> dict[str, Any]:
        """Everything that training this stage changes, of this replica; nothing in flight, replicas settled."""
        parts = {name: None if part is None else whole(part.state_dict()) for name, part in self._parts()}
        return {**parts, "updates": self.updates, "weights": self.weights.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], origin: str) -> None:
        """Go on from `state_dict`. Raises UsageError, naming `origin`, if it belongs to another kind of stage."""
        for name, part in self._parts():
            if name == "agreement" and part is not None and state.get(name) is None:
                part.begin(self._stepped(), state["updates"])
                continue
            if (state.get(name) is None) != (part is None):
                has, had = ("no" if part is None else "a"), ("no" if state.get(name) is None else "a")
                raise UsageError(f"{origin}: stage {self.index} has {has} {name} here and had {had} {name} there")
            if part is not None:
                with fitting(f"{origin} does not fit the {name} of stage {self.index}"):
                    part.check(state[name]) if isinstance(part, Agreement) else check_part(state[name], part)
                    own = shares(state[name], part)
                    load(part, own) if isinstance(part, torch.optim.Optimizer) else part.load_state_dict(own)
        with fitting(f"{origin} does not fit stage {self.index}"):
            check_weights(state["weights"], self.weights.state_dict(), self.module)
            self.updates = state["updates"]
            self._begun = False
            self._forget_counts()
            self.weights.forget()
            self.weights.load_state_dict(moved(state["weights"], home([self.module])))

    def _parts(self) -> tuple[tuple[str, Any], ...]:
        return (
            ("module", self.module),
            ("head", self.head),
            ("masters", self.masters if self.masters.copies else None),
            ("optimizer", self.optimizer),
            ("scheduler", self.scheduler),
            ("agreement", self.agreement if self.agreement is not None and self.agreement.remembers else None),
        )

    def _first_forward(self, microbatch: int, operands: Mapping[str, Any], wanted: int) -> dict[str, Any]:
        # The first one makes a graph all the same: a module that will not do is refused before anything is trained.
        buffers = self._buffers.snapshot()
        with torch.set_grad_enabled(not self._tried):
            made = self._forward(microbatch, operands, wanted)
        self._tried = True
        graph: Graph = made.pop("graph")
        return {
            **made,
            "input": operands["activation"],
            "version": ForwardState(graph.version, wanted, buffers, graph.tied),
        }

    def _second_forward(self, microbatch: int, operands: Mapping[str, Any]) -> dict[str, Any]:
        seen: ForwardState = operands["version"]
        given = {**operands, "activation": operands["input" if "input" in operands else "recomputed"]}
        with exchanged(seen.buffers):
            made = self._forward(microbatch, given, seen.updates, seen)
        made["graph"].recomputed = self.updates
        return {"graph": made["graph"], "recomputed": made.get("activation")}

    def _forward(
        self, microbatch: int, operands: Mapping[str, Any], wanted: int, seen: ForwardState | None = None
    ) -> dict[str, Any]:
        if self._seeds is not None:
            self._seeds.start(microbatch)
        if isinstance(self.head, SharedReadout):
            self.head.receive(operands.get("tied-weight", ()))
        inputs = like(operands["activation"], [leaf(tensor, self._sends) for tensor in operands["activation"]])
        given = like(inputs, [tensor.clone() for tensor in inputs]) if self._changes_input else inputs
        before = list(map(VERSION, given))
        output, version, tied = self._run_module(given, operands, wanted, seen)
        if not self._changes_input and before != list(map(VERSION, given)):
            raise UsageError(IN_PLACE.format(self.index))
        outputs = output if isinstance(output, tuple) else (output,)
        if not (self._is_last and not self._split) and not all(isinstance(tensor, Tensor) for tensor in outputs):
            kinds = ", ".join(type(tensor).__name__ for tensor in outputs)
            raise UsageError(f"stage {self.index} returned {kinds}: a stage returns a tensor or a tuple of tensors")
        graph = Graph(inputs, outputs, None, version, wanted, tied)
        made: dict[str, Any] = {"graph": graph}
        if self._has_loss:
            target: Target = operands["target"]
            if self._split:
                graph.cut = tuple(leaf(tensor, True) for tensor in outputs)
            given = graph.cut or outputs
            made["loss"] = self._lose(graph, given, given if isinstance(output, tuple) else given[0], target, seen)
        if not self._is_last:
            made["activation"] = tuple(map(Tensor.detach, outputs))
        return made

    def _lose(self, graph: Graph, features: Tensors, output: Any, target: Target, seen: ForwardState | None) -> Tensor:
        # What is told of a micro-batch's loss: its share of the minibatch's mean, or its sum and its count.
        compared = output if self.head is None else self.head(*features)
        value = call(self.loss, compared, target.value, counted=target.counted)
        whole = self.head if isinstance(self.head, LocalLoss) else None
        if isinstance(value, Sum):
            keeps_graph = seen is not None or not self._recompute
            own, graph.divisor = self._counting.add(value, target, self.index, keeps_graph, alone=whole is None)
            told = value.pair
        else:
            if target.check is not None:
                check, target.check = target.check, None
                check(compared)
            own, told = value, None
        total = own if whole is None else whole.total(own, features, target.inputs)
        sums = isinstance(value, Sum) and self._counting.per_update > 1
        graph.loss = total if sums or target.share == 1 else total * target.share
        return graph.loss.detach() if told is None else told

    def _run_module(
        self, inputs: Tensors, operands: Mapping[str, Any], wanted: int, seen: ForwardState | None
    ) -> tuple[Any, Any, Mapping[int, nn.Parameter]]:
        if seen is not None:
            run = partial(self.weights.recompute, inputs, seen.version)
        else:  # where nothing is trained every version is the same
            run = partial(self.weights.forward, inputs, 0 if self.optimizer is None else self.updates - wanted)
        if self._borrows is None:
            return *run(), {}
        self._borrows.receive(operands.get("tied-weight", ()))
        tied = self._borrows.leaves() if seen is None else seen.tied
        with self._borrows.worn(tied):
            return *run(), tied

    def abandon(self) -> None:
        """What is in flight will not come back: drop it, and whatever gradients it has left."""
        self._begun = False
        self._forget_counts()
        if self.agreement is not None:
            self.agreement.forget()
        past = self.weights.state_dict()
        self.weights.forget()
        self.weights.load_state_dict(past)

    def _forget_counts(self) -> None:
        self._counting.forget()
        self._divisors, self._divisor = [], None

    def _begin(self) -> None:
        # As a plain loop begins with zero_grad: what others have left on the parameters is not part of the update.
        if not self._begun:
            self._begun = True
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = None

    def _backward(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        self._begin()
        graph: Graph = operands["graph"]
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        arrived, divisors = self._arrived(operands)
        if arrived:
            roots, gradients = differentiable(graph.outputs, arrived[0] if len(arrived) == 1 else add(arrived))
        if graph.loss is not None and graph.loss.requires_grad:
            roots.append(graph.loss)
            gradients.append(None)
        if roots:
            torch.autograd.backward(roots, gradients)
        self.weights.collect(graph.version)
        if self.masters.copies:
            self.masters.collect()
        sent: tuple[tuple[Tensor | None, ...], ...] = (take(graph.inputs),)
        if divisors or graph.divisor is not None:
            sent = message(sent, [self._divide_by([graph.divisor, *divisors])])
        return {"gradient": sent, "weight-gradient": None, "tied-gradient": taken(graph.tied) if graph.tied else {}}

    def _arrived(self, operands: Mapping[str, Any]) -> tuple[Sequence[Gradient], Sequence[Tensor]]:
        # By stop: gradients, and, where losses give sums, what their micro-batch adds to the update's divisor.
        arrived = operands.get("gradient", ())
        divisors = arrived[self._num_arriving :]
        return arrived[: self._num_arriving], divisors[0] if divisors else ()

    def _divide_by(self, divisors: Sequence[Tensor | None]) -> Tensor | None:
        # What a micro-batch adds to the divisor of its update.
        divisor = shared_divisor(divisors, self.index)
        if divisor is not None:
            self._divisors.append(divisor)
        return divisor

    def _input_gradient(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        self._begin()
        graph: Graph = operands["graph"]
        own = self._through_head(graph)
        arrived, divisors = self._arrived(operands)
        sent: list[Gradient] = []
        sent_divisors: list[Tensor | None] = []
        for with_own, position in self._outgoing:
            parts = [own] if with_own else []
            own_divisor = graph.divisor if with_own else None
            if position is not None:
                parts.append(arrived[position])
            others = [divisors[position]] if position is not None and divisors else []
            sent_divisors.append(shared_divisor([own_divisor, *others], self.index))
            roots, gradients = differentiable(graph.outputs, add(parts))
            wanted = [tensor for tensor in graph.inputs if tensor.requires_grad]
            if roots and wanted:
                torch.autograd.backward(roots, gradients, retain_graph=True, inputs=wanted)
            sent.append(take(graph.inputs))
        return {"gradient": message(sent, sent_divisors), "cotangent": own}

    def _through_head(self, graph: Graph) -> Gradient:
        # The head's weight gradients stay with the micro-batch until its W: another one's U may come before.
        if graph.loss is None or not graph.loss.requires_grad:
            return ()
        held = take(self._head_parameters)
        wanted = [tensor for tensor in graph.cut if tensor.requires_grad]
        leaves = gathered(self.head) if self.head is not None and is_sharded(self.head) else self._head_parameters
        torch.autograd.backward(graph.loss, inputs=[*wanted, *leaves])
        graph.head_gradients = list(take(self._head_parameters))
        give(self._head_parameters, held)
        return take(graph.cut)

    def _weight_gradient(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        self._begin()
        graph: Graph = operands["graph"]
        arrived, divisors = self._arrived(operands)
        total = add([*arrived, operands["cotangent"]])
        if self._scale != 1:
            total = tuple(None if gradient is None else gradient * self._scale for gradient in total)
        roots, gradients = differentiable(graph.outputs, total)
        leaves = [*self.weights.leaves(graph.version), *(each for each in graph.tied.values() if each.requires_grad)]
        if roots and leaves:
            torch.autograd.backward(roots, gradients, inputs=leaves)
        self.weights.collect(graph.version)
        give(self._head_parameters, graph.head_gradients)
        self.masters.collect()
        self._divide_by([graph.divisor, *divisors])
        return {"weight-gradient": None, "tied-gradient": taken(graph.tied)}

    def _complete(self, operands: Mapping[str, Any]) -> None:
        # What other stages contribute to the gradient of this update.
        if self._lends is not None:
            for contributed in operands.get("tied-gradient", ()):
                self._lends.add([contributed])
                self.masters.collect()  # after each: masters add up micro-batches, not low-precision parameters
        if self._divisors and self._divisor is None:
            self._divisor = float(sum(self._divisors))
            if self._divisor not in (0, 1):
                divide(self._stepped(), self._divisor)

    def _add_up(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        self._complete(operands)
        if self.agreement is not None:
            self.agreement.sum(self._stepped(), self.updates)
        return {"summed": None}

    def _merge(self, _: Mapping[str, Any]) -> dict[str, Any]:
        if self.agreement is not None:
            self.agreement.meet(self._stepped(), self.updates, self.masters.follow)
        return {}

    def settle_replicas(self) -> None:
        """Training pauses: the copies of this stage in all replicas are the same from here on."""
        if self.agreement is not None:
            self.agreement.settle(self._stepped(), self.updates, self.masters.follow)

    def _stepped(self) -> list[Tensor]:
        # What the optimizer steps.
        return list(dict.fromkeys(self.masters.of(parameter) for parameter in self._parameters))

    def _reduce(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        self._complete(operands)
        return {"norm": self._norms()}

    def _norms(self) -> Tensor:
        own = self._own_norms(self._parameters)
        return own if self.agreement is None else self.agreement.norms(own)

    def _update(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        finished = self.updates
        self.updates += 1
        self._begun = False
        self._complete(operands)
        counts = self._divisor != 0
        if not counts and self._is_last:
            warnings.warn(
                f"update {finished}: nothing of its minibatch counts in the loss (it returned a count of 0), so no "
                "weights change", stacklevel=1,
            )  # fmt: skip
        self._divisors, self._divisor = [], None
        if self.optimizer is not None:
            if not counts:
                self._drop_gradients()
            elif self._clip is not None:
                clip(self._parameters, self._clip, operands.get("norm") or [self._norms()])
            steps = counts or (self.agreement is not None and self.agreement.steps)
            step: Callable[[], object] = nothing
            if steps:  # the optimizer's own is looked up each time: a scheduler replaces it
                step = self.optimizer.step if self._step is None else partial(self._step, finished)
            self.weights.update(partial(self.masters.step, step) if steps and self.masters.copies else step)
            self._drop_gradients()
            if self.scheduler is not None and counts:
                self.scheduler.step()
        return {} if self._lends is None else {"tied-weight": self._lends.values()}

    def lent(self) -> dict[int, Tensor]:
        """The weights that other stages borrow, as they stand."""
        return {} if self._lends is None else self._lends.values()

    def take_over(self, values: Mapping[int, Tensor]) -> None:
        """Give the parameters that it borrows new values, where their owner is another process."""
        if self._borrows is not None:
            self._borrows.overwrite(values)

    def settle(self, unread: Sequence[Mapping[int, Tensor]] = ()) -> None:
        """Nothing is in flight: weights that other stages own are as those have them, or have sent them: `unread`."""
        if isinstance(self.head, SharedReadout):
            self.head.receive(unread)
        if self._borrows is not None:
            self._borrows.settle()


def nothing() -> None:
    """An update at which nothing counts."""


def kinds_of(operands: Mapping[str, Any]) -> Kinds:
    """The types and shapes of what a forward is given, but for the number of examples; of targets, entries for each."""
    target = operands.get("target")
    inputs = operands["activation"]
    examples = inputs[0].shape[0] if inputs and inputs[0].dim() else 1
    targets = [part for _, part in tensors_in(target and target.value, "")]
    shapes = [[part.shape[0] // max(examples, 1), *part.shape[1:]] if part.dim() else [] for part in targets]
    own = zip((part.dtype for part in targets), map(torch.Size, shapes), strict=True)
    return (*((tensor.dtype, tensor.shape[1:]) for tensor in inputs), *own)


IN_PLACE = (
    "stage {} changes its input in place, which belongs to the stage before it: begin the stage with an operation that "
    "does not work in place (or with `x.clone()`)"
)


def head_loss(loss: Loss, head: nn.Module | None, features: Tensors, output: Any, target: Target) -> Tensor:
    """What trains a stage whose `output` are these `features`: the mean loss of its head, or of its own output."""
    compared = head(*features) if head is not None else features if isinstance(output, tuple) else features[0]
    value = call(loss, compared, target.value, counted=False)
    own = value.mean if isinstance(value, Sum) else value
    return head.total(own, features, target.inputs) if isinstance(head, LocalLoss) else own


def head_loss_and_weight(
    loss: Loss, head: nn.Module | None, features: Tensors, output: Any, target: Target, *, examples: int
) -> tuple[Tensor, float]:
    """The mean loss, and how much it weighs beside other batches: its count, or its number of examples."""
    weight = 0.0

    def weighed(output: Any, target: Any) -> Tensor:
        nonlocal weight
        mean, weight = mean_and_weight(loss, output, target, examples)
        return mean

    return head_loss(weighed, head, features, output, target), weight


def own_norms(parameters: Sequence[Tensor]) -> Tensor:
    """The norm of each parameter's gradient, [number of gradients]."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(0)


def clip(parameters: Sequence[Tensor], limit: float, told: Sequence[Tensor]) -> None:
    """Shrink gradients so that their norm is at most `limit`; what counts are the norms that were `told`.

    The same operations as torch.nn.utils.clip_grad_norm_ on the parameters of all who told theirs. Norms of different
    dtypes are promoted; a stage without gradients tells an empty tensor, whose dtype counts for nothing.
    """
    norms = [each.to(told[-1].device) for each in told if each.numel()]
    if norms:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, torch.linalg.vector_norm(torch.cat(norms)))


def begins_in_place(module: nn.Module) -> bool:
    """Whether a stage's first layer works in place, as ReLU(inplace=True) does; it then gets a copy of its input."""
    first = next((layer for layer in module.modules() if not any(True for _ in layer.children())), module)
    return bool(getattr(first, "inplace", False))


def leaf(tensor: Tensor, wants_gradient: bool) -> Tensor:
    """A leaf with the same values, which collects a gradient if one is wanted and the numbers are not whole."""
    tensor = tensor.detach()
    if wants_gradient and (tensor.is_floating_point() or tensor.is_complex()):
        tensor.requires_grad_()
    return tensor


def add(parts: Sequence[Gradient]) -> Gradient:
    """The sum of gradients, tensor by tensor; nothing counts as zero. Not in place: others may read the message."""
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return parts[0] if parts else ()
    total: list[Tensor | None] = list(parts[0])
    for part in parts[1:]:
        for position, gradient in enumerate(part):
            mine = total[position]
            total[position] = gradient if mine is None else mine if gradient is None else mine + gradient
    return tuple(total)


def differentiable(outputs: Tensors, gradients: Gradient) -> tuple[list[Tensor], list[Tensor | None]]:
    """Those of the outputs that a gradient arrived for and that depend on something trainable."""
    roots: list[Tensor] = []
    arrived: list[Tensor | None] = []
    for output, gradient in zip(outputs, gradients, strict=False):
        if gradient is not None and output.requires_grad:
            roots.append(output)
            arrived.append(gradient)
    return roots, arrived


def take(tensors: Sequence[Tensor]) -> Gradient:
    """Take the gradients away from `tensors`."""
    gradients = tuple(map(GRADIENT, tensors))
    for tensor in tensors:
        tensor.grad = None
    return gradients


def give(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to those that `tensors` have."""
    for tensor, gradient in zip(tensors, gradients, strict=False):
        if gradient is not None:
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
