"""The costs of a candidate: tables of its stages, that `partition` reads.

The seconds of a step follow from them by `closed_forms`. Memory of a stage:

    versions x weights + gradients + optimizer state (divided among replicas as far as they are sharded)
    + copies of weights that predictions and corrections keep
    + held x activations
    + delay x (output, and the graph of its predicted gradient), of a stage that learns to predict one
    + of weights that another stage owns, those of the modules themselves, and one gradient to send there
    + what is recomputed at a time: by the layer that recomputes most, or by the whole stage; of a worker's stages, by
      the one that needs most

Energy of a step: every device's power while it waits, times the step, plus what it uses more while it is busy, times

    busy       = M (forward + backward) + end      of each of its stages: computing, communicating inside the stage and
                 with replicas, sending and receiving; not the bubble and not the transit of messages
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from math import inf
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from stretto.cost.attained import Attained
from stretto.cost.collective import GRADIENTS, RESHARDING, SHARDING, TENSOR_SUM
from stretto.cost.communication import (
    all_reduce,
    gathering,
    gradient_sum,
    measured_seconds,
    message,
    receiving,
    sending,
)
from stretto.cost.cure_costs import PLAIN, feedback_tensors
from stretto.cost.head_costs import SharedUse, borrow
from stretto.cost.layer_sums import HostLags, Numbers, Table, Times, learn_seconds, range_sums, with_head
from stretto.cost.worker_memory import graph_of
from stretto.mesh import Mesh
from stretto.methods.cure import StepCure, WeightCopies
from stretto.plan.closed_forms import (
    TERMS,
    Passes,
    Row,
    StageTable,
    adds_fill,
    busiest,
    each_table,
    fill_and_load,
    stage_terms,
    wait_form,
    wait_terms,
)
from stretto.plan.layer_prices import LayerPrices, Replicas, Sizes
from stretto.plan.places import DeviceKind, Places
from stretto.plan.planned_methods import planned, reach_of
from stretto.plan.problem import SHARD_OPTIMIZER, Problem
from stretto.plan.search_space import Candidate, flow_of
from stretto.plan.ways import correction

TENSORS_OF_SUM = 2  # that slabs sum at once: the weights and the bias of a layer


class Prices(LayerPrices):
    """The costs of all candidates of a problem; tables that several candidates share are computed once."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.loss_seconds = lru_cache(maxsize=None)(self._loss_seconds)
        self.borrowing = lru_cache(maxsize=None)(self._borrowing)
        self.borrowings = lru_cache(maxsize=1024)(self._borrowings)
        self.valid = np.triu(np.ones((len(problem.layers) + 1,) * 2, dtype=bool), 1)

    def _borrowing(self, uses: tuple[SharedUse, ...]) -> "Prices":
        # The costs where layers borrow shared weights of another stage.
        if not uses:
            return self
        problem = self.problem
        return Prices(
            problem.but(
                costs=borrow(problem.costs, uses),
                tensor_costs={key: borrow(costs, uses) for key, costs in problem.tensor_costs.items()},
                form_costs={key: borrow(costs, uses) for key, costs in problem.form_costs.items()},
            )
        )

    @cached_property
    def least(self) -> "Prices":
        """The costs where all layers that share weights only read them: no more than those of any stage's layers."""
        if self.as_large_models and not any(planned(name).has_heads for name in self.problem.names):
            return self
        return self.borrowing(tuple(SharedUse(shared, shared, trains=False) for shared in self.shared))

    @cached_property
    def shared(self) -> tuple[tuple[int, ...], ...]:
        """The layers that share weights, each group of them once."""
        return tuple(dict.fromkeys(tie.layers for tie in self.problem.costs.ties))

    def _borrowings(
        self, method: str, stages: int, losses: int, s: int
    ) -> tuple[tuple[tuple[SharedUse, ...], NDArray[np.bool_]], ...]:
        # The uses of borrowed weights by stage s where it holds [i, j), and at which [i, j): later ones count. Whether
        # it trains a weight may depend on the stage that owns it; what its owner may be decides, in favour of training.
        tried = planned(method)
        flow = flow_of(method, stages, losses)
        if not self.shared or (self.as_large_models and not (flow.heads or flow.predicted)):
            return ()  # a single loss: each stage steps a copy of its own
        if flow.heads:
            return tuple(
                (
                    tuple(borrowed(shared, max(shared), trains=True) for shared in self.shared if max(shared) >= cut),
                    np.broadcast_to(np.arange(len(self.valid)) <= cut, self.valid.shape),
                )
                for cut in sorted(set(map(max, self.shared)), reverse=True)
            )
        reach = reach_of(tried, stages, losses)

        def trains(owner: int) -> bool:
            return any(reach.trains_all_of(stage, s) for stage in range(min(s - 1, owner) + 1))

        owned = [(min(shared), borrowed(shared, min(shared), trains=trains(min(shared)))) for shared in self.shared]
        return tuple(
            (
                tuple(use for owner, use in owned if owner <= cut),
                np.broadcast_to((np.arange(len(self.valid)) > cut)[:, None], self.valid.shape),
            )
            for cut in sorted(set(map(min, self.shared)))
        )

    def correction(self, c: Candidate) -> float:
        """What the seconds of a candidate's step are multiplied by, as whole steps were measured; 1 if none were."""
        return correction(c, self.problem.ratios) if self.problem.ratios else 1.0

    def places_of(self, c: Candidate) -> Places:
        """The devices and links that a candidate runs on."""
        return self.places(c.mesh, c.pipeline, c.placement)

    def slowest(self, c: Candidate, worker: int) -> Times:
        """Times on the slowest of the devices that hold a worker's replicas."""
        kinds = self.places_of(c).machines[worker]
        times = [self.times(kind, c.form, c.examples) for kind in kinds]
        return times[0] if len(times) == 1 else Times(*map(np.maximum.reduce, zip(*times, strict=True)))

    def _loss_seconds(self, mesh: Mesh, pipeline: int, placement: tuple[int, ...], last: int) -> tuple[float, ...]:
        workers = self.places(mesh, pipeline, placement).workers
        return tuple(workers.losses(worker, last) for worker in range(pipeline))

    def stage(self, c: Candidate, s: int) -> StageTable:
        """The costs of stage s for all [i, j)."""
        return self.owned_or_borrowed(c, s, Prices.stage_alone)

    def trained(self, c: Candidate, s: int) -> "Trained":
        """The layers of stage s for all [i, j), with what its method trains beside them."""
        return self.owned_or_borrowed(c, s, Prices.trained_alone)

    def owned_or_borrowed(self, c: Candidate, s: int, alone: "Callable[[Prices, Candidate, int], Tables]") -> "Tables":
        """Tables of stage s, those of borrowed weights where its layers [i, j) borrow shared ones of another stage."""
        tables = alone(self, c, s)
        for uses, where in self.borrowings(c.method, c.stages, c.losses, s):
            borrowing = alone(self.borrowing(uses), c, s)
            tables = each_table(partial(np.where, where), borrowing, tables)
        return tables

    def stage_alone(self, c: Candidate, s: int) -> StageTable:
        """The costs of stage s for all [i, j), as if it owned all shared weights that it has."""
        worker, places, versions = c.worker_of(s), self.places_of(c), c.planned.versions(c.stage_at(s))
        workers, stages_per_worker = places.workers, c.planning.stages_per_worker
        sizes = self.sizes(c.form, c.examples)
        work = self.trained_alone(c, s)
        static, gradients, learn = work.static, work.gradients, work.learn
        intra = self.intra_stage(
            c.mesh, c.pipeline, c.placement, worker, c.form, c.examples, self.hides_exchanges and not c.planning.split
        )
        intra_forward, intra_backward = (range_sums(values) for values in intra)
        backward = work.input_gradient + work.weight_gradient if c.planning.split and s else work.backward
        if c.microbatches > 1:
            backward = backward + work.accumulate
        zeros = np.zeros_like(intra_forward)
        again = work.forward + intra_forward if c.recomputes(s) else zeros
        of_input, of_output = self.gathered_messages(c, s, sizes)
        intra_forward, intra_backward = intra_forward + of_input[:, None], intra_backward + of_output
        copy = workers.copy_seconds(worker, 1.0) * gradients if versions > 1 else 0.0
        losses = self.loss_seconds(c.mesh, c.pipeline, c.placement, c.worker_of(c.stages - 1))[worker]
        stage = StageTable(
            forward=work.forward + intra_forward,
            backward=backward + intra_backward + again,
            learn=learn,
            recompute=again,
            message_overhead=zeros,
            action_overhead=zeros,
            deferrable=work.weight_gradient,
            transit=zeros + message(c.link(s, places), self.message_share(c.form) * sizes.output),
            all_reduce=self.bucketed(c, worker, self.summed_gradients(c, worker, gradients, sizes.tensors)),
            update=work.update + copy,
            loss_overhead=zeros + losses / stages_per_worker,
            turn_overhead=zeros + workers.per_action(worker) + workers.per_step(worker) / stages_per_worker,
            static_bytes=static + gradients * (1 + self.has_buckets(c)),
            microbatch_bytes=zeros + sizes.input[:, None] if c.recomputes(s) else work.held,
            recompute_bytes=work.held if c.recomputes(s) else sizes.recomputed,
            passes={"inside stages": Passes(intra_forward, intra_backward, zeros)},
        )
        for effect in EFFECTS:
            stage = effect(self, c, s, stage)
        return stage

    def trained_alone(self, c: Candidate, s: int) -> "Trained":
        """The layers of stage s with heads, predictors, copies of weights and cures, as if it owned shared weights."""
        worker, sizes, stage_at = c.worker_of(s), self.sizes(c.form, c.examples), c.stage_at(s)
        times, versions, copies = (
            self.slowest(c, worker),
            c.planned.versions(stage_at),
            c.planned.weight_copies(stage_at),
        )
        static, gradients, held = sizes.parameters * versions + sizes.state, sizes.gradients, sizes.held
        static = static + self.beside_borrowed(c, s) + (copies.forward + copies.backward + copies.always) * gradients
        if not self.sends_gradient(c, s):
            times = times._replace(backward=times.weight_gradient, input_gradient=np.zeros_like(times.input_gradient))
        if self.as_large_models:
            times = times._replace(weight_gradient=times.backward - times.input_gradient)
        if s in c.gradients.heads:
            head = self.head(c, s)
            times = with_head(times, head.times)
            twice = self.had_twice(c.method)
            static, gradients = static + head.static - twice, gradients + head.gradients
            held = held + head.held - twice
        learn = np.zeros_like(static)
        if s in c.gradients.predicted:
            forward, at_end, bytes_of_predictor = self.predictor(c, s)
            learn = learn + at_end
            times, static = times._replace(backward=times.backward + forward), static + bytes_of_predictor
        update, cure = times.update, c.planned.step_cure(stage_at)
        if cure != PLAIN:
            seconds, kept = self.steps.cure(cure, self.places_of(c).machines[worker], c.form)
            static = static + feedback_tensors(cure, self.steps.stepping) * gradients + kept
            update = update + seconds
        times = times._replace(
            update=self.stepping(c, worker, update), accumulate=self.accumulating(c, times.accumulate)
        )
        return Trained(*times, static, gradients, held, learn)

    def sends_gradient(self, c: Candidate, s: int) -> bool:
        """Whether stage s computes the gradient of its input, and sends it to the stage below."""
        return s > 0 and c.receives_gradient(s - 1)

    def has_buckets(self, c: Candidate) -> bool:
        """Whether a copy of all gradients is kept to sum them, in networks that are only planned."""
        return self.as_large_models and self.problem.program.buckets and c.mesh.data > 1

    def beside_borrowed(self, c: Candidate, s: int) -> Table:
        """Bytes beside the borrowed weights that stage s computes with: its modules' own, and gradients to be sent.

        Stage 0 is taken for the owner: on its worker the modules' own are the owner's.
        """
        sizes = self.sizes(c.form, c.examples)
        return sizes.sent + sizes.borrowed * (c.worker_of(s) != c.worker_of(0))

    def accumulating(self, c: Candidate, accumulate: Table) -> Table:
        """Seconds of adding gradients to earlier ones: to a shard alone in networks that are only planned."""
        return accumulate / c.mesh.data if self.as_large_models and c.shard.startswith("fully") else accumulate

    def with_sequence(self, c: Candidate, s: int, stage: StageTable) -> StageTable:
        """The stage with the sum of norms' gradients, of which processes that divide the sequence have parts."""
        if not c.sequence:
            return stage
        places, num_bytes = self.places_of(c), self.sizes(c.form, c.examples).summed_once
        links = places.weights[c.worker_of(s)]
        seconds = measured_seconds(TENSOR_SUM, links, c.mesh.tensor, num_bytes)
        if seconds is None:
            seconds = all_reduce(links, c.mesh.tensor, num_bytes, places.gamma)
        return stage._replace(all_reduce=stage.all_reduce + seconds)

    def with_program(self, c: Candidate, _: int, stage: StageTable) -> StageTable:
        """The stage of a program whose replicas sum gradients in the backward of every micro-batch."""
        if not self.problem.program.in_every_backward:
            return stage
        return stage._replace(all_reduce=c.microbatches * stage.all_reduce)

    def gathered_messages(self, c: Candidate, s: int, sizes: Sizes) -> tuple[Numbers, Numbers]:
        """Seconds in which the processes of a stage gather the parts of its input, and of its output's gradient."""
        places, nothing = self.places_of(c), np.zeros_like(sizes.input)
        if self.message_share(c.form) == 1:
            return nothing, nothing
        links, has_input, has_gradient = (
            places.weights[c.worker_of(s)],
            c.link(s - 1, places) is not None,
            c.link(s, places) is not None and c.receives_gradient(s),
        )
        return (
            gathering(links, c.mesh.tensor, sizes.input) if has_input else nothing,
            gathering(links, c.mesh.tensor, sizes.output) if has_gradient else nothing,
        )

    def summed_gradients(self, c: Candidate, worker: int, gradients: Table, tensors: Table) -> Table:
        """Seconds of the sums of gradients over replicas and slabs; slabs sum those of a layer in its backward."""
        places, slabs = self.places_of(c), c.mesh.space[0] * c.mesh.space[1]
        replicas, parts = places.replicas[worker], places.slabs[worker]
        if slabs == 1:
            if gradients is self.weights(c.form)[1]:  # without a head
                return self.weight_messages(Replicas(replicas, c.mesh.data, places.gamma), c.form).gradient_sum
            return gradient_sum(replicas, c.mesh.data, gradients, tensors, places.gamma)
        sums = tensors / TENSORS_OF_SUM
        on_slabs = measured_seconds(TENSOR_SUM, parts, slabs, gradients, calls=sums)
        if on_slabs is None:
            return gradient_sum((*replicas, *parts), c.mesh.data * slabs, gradients, tensors, places.gamma)
        return on_slabs + gradient_sum(replicas, c.mesh.data, gradients, tensors, places.gamma)

    def with_runtime(self, c: Candidate, s: int, stage: StageTable) -> StageTable:
        """The stage with the runtime's own time of its actions, and the time of sending and receiving its messages."""
        places, sizes = self.places_of(c), self.sizes(c.form, c.examples)
        per_action, below, above = places.workers.per_action(c.worker_of(s)), c.link(s - 1, places), c.link(s, places)
        share = self.message_share(c.form)
        inputs, outputs = share * sizes.input, share * sizes.output
        forward_messages = receiving(below, inputs)[:, None] + sending(above, outputs)
        send_gradient = sending(below, inputs)[:, None] * c.receives_gradient(s - 1)
        learns, to_learn_from = s in c.gradients.predicted, 0.0 * inputs
        receive_gradient = receiving(above, inputs) * c.receives_gradient(s)
        if learns:
            receive_gradient, to_learn_from = to_learn_from, receive_gradient
        num_backwards = c.num_backward_actions(s)
        num_actions = num_backwards + c.recomputes(s)
        # A stage with a head of its own sends that head's gradient down before it receives the one from above.
        deferred_receive = receive_gradient if num_backwards == 2 and not c.planned.drains else 0.0
        gradient_messages = send_gradient + receive_gradient
        return stage._replace(
            forward=stage.forward + forward_messages + per_action,
            backward=stage.backward + gradient_messages + num_actions * per_action,
            learn=stage.learn + to_learn_from + learns * per_action,
            message_overhead=stage.message_overhead + forward_messages + gradient_messages + to_learn_from,
            action_overhead=stage.action_overhead + (1 + num_actions + learns) * per_action,
            deferrable=stage.deferrable + deferred_receive + (per_action if num_backwards == 2 else 0.0),
        )

    def with_sharding(self, c: Candidate, s: int, stage: StageTable) -> StageTable:
        """The stage with its optimizer state, or weights and gradients too, sharded among replicas."""
        if c.shard == "none":
            return stage
        sizes, places, worker = self.sizes(c.form, c.examples), self.places_of(c), c.worker_of(s)
        beside = self.beside_borrowed(c, s)
        if c.shard == SHARD_OPTIMIZER:
            return stage._replace(
                all_reduce=self.scattered_and_gathered(c, worker, stage),
                update=stage.update / c.mesh.data,
                static_bytes=sizes.parameters + sizes.gradients + sizes.state / c.mesh.data + beside,
            )
        gather, scatter = self.sharding_messages(c, worker, stage)
        kinds, replicas = places.machines[worker], places.replicas[worker]
        update = self.steps.of_shares(stage.update, kinds, c.form, replicas, c.mesh.data)
        update = np.maximum(update, self.launches(c, worker, sizes.tensors))
        if c.shard == "fully-shard":
            static = sizes.parameters + sizes.gradients + (sizes.parameters + sizes.state) / c.mesh.data
            return stage._replace(all_reduce=gather + scatter, update=update, static_bytes=static)
        recompute_gather = gather * c.recomputes(s)
        return stage._replace(
            forward=stage.forward + gather,
            backward=stage.backward + gather + scatter + recompute_gather,
            passes={**stage.passes, "gathering weights": Passes(gather, gather + scatter, np.zeros_like(gather))},
            recompute=stage.recompute + recompute_gather,
            all_reduce=np.zeros_like(update),
            update=update,
            static_bytes=(sizes.parameters + sizes.gradients + sizes.state) / c.mesh.data + 2 * sizes.largest,
        )

    def scattered_and_gathered(self, c: Candidate, worker: int, stage: StageTable) -> Table:
        """Seconds of scattering gradients before an update, and of gathering weights after it.

        Where collectives were measured as training runs them: those of the sum of gradients, which sends as many bytes.
        """
        places = self.places_of(c)
        links, data = places.replicas[worker], c.mesh.data
        if any(GRADIENTS in link.collectives for link in links):
            return stage.all_reduce
        _, gather, scatter = self.weight_messages(Replicas(links, data, places.gamma), c.form)
        return gather + scatter

    def launches(self, c: Candidate, worker: int, tensors: Table) -> Table:
        """Seconds in which a worker's host starts the updates of so many tensors, however small their shards are."""
        return tensors * max(each.update_of_tensor for each in self.hosts(c, worker))

    def hosts(self, c: Candidate, worker: int) -> list[Attained]:
        """What devices and hosts of a worker's replicas attain; one of no figures where none are known."""
        devices = self.places_of(c).workers.devices(worker)
        return [device.attained or Attained() for device in devices] or [Attained()]

    def lags_of(self, c: Candidate, worker: int) -> HostLags | None:
        """How long the slowest device of a worker's replicas waits for its host; None without one."""
        kinds = self.places_of(c).machines[worker]
        found = [lags for kind in kinds if (lags := self.host_lags(kind, c.form, c.examples)) is not None]
        return HostLags(*map(np.maximum.reduce, zip(*found, strict=True))) if found else None

    def stepping(self, c: Candidate, worker: int, update: Table) -> Table:
        """Seconds of an update: those of the device, or of the host that starts the steps of all weights."""
        lags = self.lags_of(c, worker)
        return update if lags is None else np.maximum(update, lags.stepping)

    def bucketed(self, c: Candidate, worker: int, all_reduce: Table) -> Table:
        """Seconds of a sum of gradients among replicas: its own, or the host's that puts each into a bucket."""
        per_tensor = max(each.per_reduction for each in self.hosts(c, worker))
        if not per_tensor or c.mesh.data == 1 or c.shard != "none":
            return all_reduce
        return np.maximum(all_reduce, per_tensor * self.sizes(c.form, c.examples).tensors)

    def with_host(self, c: Candidate, s: int, stage: StageTable) -> StageTable:
        """The stage with the seconds in which it waits for its host, which runs ahead while others' messages arrive.

        Between a forward and a backward that follows it at once, in a stage that is the whole network, too.
        """
        lags = self.lags_of(c, c.worker_of(s))
        if lags is None:
            return stage
        splits, nothing = bool(c.planning.split and s), np.zeros_like(lags.forward)
        weights = lags.weight_gradient
        if splits and self.as_large_models:  # W is what B has beside I
            weights = np.maximum(0.0, lags.backward - lags.input_gradient)
        whole = lags.input_gradient + weights if splits else lags.backward
        again = lags.forward if c.recomputes(s) else nothing
        forward, backward = lags.forward, (whole if self.sends_gradient(c, s) else weights) + again
        for hidden in stage.passes.values():
            forward, backward = forward - hidden.forward, backward - hidden.backward
        forward = np.maximum(0.0, forward)
        if c.stages == 1:
            backward = backward - (stage.forward + forward - lags.issuing)
        backward = np.maximum(0.0, backward)
        return stage.longer("host", Passes(forward, backward, np.minimum(backward, weights)))

    def sharding_messages(self, c: Candidate, worker: int, stage: StageTable) -> tuple[Table, Table]:
        """Seconds of gathering sharded weights once, and of scattering their gradients."""
        places, sizes = self.places_of(c), self.sizes(c.form, c.examples)
        links, data, again = places.replicas[worker], c.mesh.data, c.shard == "fully-shard(reshard=True)"
        longer = measured_seconds(
            RESHARDING if again else SHARDING, links, data, sizes.gradients, tensors=sizes.tensors
        )
        if longer is None:
            return self.weight_messages(Replicas(links, data, places.gamma), c.form)[1:]
        # Measured all together, beside a meeting of replicas; each has about as many bytes.
        part = (stage.all_reduce + longer) / (3 if again else 2)
        return part, part

    def had_twice(self, method: str) -> Table:
        """Bytes of weights that both the layers [i, j) and a head behind them that trains later layers have."""
        heads, found = self.problem.heads_of(method), np.zeros(self.valid.shape)
        if heads is None or not heads.trains:
            return found
        layers = np.arange(len(self.valid) - 1)
        for tie in self.problem.costs.ties:
            above = max({*heads.read} & {*tie.layers}, default=-1) >= np.arange(len(self.valid))
            found += tie.bytes * (range_sums(np.isin(layers, tie.layers).astype(float)) > 0) * above
        return found

    def head(self, c: Candidate, s: int) -> "Head":
        """The costs of stage s's head behind layer j - 1, at [0, j]; infinite memory where there can be none."""
        costs, worker = self.problem.heads_of(c.method), c.worker_of(s)
        assert costs is not None, "methods with heads are tried only where their costs are known"
        given = costs.behind(s, c.stages)
        some = next(head for head in (*given, *costs.rows) if head is not None)
        heads = [some if head is None else head for head in given]
        missing = np.array([inf if head is None else 0.0 for head in given])
        rows: Table = self.seconds(heads, self.places_of(c).machines[worker], c.examples).max(axis=0)

        def at_end(values: Sequence[float] | Numbers) -> Table:
            table: Table = np.concatenate([[0.0], np.asarray(values)])[None, :]
            return table

        return Head(
            Times(*map(at_end, rows.T)),
            at_end(missing + np.array([head.parameter_bytes + self.problem.state(head) for head in heads])),
            at_end([head.gradient_bytes for head in heads]),
            at_end([head.activation.at(c.examples) for head in heads]),
            at_end([graph_of(head).at(c.examples) for head in heads]),
        )

    def predictor(self, c: Candidate, s: int) -> tuple[Table, Table, Table]:
        """What predicts the gradient of stage s: seconds that B takes longer, those of L, and bytes.

        From B to L it keeps the stage's output, and the prediction's graph where that serves for L.
        """
        head, prediction = self.head(c, s), c.planned.method.prediction
        assert prediction is not None, "the method says how predictions learn"
        keeps, outputs = prediction.keeps_graph, self.sizes(c.form, c.examples).output
        kept = prediction.delay * (outputs + keeps * head.graph)
        return head.times.forward, learn_seconds(head.times, keeps_graph=keeps), head.static + kept

    def tables(self, c: Candidate) -> list[Row]:
        """The row of every stage; loads are infinite where the worker's memory is too small."""
        place, method, rows = self.places_of(c), c.planned, []
        heads = c.gradients.heads | c.gradients.predicted
        planning, last = method.planning, c.stages - 1
        losses = self.loss_seconds(c.mesh, c.pipeline, c.placement, c.worker_of(last))
        known: dict[Hashable, tuple[StageTable, Table, Table, Table]] = {}
        of_stage: dict[Hashable, Row] = {}
        for s in range(c.stages):
            worker, stage_at = c.worker_of(s), c.stage_at(s)
            key = StageKey(
                machines=place.machines[worker],
                inside=tuple(tuple(map(id, links[worker])) for links in (place.replicas, place.weights, place.slabs)),
                links=(id(c.link(s - 1, place)), id(c.link(s, place))),
                receives=(self.sends_gradient(c, s), c.receives_gradient(s)),
                losses=losses[worker],
                ends=(s == 0, s == last),
                versions=method.versions(stage_at),
                recomputes=c.recomputes(s),
                head=self.problem.head_variant(c.method, s, c.stages) if s in heads else None,
                cure=method.step_cure(stage_at),
                copies=method.weight_copies(stage_at),
                borrowed=tuple(uses for uses, _ in self.borrowings(c.method, c.stages, c.losses, s)),
            )
            if key not in known:
                stage = self.stage(c, s)
                fill, load = fill_and_load(c, s, stage)
                busy = c.microbatches * (stage.forward + stage.backward) + stage.end
                fill, load, busy = (np.where(self.valid, table, inf) for table in (fill, load, busy))
                known[key] = stage, fill, load, busy
            stage, fill, load, busy = known[key]
            held, memory = planning.held(stage_at), place.memory[worker]
            place_key = (key, held, memory, None if self.problem.begins is None else s)
            if place_key not in of_stage:
                allowed = self.valid if self.problem.begins is None else self.valid & self.stands(s)
                kept = np.where(allowed, stage.static_bytes + held * stage.microbatch_bytes, inf)
                wait = wait_terms(c, s, stage) if planning.waits else (None, None, None)
                fits = (kept + stage.recompute_bytes <= memory) & np.isfinite(kept)
                of_stage[place_key] = Row(fill, np.where(fits, load, inf), kept, stage.recompute_bytes, busy, *wait)
            rows.append(of_stage[place_key])
        return rows

    def stands(self, s: int) -> NDArray[np.bool_]:
        """The layers [i, j) that stage s has where it is given which ones stages begin with."""
        ends = (*(self.problem.begins or ()), len(self.valid) - 1)
        stands: NDArray[np.bool_] = np.zeros_like(self.valid)
        stands[ends[s], ends[s + 1]] = True
        return stands

    def trained_at(self, c: Candidate, bounds: Sequence[int]) -> "list[Trained]":
        """What every stage's layers take for one partition: numbers instead of tables."""
        return [each_table(itemgetter(span), self.trained(c, s)) for s, span in enumerate(pairwise(bounds))]

    def stages_at(self, c: Candidate, bounds: Sequence[int]) -> list[StageTable]:
        """Every stage's costs for one partition: numbers instead of tables."""
        stages = [each_table(itemgetter(span), self.stage(c, s)) for s, span in enumerate(pairwise(bounds))]
        if c.form.recompute == "none":
            return stages
        plain = self.stages_at(c._replace(recompute="none"), bounds)
        return [
            one._replace(recompute=one.own_backward - other.own_backward)
            for one, other in zip(stages, plain, strict=True)
        ]

    def terms(self, c: Candidate, bounds: Sequence[int]) -> dict[str, float]:
        """The seconds of a step by term (see TERMS): those of the busiest stage, and the bubble of the fill.

        "messages" are the seconds of sending and receiving, and the transit that no computation hides; "correction" is
        what whole steps took longer than the other terms. "computing" has what kernels take below the peak, too.
        """
        stages = self.stages_at(c, bounds)
        fills, loads = zip(*(fill_and_load(c, s, stage) for s, stage in enumerate(stages)), strict=True)
        worker, load = busiest(c, [float(each) for each in loads])
        parts = dict.fromkeys(TERMS, 0.0)
        for s, stage in enumerate(stages):
            if c.worker_of(s) == worker:
                for name, seconds in stage_terms(c, stage).items():
                    parts[name] += float(seconds)
        total = load + (float(sum(fills)) if adds_fill(c) else 0.0)
        if c.planning.waits:
            terms = [wait_terms(c, s, stage) for s, stage in enumerate(stages)]
            total = max(load, wait_form(c).longest([tuple(map(float, each)) for each in terms]))
        parts["bubble"] = total - sum(parts.values())
        parts["correction"] = total * (self.correction(c) - 1)
        return {name: float(value) for name, value in parts.items()}


class StageKey(NamedTuple):
    """What the tables of a candidate's stage depend on beside the candidate; links are the same if they are one object.

    `inside` are those among its replicas, among parts of its weights and of its images, `links` those to the stages
    below and above; `receives` says whether it sends a gradient down, and has one from above.
    """

    machines: tuple[DeviceKind, ...]
    inside: tuple[tuple[int, ...], ...]
    links: tuple[int, int]
    receives: tuple[bool, bool]
    losses: float
    ends: tuple[bool, bool]
    versions: float
    recomputes: bool
    head: Hashable
    cure: StepCure
    copies: WeightCopies
    borrowed: tuple[tuple[SharedUse, ...], ...]


class Trained(NamedTuple):
    """What a stage's layers [i, j) take with all that is trained beside them, as tables; without communication.

    Seconds as in `LayerTimes`, of the device alone but for an update, which waits for its host; `learn` are those of
    learning to predict gradients. Bytes of a worker: `static` ones always, `held` ones of a micro-batch.
    """

    forward: Table
    backward: Table
    input_gradient: Table
    weight_gradient: Table
    update: Table
    accumulate: Table
    static: Table
    gradients: Table
    held: Table
    learn: Table


Tables = TypeVar("Tables", StageTable, Trained)


class Head(NamedTuple):
    """The costs that a head adds to a stage."""

    times: Times
    static: Table
    gradients: Table
    held: Table
    graph: Table  # what it keeps beside its input


def borrowed(shared: tuple[int, ...], owner: int, *, trains: bool) -> SharedUse:
    """The use of shared weights by all layers that have them but the one whose stage owns them."""
    return SharedUse(shared, tuple(layer for layer in shared if layer != owner), trains)


Effect = Callable[[Prices, Candidate, int, StageTable], StageTable]
EFFECTS: tuple[Effect, ...] = (  # on a stage's computing, in this order
    Prices.with_sharding,
    Prices.with_sequence,
    Prices.with_host,
    Prices.with_program,
    Prices.with_runtime,
)
