"""The planner's best against everything there is, exactly: all numbers are such that floats hold them."""

import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise, product

import pytest
from brute_force import as_run, best, best_placed, fullest_that_fits, joules, least_cost, money, rows_out, step

from pairwise import slow_where
from stretto.cost import Cluster, Device, Group, LayerCost, Link, ModelCosts, Rate, Work
from stretto.cost.layer_table import Affine, ImageWindow, TiedLayers
from stretto.parallel.space.geometry import SlidingWindow
from stretto.plan import Objective, Problem, candidates, search, search_space
from stretto.plan.bound import Bounds
from stretto.plan.branch_and_bound import Values, alone, plan_of
from stretto.plan.candidate_costs import Prices

EIGHTH = Fraction(1, 8)
CUT = ((2, 1), (1, 2), (2, 2), (1, 4))


def draw(seed, workers=None, layers=0):
    """A small problem as plain numbers; `layers` are at least so many."""
    dice = random.Random(seed)
    workers = workers or dice.choice([1, 2, 2, 4, 4, 4, 4, 8])
    per_node = dice.choice([1, 2, 4])
    many = max(1, -(-workers // per_node))

    def layer(weights):
        return {
            "f": dice.randint(1, 9), "b": dice.randint(1, 20), "i": dice.randint(1, 9),
            "w": dice.randint(1, 9) if weights else 0, "weights": weights, "kept": dice.randint(0, 64),
        }  # fmt: skip

    batch = 4 if workers > 2 else 8
    sizes = [8 * dice.randint(1, 16) for _ in range(dice.randint(3, 4 if workers > 2 else 5) + 1)]
    sizes += [8] * (layers + 1 - len(sizes))
    layers = [
        layer(dice.choice([0, 64, 256, 1024])) | {"in": sizes[k], "out": sizes[k + 1]} for k in range(len(sizes) - 1)
    ]
    found = {
        "workers": workers, "per_node": per_node, "batch": batch, "layers": layers,
        "heads": [layer(32) for _ in layers], "paces": [dice.choice([1, 1, 2]) for _ in range(many)],
        "near": (dice.choice([0, 1, 4]), EIGHTH), "far": (dice.choice([2, 8]), Fraction(1, dice.choice([1, 4]))),
        "gamma": Fraction(1, 16), "bandwidth": 256, "step": Fraction(1, 64),
        "memory": dice.choice([1 << 20, 1 << 13, 1 << 12, 3 << 10]),
    }  # fmt: skip
    summed = random.Random(-9 - seed)
    for x in layers:
        x["vectors"] = summed.choice([0, 16, 128])  # whose gradients are summed where a sequence is divided
    formed = random.Random(-1 - seed)
    if formed.random() < 0.3:  # layers of which parts may be recomputed
        found["selective"] = [
            x | {"b": x["b"] + 4, "i": x["i"] + 4, "kept": x["kept"] // 2, "again": x["kept"] - x["kept"] // 2}
            for x in layers
        ]
    found["sequence"] = formed.random() < 0.3
    some = dice.random() < 0.6  # a cluster whose runtime takes time of its own

    def cost(*values):
        return Fraction(dice.choice(values) if some else 0)

    return found | {
        "per_action": cost(0, 1, 5), "per_step": cost(0, 2, 16), "start": cost(0, 1), "once": cost(0, 2),
        "send": (cost(0, EIGHTH, 1), cost(0, EIGHTH / 8)), "receive": (cost(0, EIGHTH, 1), cost(0, EIGHTH / 4)),
    }  # fmt: skip


def images(n, seed):
    """The same with images in its lower layers, whose windows make them smaller."""
    dice = random.Random(seed)
    side, layers = dice.choice([8, 9, 11, 16]), [dict(x) for x in n["layers"]]
    for x in layers[: dice.randint(1, len(layers))]:
        kernel, stride, dilation = dice.choice([1, 2, 3, 5]), dice.choice([1, 1, 2]), dice.choice([1, 1, 2])
        window = (kernel, stride, dilation, dice.randint(0, kernel // 2))
        x |= {"side": side, "window": None if dice.random() < 0.3 else window, "in": side**2 * dice.choice([1, 2, 4])}
        side = rows_out(x) if x["window"] else side
        if side < 1:
            x["window"] = None
            side = x["side"]
    for below, above in pairwise(layers):
        below["out"] = above["in"]
    changed = ("in", "out", "side", "window")
    again = [
        x | {key: y[key] for key in changed if key in y} for x, y in zip(n.get("selective", ()), layers, strict=False)
    ]
    return n | {"layers": layers} | ({"selective": again} if again else {})


def window_of(x):
    """A layer's window as the planner takes it."""
    kernel, stride, dilation, padding = x["window"]
    slid = SlidingWindow(kernel, stride, dilation, padding, padding)
    side = x["side"]
    return ImageWindow((side, side), (slid, slid), "refused", True, Affine(0, float(x["in"]) / side**2))


def row(name, x):
    """A layer as the planner takes it: its FLOPs are its time at pace 1."""

    def work(value):
        return (Work("linear", 1, Affine(0, float(value)), Affine()),) if value else ()

    return LayerCost(
        name=name, type="Linear", forward=work(x["f"]), backward=work(x["b"]), input_gradient=work(x["i"]),
        weight_gradient=work(x["w"]), differentiated=True, parameters=int(x["weights"]), parameter_tensors=1,
        parameter_bytes=float(x["weights"]), gradient_bytes=float(x["weights"]),
        activation=Affine(0, float(x["kept"])), shared=Affine(),
        input=Affine(0, float(x.get("in", 1))), output=Affine(0, float(x.get("out", 1))), loose_input=Affine(),
        loose_output=Affine(), recomputed=Affine(0, float(x.get("again", 0))),
        image_windows=(window_of(x),) if x.get("window") else (), summed_once=float(x.get("sums", 0)),
    )  # fmt: skip


def problem(n, methods=("all",)):
    """The same for the planner."""

    def device(pace):
        rate = Rate(per_flop=float(pace))
        price, watts, idle = n["devices"][pace] if "devices" in n else (None, None, None)
        return Device(
            price_per_hour=price, watts=watts, idle_watts=idle,
            memory=n["memory"], memory_bandwidth=n["bandwidth"], reduction_bandwidth=float(1 / n["gamma"]),
            peak={"float32": 1.0}, per_action=float(n["per_action"]), per_step=float(n["per_step"]),
            rates={"linear": {"forward": rate, "backward": rate}, "sgd": {"update": Rate(per_byte=pace / 64)}},
        )  # fmt: skip

    links = {name: link(n, *n[name]) for name in ("near", "far")}
    groups = tuple(
        Group(nodes=1, workers=n["per_node"], device=f"pace{pace}", within="near", between="far", speeds=speeds_of(n))
        for pace in n["paces"]
    )
    cluster = Cluster(
        name="c", groups=groups, devices={f"pace{p}": device(p) for p in n["paces"]}, links=links, between="far"
    )
    return Problem(
        costs=ModelCosts(
            tuple(row(str(k), x) for k, x in enumerate(n["layers"])), "float32", float(n["start"]), float(n["once"]),
            **tied_layers(n),
        ), cluster=cluster,
        workers=n["workers"], batch_sizes=(n["batch"],), methods=methods, places_workers=n.get("placed", False),
        heads=tuple(row(f"head{k}", x) for k, x in enumerate(n["heads"])), optimizer="sgd",
        form_costs=form_costs(n),
        sides=tuple(x.get("side", 0) for x in n["layers"]) if any("side" in x for x in n["layers"]) else None,
        **limits_of(n),
    )  # fmt: skip


def tied_layers(n):
    """The first and the last layer share weights, where that is so, and the last one's costs if it reads them."""
    if "tied" not in n:
        return {}
    last, size = len(n["layers"]) - 1, n["tied"]["bytes"]
    read = row(str(last), n["layers"][last] | n["tied"]["read"])
    stepped = replace(read, gradient_bytes=read.gradient_bytes - size, parameter_tensors=0)
    return {"ties": (TiedLayers((0, last), float(size)),), "read_rows": ((last, stepped),)}


def form_costs(n):
    """The costs of layers that are recomputed in part, and on parts of the sequence, as the planner has them."""
    found = {}
    for tensor, sequence, again in product((1, 2, 4), (False, True), ("none", "selective")):
        if (
            (again == "selective" and "selective" not in n)
            or sequence != (tensor > 1)
            or (sequence and not n["sequence"])
        ):
            continue
        rows = tuple(row(str(k), x) for k, x in enumerate(as_run(n, tensor, again, sequence)))
        found[tensor, sequence, again] = ModelCosts(rows, "float32", float(n["start"]), float(n["once"]))
    return found


def speeds_of(n):
    """The speeds of a node's workers; none where all are as fast."""
    return tuple(1 / slow for slow in n["slow"]) if "slow" in n else None


def limits_of(n):
    """The limits of a problem as the planner takes them."""
    names = {"data": "data_parallels"}
    given = {names.get(key, key): tuple(values) for key, values in n.get("limits", {}).items()}
    if "shards" in given:
        given["shards"] = tuple(SHARD_NAMES[shard] for shard in given["shards"])
    return given


def link(n, latency, beta):
    """Both ends of a message are part of what it takes."""
    (send, each), (receive, every) = n["send"], n["receive"]
    return Link(
        latency=latency, bandwidth=float(1 / beta), send=float(send), send_per_byte=float(each),
        receive=float(receive), receive_per_byte=float(every),
    )  # fmt: skip


SHARD_NAMES = {
    "none": "none", "state": "shard-optimizer", "keep": "fully-shard", "reshard": "fully-shard(reshard=True)",
}  # fmt: skip


def shard_name(name):
    return next(key for key, value in SHARD_NAMES.items() if value == name)


@pytest.fixture(autouse=True)
def _an_optimizer_without_state(monkeypatch):
    from stretto import optimizers

    monkeypatch.setitem(optimizers.OPTIMIZERS, "sgd", optimizers.OPTIMIZERS["sgd"]._replace(states=0))


def seeds(quick, every):
    """Seeds of random problems, of which those in `quick` are quick: small ones that differ in what counts."""
    return slow_where(lambda seed: seed not in quick, range(every))


@pytest.mark.parametrize("seed", seeds((1, 2, 4, 6, 10), 64))
def test_the_best_of_all(seed):
    compare(draw(seed))


@pytest.mark.parametrize("seed", seeds((0, 2, 3), 8))
@pytest.mark.parametrize("method", ["zb-h2", "zb-v", "dualpipe-v", "looped-bfs", "chunked", "overlapping(delay=0)"])
def test_the_best_of_one_method(method, seed):
    compare(draw(1000 + seed, workers=3 if method == "chunked" else 2, layers=5), (method,))


@pytest.mark.parametrize("seed", seeds((0, 1), 8))
@pytest.mark.parametrize(
    "method", ["greedy", "chunked", "overlapping", "overlapping(delay=0)", "gpipe", "zb-v", "pipedream"]
)
def test_the_best_of_a_method_where_the_first_and_the_last_layer_share_weights(method, seed, monkeypatch):
    from stretto import optimizers

    monkeypatch.setitem(optimizers.OPTIMIZERS, "sgd", optimizers.OPTIMIZERS["sgd"]._replace(states=seed % 3))
    n = draw(9000 + seed, workers=3 if method == "chunked" else (2, 4, 3)[seed % 3], layers=4)
    dice, more = random.Random(seed), (0, 64)[seed % 2]  # what the last layer has beside the shared weights
    n["layers"][0] |= {"weights": 256, "w": 5}
    x = n["layers"][-1]
    x |= {"weights": 256 + more, "w": 7}
    read = {"b": x["i"] + 1, "w": 3 if more else 0, "kept": x["kept"] // 2}
    plain = {key: value for key, value in n.items() if key != "selective"} | {"sequence": False, "states": seed % 3}
    tied = plain | {"tied": {"bytes": 256, "read": read}, "memory": dice.choice([1 << 20, 3 << 10])}
    compare(tied, (method,), empty=True)


@pytest.mark.parametrize("seed", seeds((0, 2, 5, 6, 8, 10), 24))
def test_the_best_with_images_that_may_be_cut(seed):
    """Mostly only plans that cut them count, since they are rarely the best of all."""
    n = images(draw(2000 + seed, workers=(4, 4, 2)[seed % 3]), seed)
    compare(n if seed % 4 == 3 else n | {"limits": {"spaces": sorted({CUT[seed % 4], CUT[seed // 4 % 4]})}}, empty=True)


@pytest.mark.parametrize("seed", seeds((0, 1, 3, 4, 5, 6, 7), 12))
def test_the_best_with_weights_and_images_cut_at_once(seed):
    n = images(draw(4000 + seed, workers=(4, 4, 8)[seed % 3]), seed)
    compare(n | {"limits": {"tensors": [2], "spaces": [CUT[seed % 2]]}}, empty=True)


@pytest.mark.parametrize("seed", seeds((0, 2, 4, 11), 24))
def test_the_best_with_an_optimizer_that_has_state(seed, monkeypatch):
    """Of two numbers for each weight, which replicas may share out."""
    from stretto import optimizers

    monkeypatch.setitem(optimizers.OPTIMIZERS, "sgd", optimizers.OPTIMIZERS["sgd"]._replace(states=2))
    n = draw(7000 + seed, workers=(2, 4)[seed % 2]) | {"states": 2, "memory": (6, 4, 3)[seed % 3] << 10}
    compare(n | {"limits": {"data": [2, 4]}}, empty=True)


def limited(n, seed):
    """The same under some limits, which may leave nothing."""
    dice = random.Random(seed)
    lists = {
        "pipelines": (1, 2, 3, 4), "data": (1, 2, 4), "tensors": (1, 2, 3, 4), "stages": (1, 2, 4),
        "spaces": ((1, 1), (2, 1), (1, 2), (1, 4)), "shards": ("none", "state", "keep", "reshard"),
        "microbatches": (1, 2, 4),
    }  # fmt: skip
    chosen = dice.sample(sorted(lists), dice.choice([1, 1, 2, 3]))
    return n | {"limits": {key: dice.sample(lists[key], dice.randint(1, len(lists[key]))) for key in chosen}}


@pytest.mark.parametrize("seed", seeds((0, 1, 3, 4, 5), 28))
def test_the_best_within_limits(seed):
    n = draw(3000 + seed, workers=(2, 3, 4, 4)[seed % 4])
    compare(limited(images(n, seed) if seed % 3 else n, seed), empty=True)


def unequal(seed):
    """A problem whose workers differ: nodes of other paces, or workers of one node, and perhaps more than are used."""
    n = draw(4000 + seed, workers=(2, 2, 3, 4)[seed % 4])
    dice = random.Random(seed)
    n |= {"per_node": dice.choice([1, 2]), "placed": True, "batch": (8, 8, 6, 4)[seed % 4]}
    if n["per_node"] == 2 and dice.random() < 0.7:  # the other figures of a slow worker are slower, too
        n |= {"slow": [1, 2], "per_action": 0, "per_step": 0, "start": 0, "once": 0}
    n["paces"] = [dice.choice([1, 2, 4]) for _ in range(-(-n["workers"] // n["per_node"]) + (seed % 3 == 0))]
    if "slow" not in n and len({*n["paces"]}) == 1:
        n["paces"] = [2 * n["paces"][0], *n["paces"]]
    return n


@pytest.mark.parametrize("seed", seeds((8, 13), 16))
def test_the_best_on_unequal_workers(seed):
    """Every cut on all workers that there are, in every order."""
    n = unequal(seed)
    methods = ("1f1b", "gpipe", "backprop", "pb", random.Random(seed).choice(["zb-h1", "interleaved", "looped-bfs"]))
    found, least = search(problem(n, methods)), best_placed(n, methods)
    if least is None:
        assert found.best is None
        return
    assert found.best is not None
    assert Fraction(found.best.formula) == least
    order = found.best.candidate.placement or range(found.best.candidate.workers)
    assert step(n | {"order": order}, way_of(found.best.candidate), found.best.bounds) == least


def with_devices(n, seed):
    """The same on devices with prices and powers; some wait at the power at which they work."""
    dice = random.Random(seed)
    watts = {pace: dice.choice([64, 128, 256]) for pace in (1, 2, 4, 8)}
    idle = {pace: dice.choice([0, watts[pace] // 8, watts[pace] // 2, watts[pace]]) for pace in watts}
    return n | {"devices": {pace: (dice.choice([1, 2, 8]), watts[pace], idle[pace]) for pace in watts}}


STEADY = ("backprop", "gpipe", "1f1b", "zb-h1", "zb-v", "interleaved", "looped-bfs", "pipedream-2bw", "pb", "greedy")


CHEAPEST = [
    pytest.param(goal, seed, marks=[pytest.mark.slow] * ((goal, seed) not in (("money", 3), ("energy", 8))))
    for goal in ("money", "energy")
    for seed in range(12)
]


@pytest.mark.parametrize(("goal", "seed"), CHEAPEST)
def test_the_cheapest_of_all(goal, seed):
    """Every cut on every number of workers, of which one is often the best; a third of them are unequal."""
    n = with_devices(unequal(4 * (seed // 4) + 2) if seed % 3 == 2 else draw(5000 + seed), seed)
    methods = STEADY if seed % 3 < 2 else ("backprop", "1f1b", "pb", "zb-h1")
    found, cost = search(problem(n, methods), Objective(goal=goal)), {"money": money, "energy": joules}[goal]
    least = least_cost(n, methods, cost)
    if least is None:
        assert found.best is None
        return
    plan, c = found.best, found.best.candidate
    assert plan.value * c.batch == pytest.approx(float(least), rel=1e-12)
    n |= {"order": c.placement or range(c.workers)}
    assert plan.joules == pytest.approx(float(joules(n, way_of(c), plan.bounds)), rel=1e-12)
    assert plan.money == pytest.approx(float(money(n, way_of(c), plan.bounds)), rel=1e-12)
    assert plan.formula == pytest.approx(float(step(n, way_of(c), plan.bounds)), rel=1e-12)


@pytest.mark.parametrize("seed", seeds((2,), 6))
def test_no_cut_takes_less_time_or_energy_than_its_bounds(seed):
    """Of every method, those whose stages wait in every turn included."""
    n = with_devices(images(draw(6000 + seed, workers=(2, 4)[seed % 2], layers=3), seed), seed)
    prices, aim = Prices(problem(n)), Objective(goal="energy")
    bounds, layers = Bounds(prices), len(n["layers"])
    values = Values(aim, prices, bounds)
    for c in candidates(prices.problem):
        cuts = [(0, *inner, layers) for inner in combinations(range(1, layers), c.stages - 1)]
        used = [value for cut in cuts if (value := joules(n, way_of(c), cut)) is not None]
        taken = [value for cut in cuts if (value := step(n, way_of(c), cut)) is not None]
        for seconds in (bounds.seconds(c), bounds.tighter(c)) if used else ():
            assert seconds <= min(taken)
            assert values.of_seconds(c, seconds) * c.batch <= float(min(used))
        for communicating in (False, True) if used else ():
            assert values.of_group(alone(c), communicating=communicating) * c.batch <= float(min(used))


@pytest.mark.parametrize("seed", seeds((0, 1), 12))
def test_bounds_stay_below_where_a_split_w_is_what_a_backward_has_beside_its_i(seed):
    n = draw(9000 + seed, workers=2, layers=6)
    prices = Prices(problem(n).but(weight_products=True))
    bounds, compared = Bounds(prices), 0
    for c in candidates(prices.problem):
        plan = plan_of(c, Objective(), prices)
        if plan is not None:
            compared += 1
            assert bounds.seconds(c) <= plan.formula, c
            assert bounds.tighter(c) <= plan.formula, c
    assert compared


@pytest.mark.parametrize("seed", seeds((2,), 8))
def test_the_least_memory_of_all(seed):
    """Of every method and cut; and no bound on the way to it is above what a candidate needs."""
    n = draw(8000 + seed, workers=(2, 4)[seed % 2], layers=(3, 4)[seed // 4])
    found, least = search(problem(n), Objective(goal="memory")), least_cost(n, STEADY, fullest_that_fits)
    prices, layers = Prices(problem(n)), len(n["layers"])
    values = Values(Objective(goal="memory"), prices, Bounds(prices))
    all_of = []
    for c in candidates(prices.problem):
        cuts = [(0, *inner, layers) for inner in combinations(range(1, layers), c.stages - 1)]
        used = [value for cut in cuts if (value := fullest_that_fits(n, way_of(c), cut)) is not None]
        all_of += used
        for bound in (values.of_group(alone(c)), values.of_alternatives(alone(c)), values.of_candidate(c)):
            assert not used or bound <= min(used)
    assert (found.best is None) == (not all_of) == (not all_of or least is None)
    assert not all_of or max(found.best.bytes) == min(all_of) <= least


@pytest.mark.parametrize(
    ("some", "least"), [(range(8), 100), pytest.param(range(8, 40), 300, marks=pytest.mark.slow)], ids=["few", "others"]
)
def test_what_is_left_out_for_its_memory_has_no_cut_that_fits(some, least):
    """Kinds of recomputation, and candidates: some are left out in most problems, and never one that fits."""
    left_out = 0
    for seed in some:
        n = draw(7000 + seed, workers=(2, 4)[seed % 2], layers=3)
        prices, layers = Prices(problem(n)), len(n["layers"])
        bounds = Bounds(prices)
        kept = {
            c
            for group in search_space.all_groups(prices.problem)
            for fitting in bounds.memory.that_fit(group)
            for each in fitting.alternatives()
            for alternatives in bounds.memory.that_fit(each, placed=True)
            for c in alternatives.each()
        }
        for c in set(candidates(prices.problem)) - kept:
            cuts = [(0, *inner, layers) for inner in combinations(range(1, layers), c.stages - 1)]
            assert all(step(n, way_of(c), cut) is None for cut in cuts)
            left_out += 1
    assert left_out > least


def compare(n, methods=None, *, empty=False):
    found = search(problem(n, methods or ("all",)))
    looked, least = best(n, methods) if methods else best(n)
    assert found.candidates == looked
    assert looked or empty
    if least is None:
        assert found.best is None
        return
    assert found.best is not None
    assert Fraction(found.best.formula) == least
    assert step(n, way_of(found.best.candidate), found.best.bounds) == least
    assert max(found.best.bytes) <= n["memory"]


def way_of(c):
    """A candidate as brute force names it."""
    return (
        c.pipeline, c.mesh.data, c.mesh.tensor, c.method, c.microbatches, c.recompute, shard_name(c.shard), c.losses,
        c.mesh.space, c.sequence,
    )  # fmt: skip
