"""What each action does to the tensors of one stage: shared by every interpreter that trains."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.heads.head import LocalLoss, ReadingHead, TrainedLoss
from stretto.losses.cross_entropy import Sum
from stretto.losses.minibatch_counts import Gradient, MinibatchCounts, Target, divide, message, shared_divisor
from stretto.losses.value import Loss, call, mean_and_weight, of_stage, trial_of_stage, value_function
from stretto.nn.batch import tensors_in, to_device, with_names_of
from stretto.nn.carried_attributes import (
    Buffers,
    Carried,
    CarriedAttributes,
    Snapshot,
    UnsavedBuffers,
    exchanged,
    exchanged_attributes,
)
from stretto.nn.input_errors import advice_on, error_text, is_misfit
from stretto.nn.layer_recompute import Recomputing, recomputed, refuse_changed_weights
from stretto.nn.nested import map_tensors, tensors_of
from stretto.nn.preserve import device_of, unique
from stretto.nn.seeding import ForwardSeeds
from stretto.nn.shapes import describe, summary
from stretto.nn.sharded_modules import gathered, is_sharded, local_share, local_state, whole_state
from stretto.nn.state_check import check_part, check_weights, explaining_misfits
from stretto.nn.tied_weights import Borrower, Lender, entries, plus
from stretto.optim import Label, Masters
from stretto.optim.loading import load
from stretto.optim.update_feedback import plain_sums
from stretto.options.checks import shown
from stretto.replicas.agreement import Agreement
from stretto.replicas.optimizer_share import MasterShare, OptimizerShare
from stretto.schedule import KINDS, Reach, Rules
from stretto.stage.gradient_predictor import GradientPredictor
from stretto.stage.trainer_arguments import Specification
from stretto.weights import Weights

Tensors = tuple[Tensor, ...]
Kinds = tuple[tuple[torch.dtype, torch.Size], ...]
Norms = Callable[[Sequence[Tensor]], Tensor]  # of the gradients of parameters that have one, [parameters]

VERSION, GRADIENT = attrgetter("_version"), attrgetter("grad")


@dataclass(slots=True)
class Graph:
    """What one forward keeps for its backward. `updates` is the number of updates in the weights that it saw.

    After a recompute, `updates` is that of the first forward, and `recomputed` is the number of the stage's updates at
    the recompute. `divisor` is what its loss adds to the divisor of its update's gradients, where the loss gives sums.
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
    microbatch: int = 0


@dataclass(slots=True)
class ForwardState:
    """What one forward without a graph saw, for its recompute: the version, its updates, and the state before it."""

    version: Any
    updates: int
    buffers: Snapshot
    attributes: Carried
    tied: Mapping[int, nn.Parameter]


class PhaseSettings(NamedTuple):
    """How a stage trains in one phase: which weights its passes see, its update, and the limit of its gradients' norm.

    `step` gets the number of updates before it; None for the optimizer's own. `clip` limits the norm of all stages'
    gradients together where they reduce it (R), else of the stage's own.
    """

    weights: Weights
    step: Callable[[int], object] | None
    clip: float | None = None


@dataclass(kw_only=True, eq=False)
class StageParts:
    """What one stage consists of.

    `head` is None where the stage has no head, or is the last and its module's output is the model's. `optimizer` is
    None where nothing is trained, `scheduler` where none is stepped here. `labels` say what each of its parameters is
    for, if the function that makes it asks. `masters` are what the optimizer steps in
    place of low-precision parameters. `lends` and `borrows` say which parameters it shares with other stages.
    `agreement` keeps its copies in all replicas together; None without replicas. `share` is this replica's share of the
    optimizer, where it steps no more. `norms` takes the gradients' norms where a process holds only parts of them.
    `seeds` seed the generator before each forward: dropout depends on the seed, stage, replica and micro-batch alone.
    `feedback` is how much of it its method's own steps have. `predictor` is what predicts the gradient of its output,
    where its method has that; then it has no `head`.
    """

    index: int
    module: nn.Module
    head: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    labels: Sequence[Label] = ()
    scheduler: Any = None
    masters: Masters = field(default_factory=Masters)
    lends: Lender | None = None
    borrows: Borrower | None = None
    agreement: Agreement | None = None
    share: OptimizerShare | None = None
    norms: Norms | None = None
    seeds: ForwardSeeds | None = None
    feedback: float = 0.0
    predictor: GradientPredictor | None = None


class Stage:
    """One stage's module, head, weights and optimizer, and what each kind of action does to them.

    `phase` is how it trains at first; `apply_phase` changes that. Where `rules` split its backward, that comes as I and
    W; where they recompute, forwards keep no graph and C makes it.
    """

    def __init__(self, parts: StageParts, specification: Specification, rules: Rules, phase: PhaseSettings) -> None:
        index, module, head, reach = parts.index, parts.module, parts.head, rules.reach
        self._split = index in rules.split
        self._splits = partial(rules.splits, index)
        mean = specification.method.combine == "mean"
        assert rules.sweeps_are_possible(index), f"stage {index} needs I and W: it sends less than it uses"
        assert not mean or self._split or len(reach.losses(index)) == 1, f"stage {index}: a mean of losses needs I, W"
        self.index = index
        self.module = module
        self.head = head
        self.optimizer = parts.optimizer
        self._unsaved = UnsavedBuffers(parts.module)
        self.scheduler = parts.scheduler
        self.weights, self._step, self._clip = phase
        self._set_loss(specification)
        self.updates = 0
        self._recompute = index in rules.recompute
        self._buffers = Buffers([part for part in (module, head) if part is not None])
        self._carried = CarriedAttributes(unique([part for part in (module, head) if part is not None]))
        self._fitting: Kinds | None = None  # of the first micro-batch whose forward succeeded
        self._reads_own = False  # whether the loss is known to train this stage's parameters alone
        self._tried = False  # whether a forward of this phase has run, for a recompute
        self._recomputing = Recomputing(recomputed(module, specification.recompute))
        self._is_last = index == reach.num_stages - 1
        self._has_loss = reach.hops[index] is not None
        self._head_weight = 1.0 if self._is_last else specification.method.head_weight
        self._sends = bool(reach.carried(index))
        self._lends, self._borrows = parts.lends, parts.borrows
        trained = [] if head is None else [parameter for parameter in head.parameters() if parameter.requires_grad]
        self._head_parameters = trained if parts.borrows is None else parts.borrows.not_borrowed(trained)
        # Each once: a head may use weights of its stage.
        parameters = list(dict.fromkeys(p for part in (module, head) if part is not None for p in part.parameters()))
        self._parameters = parameters if parts.borrows is None else parts.borrows.not_borrowed(parameters)
        self.masters = parts.masters
        self._parameters += self.masters.copies.values()
        self._autocast = specification.precision.autocast(specification.device)
        self.agreement = parts.agreement
        self._share = parts.share
        self._limited: Sequence[Tensor] = self._parameters if parts.share is None else parts.share.pieces
        self._gradient_norms: Norms = parts.norms or own_norms
        self.gradient_norms: Tensor | None = None  # of the last update, before its limit; None unless measured
        self.joint_norms: Tensor | None = None  # as these, of all stages, where they are clipped together
        self.measures_norms = False  # also where nothing limits them
        self._begun = False  # whether a gradient has been computed since the last update
        self._counting = MinibatchCounts(rules.per_update, self.agreement)
        self._forget_counts()
        self._changes_input = begins_in_place(module)
        self._scale = 1 / len(reach.losses(index)) if mean else 1.0
        self._seeds, self._feedback, self._predictor = parts.seeds, parts.feedback, parts.predictor
        self._num_arriving, self._outgoing = len(reach.arriving(index)), outgoing(reach, index)
        self._run: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "B": self._backward,
            "I": self._input_gradient,
            "W": self._weight_gradient,
            "A": self._add_up,
            "R": self._reduce,
            "U": self._update,
            "M": self._merge,
            "L": self._learn,
        }

    def _set_loss(self, specification: Specification) -> None:
        given, held = specification.loss, self.head.loss if isinstance(self.head, TrainedLoss) else None
        self.loss = specification.precision.loss(of_stage(given, self.index) if held is None else held)
        self._checked_loss = trial_of_stage(given, self.index) if held is None else held
        self._loss_value = value_function(self.loss)

    def run(
        self, kind: str, microbatch: int, operands: Mapping[str, Any], version: int | None = None
    ) -> dict[str, Any]:
        """Run one action on its operands and return its results, both keyed by the names of `schedule.dataflow.Edge`.

        `version` is the number of updates in the weights that a forward is to see; None for the current weights.
        """
        try:
            if kind == "F":
                version = self.updates if version is None else version
                run = self._first_forward if self._recompute else self._forward
                with self.context():
                    results = run(microbatch, operands, version)
                if self._fitting is None:
                    self._fitting = kinds_of(operands)
                return results
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
        # The error to raise instead, if the batch is of another kind than those that the stage has trained with.
        if not is_misfit(error):
            return None
        kinds = kinds_of(operands) if "activation" in operands else self._fitting
        if self._fitting == kinds and self.updates and not (isinstance(error, IndexError) or advice_on(error)):
            return None
        target = operands.get("target")
        came = f"stage {self.index - 1} gives" if self.index else "it is given"
        what = (
            f"cannot take what {came}, {describe(operands['activation'])}"
            if "activation" in operands
            else (f"fails in its {KINDS[kind]}")
        )
        if target is not None and in_the_loss(error):
            what = f"has a loss that fails (the stage is given {describe(operands['activation'])})"
        against = f", with the target {shown(target.value)}" if target is not None else ""
        return UsageError(
            f"stage {self.index} ({summary(self.module)}) {what}{against}: {error_text(error)}. "
            f"{advice_on(error)}Give batches that the stages and the loss can take; Trainer(example=x) checks the "
            "stages before"
        )

    def context(self) -> AbstractContextManager[object]:
        """The context of one forward with its head and its loss, as `Precision.forward`; make a new one for each."""
        torch.clear_autocast_cache()
        return self._autocast()

    def apply_phase(self, phase: PhaseSettings, recompute: bool) -> None:
        """Train with these settings from now on; nothing may be in flight."""
        self.weights, self._step, self._clip = phase
        self._recompute, self._tried = recompute, False

    def state_dict(self) -> dict[str, Any]:
        """All that training changes of this stage, in this replica; nothing in flight, replicas settled."""
        parts = {name: None if part is None else whole_state(part.state_dict()) for name, part in self._parts()}
        unsaved = self._unsaved.state_dict()
        more = {"buffers": unsaved} if unsaved else {}
        return {**parts, "updates": self.updates, "weights": self.weights.state_dict(), **more}

    def load_state_dict(self, state: Mapping[str, Any], origin: str) -> None:
        """Load what `state_dict` returned. Raises UsageError, naming `origin`, if it is of another kind of stage."""
        for name, part in self._parts():
            if name == "agreement" and part is not None and state.get(name) is None:
                part.begin(self._stepped(), state["updates"])
                continue
            if (state.get(name) is None) != (part is None):
                has, had = ("no" if part is None else "a"), ("no" if state.get(name) is None else "a")
                raise UsageError(f"{origin}: stage {self.index} has {has} {name} here and had {had} {name} there")
            if part is not None:
                with explaining_misfits(f"{origin} does not fit the {name} of stage {self.index}"):
                    checks = isinstance(part, Agreement | OptimizerShare | MasterShare | GradientPredictor)
                    part.check(state[name]) if checks else check_part(state[name], part)
                    share = local_state(state[name], part)
                    load(part, share) if isinstance(part, torch.optim.Optimizer) else part.load_state_dict(share)
        with explaining_misfits(f"{origin} does not fit stage {self.index}"):
            self._unsaved.load_state_dict(state.get("buffers", {}))
            check_weights(state["weights"], self.weights.state_dict(), self.module)
            self.updates = state["updates"]
            self._begun = False
            self._forget_counts()
            self.weights.forget()
            self.weights.load_state_dict(to_device(state["weights"], device_of([self.module])))

    def _parts(self) -> tuple[tuple[str, Any], ...]:
        share = self._share
        return (
            ("module", self.module),
            ("head", self.head),
            ("masters", None if not self.masters.copies else self.masters if share is None else MasterShare(share)),
            ("optimizer", self.optimizer if share is None else share),
            ("scheduler", self.scheduler),
            ("agreement", self.agreement if self.agreement is not None and self.agreement.remembers else None),
            ("predictor", self._predictor),
        )

    def _first_forward(self, microbatch: int, operands: Mapping[str, Any], updates: int) -> dict[str, Any]:
        # The very first one makes a graph all the same: a module that cannot train is refused before an update.
        buffers, attributes = self._buffers.snapshot(), self._carried.snapshot()
        weights = dict(self.module.named_parameters())
        versions = {name: weight._version for name, weight in weights.items()}
        with torch.set_grad_enabled(not self._tried):
            results = self._forward(microbatch, operands, updates)
        refuse_changed_weights(f"stage {self.index}", weights, versions)
        self._tried = True
        graph: Graph = results.pop("graph")
        return {
            **results,
            "input": operands["activation"],
            "version": ForwardState(graph.version, updates, buffers, attributes, graph.tied),
        }

    def _second_forward(self, microbatch: int, operands: Mapping[str, Any]) -> dict[str, Any]:
        seen: ForwardState = operands["version"]
        given = {**operands, "activation": operands["input" if "input" in operands else "recomputed"]}
        with exchanged(seen.buffers), exchanged_attributes(seen.attributes):
            results = self._forward(microbatch, given, seen.updates, seen)
        results["graph"].recomputed = self.updates
        return {"graph": results["graph"], "recomputed": results.get("activation")}

    def _forward(
        self, microbatch: int, operands: Mapping[str, Any], updates: int, seen: ForwardState | None = None
    ) -> dict[str, Any]:
        # `updates` is the number of updates in the weights to see; `seen` is given for a recompute.
        if self._seeds is not None:
            self._seeds.start(microbatch)
        if isinstance(self.head, ReadingHead):
            self.head.receive(operands.get("tied-weight", ()))
        inputs = with_names_of(operands["activation"], [leaf(tensor, self._sends) for tensor in operands["activation"]])
        given = with_names_of(inputs, [tensor.clone() for tensor in inputs]) if self._changes_input else inputs
        before = list(map(VERSION, given))
        output, version, tied = self._run_module(given, operands, updates, seen)
        if not self._changes_input and before != list(map(VERSION, given)):
            raise UsageError(IN_PLACE.format(self.index, "the stage before it" if self.index else "the batch"))
        outputs = output if isinstance(output, tuple) else (output,)
        if self._is_last and self._split:
            outputs = tuple(tensors_of(output))
        if not self._is_last and not all(isinstance(tensor, Tensor) for tensor in outputs):
            kinds = ", ".join(type(tensor).__name__ for tensor in outputs)
            raise UsageError(f"stage {self.index} returned {kinds}: a stage returns a tensor or a tuple of tensors")
        graph = Graph(inputs, outputs, None, version, updates, tied, microbatch=microbatch)
        results: dict[str, Any] = {"graph": graph}
        if self._has_loss:
            target: Target = operands["target"]
            if self._splits(microbatch):
                graph.cut = tuple(leaf(tensor, True) for tensor in outputs)
            parts = iter(graph.cut)
            compared = map_tensors(lambda _: next(parts), output) if graph.cut else output
            results["loss"] = self._compute_loss(graph, graph.cut or outputs, compared, target, seen)
        if not self._is_last:
            results["activation"] = tuple(map(Tensor.detach, outputs))
        return results

    def _compute_loss(
        self, graph: Graph, features: Tensors, output: Any, target: Target, seen: ForwardState | None
    ) -> Tensor:
        # Sets graph.loss. Returns a micro-batch's loss to report: its share of the minibatch's mean, or (sum, count).
        if self.head is None or isinstance(self.head, TrainedLoss):
            compared = output
        elif self._borrows is None:
            compared = self.head(*features)
        else:
            with self._borrows.substituted(graph.tied):
                compared = self.head(*features)
        value = self._loss_value(compared, target.value, counted=target.counted)
        refuse_detached(value, compared, self.index)
        if not self._reads_own:
            self._refuse_foreign(value, compared, graph)
        if target.check is not None:
            check, target.check = target.check, None
            check(self._checked_loss, compared, value)
        local_loss = self.head if isinstance(self.head, LocalLoss) else None
        if isinstance(value, Sum):
            keeps_graph = seen is not None or not self._recompute
            loss, graph.divisor = self._counting.add(value, target, self.index, keeps_graph, alone=local_loss is None)
            reported = value.pair
        else:
            loss, reported = value, None
        total = loss if local_loss is None else local_loss.total(loss, features, target.inputs)
        sums = isinstance(value, Sum) and self._counting.per_update > 1
        total = total if sums or target.share == 1 else total * target.share
        graph.loss = total if self._head_weight == 1 else total * self._head_weight
        return total.detach() if reported is None else reported

    def _refuse_foreign(self, value: Tensor | Sum, compared: Any, graph: Graph) -> None:
        # Once: a gradient of a parameter of another stage, or of none, would be lost.
        total = value.total if isinstance(value, Sum) else value
        if not total.requires_grad:
            return
        self._reads_own = True
        outputs = [*tensors_of(compared), *(leaf for leaf in graph.outputs if isinstance(leaf, Tensor)), *graph.cut]
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        own = [parameter for group in groups for parameter in group["params"]]
        own += [parameter for part in (self.module, self.head) if part is not None for parameter in part.parameters()]
        for found in leaves_between(total, outputs):
            if not any(found is each for each in (*own, *graph.tied.values(), *outputs)):
                raise UsageError(
                    f"the loss of stage {self.index} has a gradient for a tensor {list(found.shape)} that this stage "
                    "does not have, and that would not be trained: give a loss with parameters as an nn.Module that "
                    "holds them, loss=module; of the network, a loss can read the parameters of its own stage alone"
                )

    def _run_module(
        self, inputs: Tensors, operands: Mapping[str, Any], updates: int, seen: ForwardState | None
    ) -> tuple[Any, Any, Mapping[int, nn.Parameter]]:
        if seen is not None:
            run = partial(self.weights.recompute, inputs, seen.version)
        else:  # without an optimizer all versions are the same
            run = partial(self.weights.forward, inputs, 0 if self.optimizer is None else self.updates - updates)
        if self._borrows is None:
            with self._recomputing():
                return *run(), {}
        self._borrows.receive(operands.get("tied-weight", ()))
        tied = self._borrows.leaves() if seen is None else seen.tied
        with self._borrows.substituted(tied), self._recomputing():
            return *run(), tied

    def abandon(self) -> None:
        """Drop what is in flight and all gradients computed since the last update."""
        self._begun = False
        self._forget_counts()
        if self.agreement is not None:
            self.agreement.forget()
        state = self.weights.state_dict()
        self.weights.forget()
        self.weights.load_state_dict(state)

    def _forget_counts(self) -> None:
        self._counting.forget()
        self._divisors: list[Tensor] = []  # of the gradients since the last update, a micro-batch each
        self._divisor: float | None = None  # of this update, once its gradients have been divided

    def _begin(self) -> None:
        # As zero_grad in a plain loop: gradients left on the parameters by other code are not part of the update.
        if not self._begun:
            self._begun = True
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = None
        if self._share is not None:
            self._share.drop_gradients()

    def _backward(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        self._begin()
        graph: Graph = operands["graph"]
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if self._split:  # sharded weights expect an I, which leaves them without gradients
            self.weights.leaves(graph.version)
        arrived, divisors = self._arrived(operands)
        kept = None
        if self._predictor is not None:
            target = operands["target"].value if "target" in operands else None
            with self.context():
                predicted, kept = self._predictor.predict(graph.outputs, target, graph.microbatch)
            roots, gradients = differentiable(graph.outputs, predicted)
        elif arrived:
            roots, gradients = differentiable(graph.outputs, arrived[0] if len(arrived) == 1 else add(arrived))
        if graph.loss is not None and graph.loss.requires_grad:
            roots.append(graph.loss)
            gradients.append(None)
        if roots:
            torch.autograd.backward(roots, gradients)
        self.weights.collect(graph.version)
        if self.masters.copies:
            self.masters.collect()
        sent: tuple[tuple[Tensor | None, ...], ...] = (pop_gradients(graph.inputs),)
        if divisors or graph.divisor is not None:
            sent = message(sent, [self._divide_by([graph.divisor, *divisors])])
        return {
            "gradient": sent,
            "weight-gradient": None,
            "tied-gradient": {} if self._borrows is None else self._borrows.take_gradients(graph.tied),
            "prediction": kept,
        }

    def _learn(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        assert self._predictor is not None, f"stage {self.index}: nothing predicts its gradient"
        arrived, divisors = self._arrived(operands)
        if not divisors or any(float(divisor) for divisor in divisors):  # else nothing of the minibatch counts
            self._predictor.learn(operands["prediction"], arrived[0], self.context())
        return {}

    def _arrived(self, operands: Mapping[str, Any]) -> tuple[Sequence[Gradient], Sequence[Tensor]]:
        # The gradients from above, by stop; and their shares of the update's divisor, if losses give sums.
        arrived = operands.get("gradient", ())
        divisors = arrived[self._num_arriving :]
        return arrived[: self._num_arriving], divisors[0] if divisors else ()

    def _divide_by(self, divisors: Sequence[Tensor | None]) -> Tensor | None:
        # Records and returns what a micro-batch adds to its update's divisor.
        divisor = shared_divisor(divisors, self.index)
        if divisor is not None:
            self._divisors.append(divisor)
        return divisor

    def _input_gradient(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        self._begin()
        graph: Graph = operands["graph"]
        from_head = self._through_head(graph)
        arrived, divisors = self._arrived(operands)
        sent: list[Gradient] = []
        sent_divisors: list[Tensor | None] = []
        for with_head, position in self._outgoing:
            parts = [from_head] if with_head else []
            head_divisor = graph.divisor if with_head else None
            if position is not None:
                parts.append(arrived[position])
            others = [divisors[position]] if position is not None and divisors else []
            sent_divisors.append(shared_divisor([head_divisor, *others], self.index))
            roots, gradients = differentiable(graph.outputs, add(parts))
            inputs = [tensor for tensor in graph.inputs if tensor.requires_grad]
            if roots and inputs:
                torch.autograd.backward(roots, gradients, retain_graph=True, inputs=inputs)
            sent.append(pop_gradients(graph.inputs))
        return {"gradient": message(sent, sent_divisors), "cotangent": from_head}

    def _through_head(self, graph: Graph) -> Gradient:
        # The head's weight gradients wait in the graph for their W: an update may come before it.
        if graph.loss is None or not graph.loss.requires_grad:
            return ()
        before = pop_gradients(self._head_parameters)
        features = [tensor for tensor in graph.cut if tensor.requires_grad]
        leaves = gathered(self.head) if self.head is not None and is_sharded(self.head) else self._head_parameters
        borrowed = [weight for weight in graph.tied.values() if weight.requires_grad]  # their gradients wait in them
        torch.autograd.backward(graph.loss, inputs=[*features, *leaves, *borrowed])
        graph.head_gradients = list(pop_gradients(self._head_parameters))
        add_gradients(self._head_parameters, before)
        return pop_gradients(graph.cut)

    def _weight_gradient(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        self._begin()
        graph: Graph = operands["graph"]
        arrived, divisors = self._arrived(operands)
        total = add([*arrived, operands["cotangent"]])
        if self._scale != 1:
            total = tuple(None if gradient is None else gradient * self._scale for gradient in total)
        roots, gradients = differentiable(graph.outputs, total)
        leaves = [
            *self.weights.leaves(graph.version),
            *(weight for weight in graph.tied.values() if weight.requires_grad),
        ]
        if roots and leaves:
            torch.autograd.backward(roots, gradients, inputs=leaves)
        self.weights.collect(graph.version)
        add_gradients(self._head_parameters, graph.head_gradients)
        self.masters.collect()
        self._divide_by([graph.divisor, *divisors])
        contributed = {} if self._borrows is None else self._borrows.take_gradients(graph.tied)
        return {"weight-gradient": None, "tied-gradient": contributed}

    def _complete(self, operands: Mapping[str, Any]) -> None:
        # Adds the gradients of tied weights from other stages, then divides by the update's divisor.
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
        """Make the copies of this stage in all replicas the same; training pauses."""
        if self.agreement is not None:
            self.agreement.settle(self._stepped(), self.updates, self.masters.follow)

    def borrows(self, parameter: nn.Parameter) -> bool:
        """Whether another stage owns a parameter."""
        return self._borrows is not None and not self._borrows.not_borrowed([parameter])

    def follow_weights(self) -> None:
        """Let float32 masters follow weights that were set by hand, unless replicas have shared masters out."""
        if self._share is None:
            self.masters.take_over()

    def begin_agreement(self) -> None:
        """Start from the weights as they are, the same in all replicas."""
        if self.agreement is not None:
            self.agreement.begin(self._stepped(), self.updates)

    def _stepped(self) -> list[Tensor]:
        # The tensors that the optimizer steps.
        return list(dict.fromkeys(self.masters.of(parameter) for parameter in self._parameters))

    def _reduce(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        self._complete(operands)
        return {"norm": self._norms()}

    def _norms(self) -> Tensor:
        if self._share is None:
            with_gradients: Sequence[Tensor] = [each for each in self._parameters if each.grad is not None]
        else:
            with_gradients = self._share.with_gradients
        norms = self._gradient_norms(with_gradients)
        self.gradient_norms = norms if self.agreement is None else self.agreement.norms(norms)
        return self.gradient_norms

    def _update(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        finished = self.updates
        self.updates += 1
        self._begun = False
        self._complete(operands)
        counts = self._divisor != 0
        if not counts and self._is_last:
            warnings.warn(
                f"update {finished}: nothing of its minibatch counts in the loss (it returned a count of 0), so no "
                "weights change",
                stacklevel=1,
            )
        self._divisors, self._divisor = [], None
        self.joint_norms = joined_norms(operands["norm"]) if "norm" in operands else None
        if self.optimizer is not None:
            if not counts:
                self._drop_gradients()
            elif self._clip is not None:
                clip(self._limited, self._clip, self._norms() if self.joint_norms is None else self.joint_norms)
            elif self.measures_norms:
                self._norms()
            steps = counts or (self.agreement is not None and self.agreement.steps)
            step: Callable[[], object] = nothing
            if steps:  # optimizer.step is looked up each time: a scheduler replaces it
                step = self.optimizer.step if self._step is None else partial(self._step, finished)
            if steps and self._share is not None:
                step = partial(self._share.step, step)
            elif steps and self.masters.copies:
                step = partial(self.masters.step, step)
            self.weights.update(step)
            self._drop_gradients()
            if self.scheduler is not None and counts:
                self.scheduler.step()
        return {} if self._lends is None else {"tied-weight": self._lends.values()}

    @contextmanager
    def plain_sums(self) -> Iterator[None]:
        """In this block the weights are the plain sums of their steps; then what they were, bit for bit.

        Masters stay as they are, and nothing may train in the block.
        """
        sums = {} if self.optimizer is None else plain_sums(self.optimizer, self._feedback)
        summed = {p: sums[self.masters.of(p)] for p in self._parameters if self.masters.of(p) in sums}
        before = {parameter: parameter.detach().clone() for parameter in summed}
        try:
            for parameter, value in summed.items():
                parameter.data.copy_(value)  # of .data: graphs in flight stay valid
            yield
        finally:
            for parameter, value in before.items():
                parameter.data.copy_(value)

    @property
    def stepping(self) -> torch.optim.Optimizer | None:
        """The optimizer whose steps train this stage: its own, or that of the server's shard in this process."""
        served = None if self.agreement is None else self.agreement.optimizer
        return self.optimizer if served is None else served

    def lent(self, user: int) -> dict[int, Tensor]:
        """The current weights that another stage borrows."""
        return {} if self._lends is None else self._lends.values()[user]

    def take_over(self, values: Mapping[int, Tensor]) -> None:
        """Overwrite borrowed parameters with `values` from their owner, which is another process."""
        if self._borrows is not None:
            self._borrows.overwrite(values)

    def settle(self, unread: Sequence[Mapping[int, Tensor]] = ()) -> None:
        """Bring borrowed weights up to date after a drain. `unread`: the owners' messages that no forward has read."""
        if isinstance(self.head, ReadingHead):
            self.head.receive(unread)
        if self._borrows is not None:
            self._borrows.refresh()


def outgoing(reach: Reach, stage: int) -> list[tuple[bool, int | None]]:
    """For each gradient that a stage sends down: whether its head adds to it, and which arriving gradient does."""
    arriving = reach.arriving(stage)
    return [
        (reach.stop(stage) == stop, arriving.index(stop) if stop in arriving else None) for stop in reach.carried(stage)
    ]


def nothing() -> None:
    """The step of an update whose minibatch counts nothing."""


def kinds_of(operands: Mapping[str, Any]) -> Kinds:
    """The dtypes and shapes of a forward's inputs and targets, without the number of examples."""
    target = operands.get("target")
    inputs = operands["activation"]
    examples = inputs[0].shape[0] if inputs and inputs[0].dim() else 1
    targets = [part for _, part in tensors_in(target and target.value, "")]
    shapes = [[part.shape[0] // max(examples, 1), *part.shape[1:]] if part.dim() else [] for part in targets]
    of_targets = zip((part.dtype for part in targets), map(torch.Size, shapes), strict=True)
    return (*((tensor.dtype, tensor.shape[1:]) for tensor in inputs), *of_targets)


IN_PLACE = (
    "stage {} changes its input in place, which belongs to {}: begin the stage with an operation that does not work in "
    "place (or with `x.clone()`)"
)


def in_the_loss(error: Exception) -> bool:
    """Whether an error comes from a stage's loss, or from the head that it reads, and not from the stage itself."""
    return any(frame.f_code is Stage._compute_loss.__code__ for frame, _ in walk_tb(error.__traceback__))


def head_loss(loss: Loss, head: nn.Module | None, features: Tensors, output: Any, target: Target) -> Tensor:
    """The loss that trains a stage: the mean loss of its head on `features`, or of its `output` without a head."""
    compared = head(*features) if head is not None else features if isinstance(output, tuple) else features[0]
    value = call(loss, compared, target.value, counted=False)
    mean = value.mean if isinstance(value, Sum) else value
    return head.total(mean, features, target.inputs) if isinstance(head, LocalLoss) else mean


def head_loss_and_weight(
    loss: Loss, head: nn.Module | None, features: Tensors, output: Any, target: Target, *, examples: int
) -> tuple[Tensor, float]:
    """The mean loss of a batch and its weight among other batches: its count, or else its number of examples."""
    weight = 0.0

    def weighed(output: Any, target: Any) -> Tensor:
        nonlocal weight
        mean, weight = mean_and_weight(loss, output, target, examples)
        return mean

    return head_loss(weighed, head, features, output, target), weight


def own_norms(parameters: Sequence[Tensor]) -> Tensor:
    """The norm of each parameter's gradient, [number of gradients]."""
    gradients = [entries(local_share(parameter.grad)) for parameter in parameters if parameter.grad is not None]
    return torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(0)


def joined_norms(stage_norms: Sequence[Tensor]) -> Tensor:
    """The norms of all stages' gradients, [number of gradients], of those of each stage.

    Norms of different dtypes are promoted; the empty tensor of a stage without gradients is left out, and so is its
    dtype.
    """
    nonempty = [norms.to(stage_norms[-1].device) for norms in stage_norms if norms.numel()]
    return torch.cat(nonempty) if nonempty else torch.zeros(0)


def clip(parameters: Sequence[Tensor], limit: float, norms: Tensor) -> None:
    """Scale the gradients of `parameters` so that the norm of all gradients together is at most `limit`.

    `norms` are those of each gradient. The same operations as torch.nn.utils.clip_grad_norm_ on all their parameters.
    """
    if norms.numel():
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, torch.linalg.vector_norm(norms))


def refuse_detached(value: Tensor | Sum, output: Any, stage: int) -> None:
    """Raise UsageError for a loss through which no gradient gets to the output, though the output could have one."""
    total = value.total if isinstance(value, Sum) else value
    outputs = any(tensor.requires_grad for tensor in tensors_of(output))
    if total.requires_grad or not torch.is_grad_enabled() or not outputs:
        return  # the first of two forwards has no gradients, and may pass on an input that has one
    raise UsageError(
        f"stage {stage}: the loss returned {shown(total)} without a gradient, so nothing would be trained: compute it "
        "from the output by differentiable operations, without detach(), item(), argmax() or torch.no_grad()"
    )


def leaves_between(value: Tensor, outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaves that a value has a gradient for and that are reached not through `outputs`."""
    ends = {output.grad_fn for output in outputs if output.grad_fn is not None}
    seen, open_ = set(ends), [value.grad_fn]
    while open_:
        node = open_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        open_.extend(following for following, _ in node.next_functions)


def begins_in_place(module: nn.Module) -> bool:
    """Whether a stage's first layer works in place, as ReLU(inplace=True) does; it then gets a copy of its input."""
    first = next((layer for layer in module.modules() if not any(True for _ in layer.children())), module)
    return bool(getattr(first, "inplace", False))


def leaf(tensor: Tensor, wants_gradient: bool) -> Tensor:
    """A detached tensor that collects a gradient if one is wanted and its dtype is floating-point or complex."""
    tensor = tensor.detach()
    if wants_gradient and (tensor.is_floating_point() or tensor.is_complex()):
        tensor.requires_grad_()
    return tensor


def add(parts: Sequence[Gradient]) -> Gradient:
    """The sum of gradients, tensor by tensor; None counts as zero. Not in place: others may read the same message."""
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return parts[0] if parts else ()
    total: list[Tensor | None] = list(parts[0])
    for part in parts[1:]:
        for position, gradient in enumerate(part):
            so_far = total[position]
            total[position] = gradient if so_far is None else so_far if gradient is None else plus(so_far, gradient)
    return tuple(total)


def differentiable(outputs: Tensors, gradients: Gradient) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs that have a gradient and require one, and their gradients."""
    roots: list[Tensor] = []
    arrived: list[Tensor | None] = []
    for output, gradient in zip(outputs, gradients, strict=False):
        if gradient is not None and output.requires_grad:
            roots.append(output)
            arrived.append(gradient)
    return roots, arrived


def pop_gradients(tensors: Sequence[Tensor]) -> Gradient:
    """Remove the gradients of `tensors` and return them."""
    gradients = tuple(map(GRADIENT, tensors))
    for tensor in tensors:
        tensor.grad = None
    return gradients


def add_gradients(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add `gradients` to the gradients of `tensors`; None adds nothing."""
    for tensor, gradient in zip(tensors, gradients, strict=False):
        if gradient is not None:
            tensor.grad = gradient if tensor.grad is None else plus(tensor.grad, gradient)
