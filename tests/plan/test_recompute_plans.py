"""What plans say of recomputed layers and divided sequences, against the closed forms of Korthikanti et al. 2022."""

from functools import cache

import numpy as np
import pytest

from stretto.cost import find_cluster
from stretto.cost.collective import TENSOR_GATHER, TENSOR_SCATTER, TENSOR_SUM
from stretto.cost.communication import all_reduce, gathering
from stretto.cost.layer_sums import LayerTimes
from stretto.errors import UsageError
from stretto.mesh import Mesh
from stretto.plan import Candidate, Objective, Problem, candidates, search
from stretto.plan.bound import Bounds
from stretto.plan.branch_and_bound import plan_of
from stretto.plan.candidate_costs import Prices
from stretto.plan.problem import LayerForm
from stretto.plan.programs import hidden_exchanges, share_kept_busy
from stretto.plan.refine import refined
from stretto.settings.planning import PlanSettings
from stretto.settings.runs import TrainSettings
from stretto.study.model_costs import CostRequest, TensorFormat, costed

S, H, A, LAYERS = 256, 512, 8, 6
SIZES = {"depth": LAYERS, "width": H, "heads": A, "context": S, "vocabulary": 128}
T = 4


@cache
def model():
    asked = CostRequest(heads=(), sharing=(T,), selective=True, sequence=True, format=TensorFormat("bfloat16"))
    return costed(TrainSettings(model="decoder", model_options=SIZES, optimizer="adam"), asked)


def problem(**changes):
    found = model()
    cluster = find_cluster("8-nodes-of-8-h100")
    return Problem(costs=found.costs, cluster=cluster, workers=8, batch_sizes=(16,), optimizer="adam", masters=True,
                   tensor_costs=found.tensor_costs, form_costs=found.form_costs, tensors=(1, T), spaces=((1, 1),),
                   shards=("none",), **changes)  # fmt: skip


SCORES = 5 * A * S / H
BYTES = {  # of an example in a block, in s h: equations 1 to 6 and table 2
    LayerForm(): 34 + SCORES,
    LayerForm(recompute="selective"): 34,
    LayerForm(recompute="full"): 2,
    LayerForm(T): 10 + 24 / T + SCORES / T,
    LayerForm(T, recompute="selective"): 10 + 24 / T,
    LayerForm(T, recompute="full"): 2,
    LayerForm(T, sequence=True): (34 + SCORES) / T,
    LayerForm(T, sequence=True, recompute="selective"): 34 / T,
    LayerForm(T, sequence=True, recompute="full"): 2 / T,
}


@pytest.mark.parametrize("form", BYTES, ids=lambda form: f"{form.tensor}-{form.sequence}-{form.recompute}")
def test_a_block_keeps_what_the_paper_counts(form):
    """torch's norms keep a mean and a deviation of each token beside it: 4 numbers of 4 bytes."""
    row = Prices(problem()).layers(form)[LAYERS // 2]
    wanted = BYTES[form] * S * H
    statistics = 0 if form.recompute == "full" else 16 * S
    assert wanted <= (row.activation - row.shared).each <= wanted + statistics
    plain = Prices(problem()).layers(form._replace(recompute="none"))[LAYERS // 2]
    assert (row.activation + row.recomputed).each == plain.activation.each
    assert sum(work.flops.each for work in row.backward) >= sum(work.flops.each for work in plain.backward)


def test_processes_that_divide_the_sequence_exchange_as_many_bytes():
    """An all-reduce is a reduce-scatter and an all-gather; the backward gathers its inputs once more."""
    prices = Prices(problem())
    whole, parts = (prices.layers(LayerForm(T, sequence=each))[LAYERS // 2] for each in (False, True))

    def sent(works):
        return {work.operator: work.bytes.each for work in works if work.bytes.each}

    assert sent(whole.forward_exchanges) == {"tensor-sum": 4 * S * H}
    assert sent(parts.forward_exchanges) == {"tensor-gather": 4 * S * H, "tensor-scatter": 4 * S * H}
    assert sent(whole.backward_exchanges) == {"tensor-sum": 4 * S * H}
    assert sent(parts.backward_exchanges) == {"tensor-gather": 8 * S * H, "tensor-scatter": 4 * S * H}
    assert parts.input.each == whole.input.each / T


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_processes_that_divide_the_sequence_sum_gradients_of_whole_vectors_once_a_step(recompute):
    """As Megatron does: weight and bias of a block's two norms, the biases of its two rows, all of a stage together."""
    prices = Prices(problem())
    whole, parts = (prices.layers(LayerForm(T, sequence=each, recompute=recompute)) for each in (False, True))
    assert {row.summed_once for row in whole} == {0}
    assert {row.summed_once for row in parts[1:-1]} == {2 * 6 * H}
    c = Candidate(1, Mesh(data=2, tensor=T), 16, recompute=recompute)
    (one,), (other,) = (prices.stages_at(c._replace(sequence=each), (0, len(whole))) for each in (False, True))
    (links,) = prices.places_of(c).weights
    num_bytes = np.array(sum(row.summed_once for row in parts))
    assert float(other.all_reduce - one.all_reduce) == pytest.approx(
        float(all_reduce(links, T, num_bytes, 0.0)), rel=0.01
    )


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_plan_has_the_bytes_of_its_layers(recompute, sequence):
    """Of one micro-batch, and one layer's at a time that are made again; so much less than without."""

    def bytes_of(recompute, sequence):
        asked = problem(recompute=(recompute,), sequences=(sequence,), pipelines=(1,), data_parallels=(1,),
                        microbatches=(4,), methods=("1f1b",)).but(tensors=(T,))  # fmt: skip
        return max(search(asked).best.bytes)

    rows = {
        how: Prices(problem()).layers(LayerForm(T, sequence=sequence, recompute=how)) for how in ("none", recompute)
    }
    kept = {how: 4 * sum((row.activation - row.shared).each for row in layers) for how, layers in rows.items()}
    again = 4 * max(max(0.0, row.recomputed.each) for row in rows[recompute])
    saved = bytes_of("none", sequence) - bytes_of(recompute, sequence)
    ends = 4 * S * H * 2 + 4 * S * 4 * 128  # what a stage keeps of its ends, whatever its layers do
    assert saved == pytest.approx(kept["none"] - kept[recompute] - again, abs=ends)


def test_interleaving_keeps_more_micro_batches():
    """L layers' activations (1 + (p - 1) / (p m)), of the first worker of p with m stages (section 4.2.3)."""
    from stretto.methods import StageAt
    from stretto.plan.planned_methods import planned

    p, m = 8, 3
    held = planned("interleaved").planning.held
    first = sum(held(StageAt(stage, p * m, 64, per_worker=m)) for stage in range(0, p * m, p))
    assert first / (p * m) == pytest.approx(1 + (p - 1) / (p * m))


def test_plans_record_both_choices():
    from stretto.plan.objective import Objective
    from stretto.plan.plan_file import content, script, training_settings

    found = search(problem(recompute=("full",), sequences=(True,)).but(tensors=(T,)))
    plan = content(found.best, found.prices, Objective(), model="decoder", trained=None)["plan"]
    assert (plan["recompute"], plan["sequence_parallel"]) == ("full", True)
    assert training_settings(found.best, {})["recompute"] == "full"
    assert script(found.best, [0, 1]).endswith('recompute="full")')


def test_what_cannot_be_chosen():
    from stretto.cli.planning import recompute_of, sequences_of

    requested = TrainSettings(model="mlp", model_options={"depth": 2, "width": 4}, data="digits", optimizer="sgd")
    small = costed(requested, CostRequest(heads=(), selective=True))
    with pytest.raises(UsageError, match=r"recompute='selective' of mlp: no module of its layers is marked"):
        recompute_of(PlanSettings(recompute=("selective",)), small)
    with pytest.raises(UsageError, match=r"sequence_parallel='yes' of mlp: stretto train cannot divide sequences"):
        sequences_of(PlanSettings(sequence_parallel="yes"), small)
    with pytest.raises(UsageError, match="recompute='some'"):
        problem(recompute=("some",))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_backward_waits_for_what_megatron_does_not_hide(recompute):
    """Korthikanti et al. 2022: two sums of input gradients a block are hidden, of 2 b s h bytes; with divided sequences
    two scatters and two gathers, while two gathers are waited for. What runs again hides nothing.
    """
    whole = 2 * S * H
    row = Prices(problem()).layers(LayerForm(T, recompute=recompute))[LAYERS // 2]
    hidden = hidden_exchanges(row, full=recompute == "full")
    assert [(work.operator, work.calls, work.bytes.each) for work in hidden.weights] == [(TENSOR_SUM, 2, 2 * whole)]
    assert not hidden.inputs
    row = Prices(problem()).layers(LayerForm(T, sequence=True, recompute=recompute))[LAYERS // 2]
    hidden = hidden_exchanges(row, full=recompute == "full")
    assert [(work.operator, work.calls, work.bytes.each) for work in hidden.weights] == [(TENSOR_SCATTER, 2, 2 * whole)]
    assert [(work.operator, work.calls, work.bytes.each) for work in hidden.inputs] == [(TENSOR_GATHER, 2, 2 * whole)]


def test_hidden_exchanges_take_no_longer_than_products_and_only_their_share():
    prices, trained = Prices(problem()), Prices(problem(trained=True))
    mesh, form = Mesh(tensor=T), LayerForm(T)
    waited, hiding, training = (
        some.intra_stage(mesh, 1, (), 0, form, 8.0, hides)
        for some, hides in ((prices, False), (prices, True), (trained, trained.hides_exchanges))
    )
    assert np.array_equal(training[1], waited[1]), "what trains here waits for all"
    assert np.array_equal(hiding[0], waited[0])
    place, kind = prices.places(mesh, 1, ()), prices.places(mesh, 1, ()).machines[0][0]
    rows = LayerTimes(*prices.layer_rows(kind, form, 8.0).T)
    saved = waited[1] - hiding[1]
    most = np.maximum(0, rows.backward - rows.input_gradient) * (1 - share_kept_busy(place.weights[0]))
    assert (saved[1:-1] > 0).all()
    assert (saved <= most + 1e-15).all()
    assert (hiding[1] >= 0).all()


@pytest.mark.parametrize("sequence", [False, True])
def test_processes_that_share_a_stage_send_parts_of_its_messages_and_gather_them(sequence):
    """Pipeline 2 x tensor 4, in one node: what stages wait for beside whole messages, by hand; bounds stay below."""
    asked = problem(pipelines=(2,), data_parallels=(1,), microbatches=(8,), methods=("1f1b",), recompute=("none",),
                    sequences=(sequence,), all_workers=True)  # fmt: skip
    prices, aim = Prices(asked.but(tensors=(T,))), Objective()
    (c,) = candidates(prices.problem)
    plan = plan_of(c, aim, prices)
    below, above = prices.stages_at(c, plan.bounds)
    link = prices.places_of(c).ahead[0]
    whole = 2 * S * H * c.examples
    latency, per_byte = link.transit
    assert float(below.transit) == pytest.approx(latency + whole / T * per_byte)
    gather = 0.0 if sequence else float(gathering(prices.places_of(c).weights[0], T, np.array(whole)))
    inside = [prices.intra_stage(c.mesh, 2, (), w, c.form, c.examples, True) for w in range(2)]
    cut = plan.bounds[1]
    below, above = (stage.passes["inside stages"] for stage in (below, above))
    assert float(below.forward) == pytest.approx(inside[0][0][:cut].sum())
    assert float(below.backward) == pytest.approx(inside[0][1][:cut].sum() + gather)
    assert float(above.forward) == pytest.approx(inside[1][0][cut:].sum() + gather)
    assert float(above.backward) == pytest.approx(inside[1][1][cut:].sum())
    bounds = Bounds(prices)
    assert bounds.seconds(c) <= plan.formula
    assert bounds.tighter(c) <= plan.formula
    simulated = refined([plan], prices)[0].seconds
    assert 0.97 * plan.formula <= simulated <= plan.formula
