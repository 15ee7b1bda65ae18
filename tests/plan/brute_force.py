"""Every candidate and every way to cut, priced on plain fractions: shares no code with the planner.

A problem is a dict of numbers. Layer: flops and bytes kept are per example; times are flops x the device's pace. A
layer of images has a side, and perhaps a window (kernel, stride, dilation, padding). Limits list what may be chosen.
"""

import itertools
import math
from fractions import Fraction as Q

SYNC = ("backprop", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "interleaved", "looped-bfs")
CLOCKED = ("pb", "pb-sc", "pb-lwp", "pb-lwpw", "pb-lwp-sc", "pipemare")
STEADY = ("pipedream", "spectrain", "pipeoptim")
ASYNC = (*STEADY, "pipedream-2bw", "paci", *CLOCKED)
PIPED = "chunked(inside=1f1b)"
CHUNKED = ("chunked", PIPED)
LOCAL = ("greedy", "chunked", PIPED, "overlapping", "overlapping(delay=0)")
HOPS = ("overlapping", "overlapping(delay=0)")
VEES = ("zb-v", "dualpipe-v")  # stages go up the workers and come back
TWICE = ("interleaved", "looped-bfs", *VEES)  # two stages a worker
LIVE = ("paci", "spectrain", "pipeoptim", *CLOCKED)  # backwards see other weights than forwards
CUT = ("gpipe", "1f1b", "zb-h1", "zb-h2", *VEES, "interleaved", "looped-bfs", "pipedream-2bw", "paci", PIPED)


SPACES = ((1, 1), (2, 1), (4, 1), (2, 2))


def ways(n, methods=SYNC + ASYNC + LOCAL):
    """(pipeline, data, tensor, method, microbatches, recompute, shard, chunks, space, sequence) of all allowed ways."""
    limits = n.get("limits", {})
    for workers in (w for w in range(1, n["workers"] + 1) if n["workers"] % w == 0):
        for pipeline, data, (tensor, space) in itertools.product(
            range(1, workers + 1), range(1, workers + 1), inner(n, workers)
        ):
            if pipeline * data * tensor * space[0] * space[1] != workers or n["batch"] % data:
                continue
            if pipeline not in limits.get("pipelines", [pipeline]) or data not in limits.get("data", [data]):
                continue
            for method in methods:
                if (pipeline == 1 and method not in ("backprop", "1f1b")) or (pipeline > 1 and method == "backprop"):
                    continue
                stages = pipeline * (2 if method in TWICE else 1)
                if stages > len(n["layers"]) or stages not in limits.get("stages", [stages]):
                    continue
                for m in range(1, n["batch"] // data + 1):
                    if not cuts_into(n, method, pipeline, data, m):
                        continue
                    for again, sequence in itertools.product(("none", "selective", "full", "stage"), (False, True)):
                        if again == "stage" and (method not in SYNC or held(method, 0, stages, m) <= 1):
                            continue
                        if again == "full" and method in LIVE:
                            continue
                        if (again == "selective" and "selective" not in n) or (sequence and not divided(n, tensor)):
                            continue
                        can_shard = method in SYNC and data > 1 and space == (1, 1)
                        for shard in limits.get("shards", ("none", "state", "keep", "reshard")):
                            if shard != "none" and not can_shard:
                                continue
                            if shard in ("keep", "reshard") and "tied" in n and stages > 1:
                                continue
                            for chunks in range(2, stages) if method in CHUNKED else (1,):
                                yield pipeline, data, tensor, method, m, again, shard, chunks, space, sequence


def divided(n, tensor):
    """Whether so many processes may divide the sequence."""
    return tensor > 1 and n.get("sequence", False)


def as_run(n, T, again, sequence, some=slice(None)):
    """The layers as they run, to each process: with parts of them recomputed, whole, or on parts of the sequence."""
    layers = n["selective"] if again == "selective" else n["layers"]
    for x in layers[some]:
        x = x | {"again": x.get("again", 0)}
        if sequence:
            x |= {"sums": x.get("vectors", 0)}
            x |= {key: Q(x[key]) / T for key in ("f", "b", "i", "w", "kept", "again", "in", "out", "weights")}
        if again == "full":
            x |= {key: x[key] and x[key] + x["f"] for key in ("b", "i", "w")}
        yield x


def cuts_into(n, method, pipeline, data, m):
    """Whether a replica's share may be cut into m micro-batches."""
    if method not in CUT:
        return m == 1
    if n["batch"] // data % m or (pipeline == 1 and m == 1) or m not in n.get("limits", {}).get("microbatches", [m]):
        return False
    if method in ("pipedream-2bw", "looped-bfs"):
        return m >= pipeline
    if method in ("zb-v", "zb-h2"):
        return m >= 2 * pipeline - 1
    if method == "dualpipe-v":
        return m >= 2 * pipeline
    return method != "interleaved" or m <= pipeline or m % (m // pipeline) == 0


def inner(n, workers):
    """(tensor, space), which may both be longer than 1."""
    limits = n.get("limits", {})
    usual = [t for t in (1, 2, 4) if t <= n["per_node"]]
    for tensor in limits.get("tensors", usual):
        for space in limits.get("spaces", SPACES):
            if space == (1, 1) or cuttable(n, space):
                yield tensor, space


def cuttable(n, space):
    """Whether there are images, and every process has a row of each that a window takes or gives."""
    images = [x for x in n["layers"] if x.get("side")]
    sizes = [size for x in images if x["window"] for size in (x["side"], rows_out(x))]
    return bool(images) and all(size >= parts for size in sizes for parts in space)


def rows_out(x):
    """The output rows of a layer's window."""
    kernel, stride, dilation, padding = x["window"]
    return (x["side"] + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def slabs(size, parts):
    """The rows of each process: the first ones have one more where it is uneven."""
    lengths = [size // parts + (at < size % parts) for at in range(parts)]
    return [range(sum(lengths[:at]), sum(lengths[: at + 1])) for at in range(parts)]


def seen(x, out):
    """All input rows from the first to the last that output rows see."""
    kernel, stride, dilation, padding = x["window"]
    rows = [o * stride - padding + dilation * j for o in out for j in range(kernel)]
    return [row for row in range(min(rows), max(rows) + 1) if 0 <= row < x["side"]]


def halo_messages(x, space):
    """For each process, the pixels that it sends to each other one, walked through one by one."""
    own = list(itertools.product(*(slabs(x["side"], parts) for parts in space)))
    wants = [
        {(row, column) for row in (seen(x, up) if space[0] > 1 else range(x["side"]))
         for column in (seen(x, over) if space[1] > 1 else range(x["side"]))}
        for up, over in itertools.product(*(slabs(rows_out(x), parts) for parts in space))
    ]  # fmt: skip
    return [
        [len(set(itertools.product(*own[p])) & wants[q]) for q in range(len(own)) if q != p] for p in range(len(own))
    ]


def halos(n, x, space, groups, b):
    """Seconds of a layer's rows on their way up, and of their gradients on the way back."""
    if space == (1, 1) or not x.get("side") or not x["window"]:
        return Q(0), Q(0)
    sends = halo_messages(x, space)
    back = [[sends[q][p if p < q else p - 1] for q in range(len(sends)) if q != p] for p in range(len(sends))]
    crossing = any(a // n["per_node"] != c // n["per_node"] for group in groups for a in group for c in group)
    latency, beta = n["far" if crossing else "near"]
    pixel = Q(x["in"], x["side"] ** 2) * b
    up, down = (
        max(sum(latency + beta * pixel * count for count in process if count) for process in way)
        for way in (sends, back)
    )
    return up, down


def held(method, s, S, M, K=1):
    if method == PIPED:
        return min(M, min(e for e in ends(S, K) if e > s) - s)
    if method in ("backprop", "greedy", "chunked", "overlapping(delay=0)"):
        return 1
    if method in ("gpipe", "looped-bfs"):
        return M
    if method == "zb-v":
        return min(M, S // 2)
    if method == "1f1b":
        return min(M, S - s)
    if method == "zb-h1":
        return min(M, S)
    if method == "zb-h2":
        return min(M, 2 * S - 1)
    if method == "dualpipe-v":
        return Q(S + 1, 2)
    if method == "interleaved":
        W = S // 2
        return min(Q(M), Q(W + 2 * (W - 1 - s % W) + 1, 2))
    if method in (*STEADY, "pipedream-2bw", "paci"):
        return S - s
    if method == "overlapping":
        return 2 if S > 1 else 1
    return 2 * (S - 1 - s) + 1


def versions(method, s, S):
    if method == "pipedream":
        return S - s
    return 2 if method in ("pipedream-2bw", "overlapping") and S > 1 else 1


def at(n, process):
    """The worker that a process is on."""
    return n["order"][process] if "order" in n else process


def weight_copies(method, s, S):
    """Copies of a stage's weights that predictions and corrections keep: of the weights seen, and of former ones."""
    delayed = s < S - 1
    if method == "spectrain":  # both passes look ahead
        return (s // 2 + S - 1 - s > 0) + (s // 2 > 0)
    if method == "pipemare":  # its backward looks back, along an average of changes
        return 2 * delayed
    return delayed * {"pb-lwp": 1, "pb-lwpw": 2, "pb-lwp-sc": 2, "pipeoptim": 1}.get(method, 0)


def pace_of(n, worker):
    """How slow a worker is: its node's pace, times its own."""
    return n["paces"][worker // n["per_node"]] * slow_of(n, worker)


def slow_of(n, worker):
    """How many times as long a worker takes for everything, as others of its node."""
    return n["slow"][worker % n["per_node"]] if "slow" in n else 1


def orders(n, processes):
    """Every way to put processes on workers, but once where paces and who is with whom on a node are the same."""
    seen = set()
    for order in itertools.permutations(range(n["per_node"] * len(n["paces"])), processes):
        nodes = list(dict.fromkeys(worker // n["per_node"] for worker in order))
        key = tuple((pace_of(n, worker), nodes.index(worker // n["per_node"])) for worker in order)
        if key not in seen:
            seen.add(key)
            yield order


def best_placed(n, methods):
    """The least seconds on any workers, in any order."""
    found = []
    for way in ways(n, methods):
        S = way[0] * (2 if way[3] in TWICE else 1)
        cuts = [(0, *inner, len(n["layers"])) for inner in itertools.combinations(range(1, len(n["layers"])), S - 1)]
        for order in orders(n, way[0] * way[1] * way[2] * way[8][0] * way[8][1]):
            found += [step(n | {"order": order}, way, cut) for cut in cuts]
    return min((seconds for seconds in found if seconds is not None), default=None)


def link(n, a, b):
    """Latency and seconds a byte between two workers."""
    return n["near"] if a // n["per_node"] == b // n["per_node"] else n["far"]


def ring(n, workers, size, adds=True, halves=2):
    """The slowest link of a ring decides."""
    P = len(workers)
    if P == 1 or not size:
        return Q(0)
    pairs = {link(n, a, b) for a in workers for b in workers if a != b}
    return over(n, pairs, P, size, adds, halves)


def over(n, pairs, P, size, adds=True, halves=2):
    """A ring of P over these links."""
    half = max((P - 1) * (latency + Q(size) / P * beta) for latency, beta in pairs)
    return halves * half + (Q(P - 1, P) * size * n["gamma"] if adds else 0)


def ends(S, K):
    """The last stages of K chunks; the first ones hold one stage more where it is uneven."""
    return set(itertools.accumulate(S // K + (k < S % K) for k in range(K)))


def has_head(method, s, S, K):
    """Whether a stage but the last has a head of its own."""
    if s == S - 1:
        return False
    if method in CHUNKED:
        return s + 1 in ends(S, K)
    return method == "greedy" or (method in ("overlapping", "overlapping(delay=0)") and s > 0)


def home(method, s, S, W):
    """The worker of a stage."""
    return min(s, S - 1 - s) if method in VEES else s % W


def stage_price(n, way, s, S, i, j):
    """(work forward, work backward, late W, message, end, bytes kept, bytes of what is recomputed at a time).

    Work includes the runtime's time of each action, and the ends of messages: a forward takes one from below and sends
    one up, a backward the other way round.
    """
    W, R, T, method, M, again, shard, chunks, space, sequence = way
    D = 1 if sequence else T  # what weights and their work are still divided by
    inside = T * space[0] * space[1]
    w = home(method, s, S, W)
    b = Q(n["batch"], R * M)
    ranks = [[at(n, (r * W + w) * inside + t) for t in range(inside)] for r in range(R)]
    rows = space[0] * space[1]  # processes with the same part of the weights: a rank's place among them is t % rows
    of_weights = [[rank for t, rank in enumerate(group) if t // rows == k] for group in ranks for k in range(T)]
    of_slabs = [[rank for t, rank in enumerate(group) if t % rows == k] for group in ranks for k in range(rows)]
    layers = list(as_run(n, T, again, sequence, slice(i, j + 1)))
    following, layers = layers[-1], layers[: j - i]
    has_heads = method in LOCAL and any(has_head(method, each, S, chunks) for each in range(S))
    first, last = i == 0, j == len(n["layers"])
    borrows = n["tied"]["bytes"] if "tied" in n and first != last and (first if has_heads else last) else 0
    if borrows:  # stage 0 owns the weights, under local methods the last one; the other sends their gradient there
        layers[-last]["stepped"] = layers[-last]["weights"] - borrows
    busy = [at(n, process) for process in range(R * W * inside)]
    n = n | {"gamma": n["gamma"] * max(slow_of(n, worker) for worker in busy)}
    bandwidth = Q(n["bandwidth"], max(slow_of(n, worker) for group in ranks for worker in group))

    def slowest(price):
        return max(price(pace_of(n, rank)) for group in ranks for rank in group)

    def slab(x):  # by space parallelism
        return rows if x.get("side") else 1

    def cut(x):  # by tensor parallelism too
        return (D if x["weights"] else 1) * slab(x)

    enters, leaves = Q(layers[0]["in"]) / slab(layers[0]), Q(layers[-1]["out"]) / slab(layers[-1])

    def forward(pace):
        return sum(pace * x["f"] * b / cut(x) for x in layers)

    def late(pace):
        lowest = next((k for k, x in enumerate(layers) if x["w"]), None)
        if lowest is None:
            return Q(0)
        above = sum(pace * x["b"] * b / cut(x) for x in layers[lowest + 1 :])
        return above + pace * layers[lowest]["w"] * b / cut(layers[lowest]) + n["start"]

    def inputs(pace):
        return sum(pace * x["i"] * b / cut(x) for x in layers) + n["start"] if i else Q(0)

    def whole(pace):
        return sum(pace * x["b"] * b / cut(x) for x in layers) + n["start"] if i else late(pace)

    f = slowest(forward)
    split = method in ("zb-h1", "zb-h2", "zb-v", "overlapping", "overlapping(delay=0)") and s > 0
    silent = s > 0 and not returns(method, s - 1, S, chunks)  # nobody is told a gradient of the inputs
    back = slowest(inputs) + slowest(late) if split else slowest(late if silent else whole)
    params = sum(Q(x["weights"]) / D for x in layers)
    stepped = sum(Q(x.get("stepped", x["weights"])) / D for x in layers)
    if M > 1:  # a gradient that is sent is added up where it goes
        back += 3 * stepped / bandwidth
    update = slowest(lambda pace: n["step"] * 5 * stepped * pace)
    update += n["once"] if stepped else 0
    gradients, kept = stepped, sum(x["kept"] * b / cut(x) for x in layers)
    static = versions(method, s, S) * params + weight_copies(method, s, S) * stepped
    if has_head(method, s, S, chunks):
        head = n["heads"][j - 1]
        f += slowest(lambda pace: pace * head["f"] * b)
        back += slowest(lambda pace: pace * head["b"] * b)
        update += slowest(lambda pace: n["step"] * 5 * Q(head["weights"]) * pace)
        static += head["weights"]
        gradients += head["weights"]
        kept += head["kept"] * b
    for x in layers:
        up, down = halos(n, x, space, of_weights, b)
        if x["weights"] and T > 1:
            up += max(ring(n, group, Q(x["out"]) / slab(x) * b) for group in of_slabs)
            down += max(ring(n, group, Q(x["in"]) / slab(x) * b) for group in of_slabs)
        f, back = f + up, back + down + (up if again == "full" else 0)
    count = held(method, s, S, M, chunks)
    recomputed = f if again == "stage" and count > 1 else Q(0)
    layerwise = max(0, *(x["again"] * b / cut(x) for x in layers))
    if again == "full":  # every layer's input, the output of the last one, and what one layer makes again
        head_kept = kept - sum(x["kept"] * b / cut(x) for x in layers)
        layerwise = max(0, *(x["kept"] * b / cut(x) - Q(x["in"]) / slab(x) * b for x in layers))
        kept = head_kept + sum(Q(x["in"]) / slab(x) * b for x in layers) + leaves * b
    back += recomputed
    replicas = [[ranks[r][t] for r in range(R)] for t in range(inside)]
    if versions(method, s, S) > 1:
        update += 2 * gradients / bandwidth
    if space == (1, 1):
        end = max(ring(n, group, gradients) for group in replicas) + update
    else:
        pairs = {link(n, p, q) for group in (*replicas, *of_weights) for p in group for q in group if p != q}
        end = (over(n, pairs, R * rows, gradients) if gradients else 0) + update
    state = n.get("states", 0)  # of the optimizer, for each number of the weights
    size = static + (1 + state) * gradients
    if shard == "state":  # gradients are scattered before an update of a part, weights are gathered after it
        scatter = max(ring(n, group, gradients, halves=1) for group in replicas)
        end = scatter + max(ring(n, group, params, adds=False, halves=1) for group in replicas) + update / R
        size = params + gradients + state * gradients / R
    elif shard == "keep":
        end = max(ring(n, group, params) for group in replicas) + update / R
        size = 2 * params + (1 + state) * params / R
    elif shard == "reshard":
        gather = max(ring(n, group, params, adds=False, halves=1) for group in replicas)
        scatter = max(ring(n, group, params, halves=1) for group in replicas)
        f, back = f + gather, back + gather * (2 if recomputed else 1) + scatter
        end = update / R
        size = (2 + state) * params / R + 2 * max(Q(x["weights"]) / D for x in layers)
    if sequence:  # of vectors' gradients, which each process has of its part
        end += max(ring(n, group, sum(x["sums"] for x in layers)) for group in of_slabs)
    if borrows:  # the modules' own copy, where that is not the owner's, and the gradient to send
        size += Q(borrows) / D * (w != home(method, S - 1 if has_heads else 0, S, W)) + Q(borrows) / D
    size += count * enters * b if recomputed else count * kept
    passing = kept if recomputed else layerwise
    x = Q(0)
    if s < S - 1 and home(method, s + 1, S, W) != w:
        nxt = [[at(n, (r * W + home(method, s + 1, S, W)) * inside + t) for t in range(inside)] for r in range(R)]
        pairs = [link(n, p, q) for one, two in zip(ranks, nxt, strict=True) for p, q in zip(one, two, strict=True)]
        busy = [n["send"][k] + n["receive"][k] for k in (0, 1)]
        x = max(max(0, alpha - busy[0]) + leaves * b * max(0, beta - busy[1]) for alpha, beta in pairs)
    halves = 2 if split or (method in HOPS and S > 1) else 1
    late_work = slowest(late) + (n["per_action"] if halves == 2 else 0)
    f += n["per_action"]
    back += n["per_action"] * (halves + (recomputed > 0))
    below = s > 0 and home(method, s - 1, S, W) != w
    above = s < S - 1 and home(method, s + 1, S, W) != w
    f += below * end_of(n, "receive", enters * b) + above * end_of(n, "send", leaves * b)
    back += (below and returns(method, s - 1, S, chunks)) * end_of(n, "send", enters * b)
    gradient_bytes = Q(following["in"]) / slab(following) * b if above else 0
    taken = (above and returns(method, s, S, chunks)) * end_of(n, "receive", gradient_bytes)
    back += taken
    late_work += taken if method in HOPS else 0
    end += n["per_action"] + (n["per_step"] + losses(n, w, home(method, S - 1, S, W), W)) / Q(S, W)
    return f, back, late_work, x, end, size, passing


def end_of(n, which, size):
    """What a message takes of its sender, or of its receiver."""
    fixed, each = n[which]
    return fixed + each * size


def losses(n, w, last, W):
    """Telling all others, or hearing it: 64 bytes."""
    if W == 1:
        return 0
    return (W - 1) * end_of(n, "send", 64) if w == last else end_of(n, "receive", 64)


def returns(method, s, S, K):
    """Whether a gradient comes from the stage above."""
    return method != "greedy" and not (method in CHUNKED and s + 1 in ends(S, K))


def step(n, way, bounds):
    """Seconds of a step, or None where a worker's memory is too small."""
    W, _, _, method, M, _, _, chunks, _, _ = way
    S = len(bounds) - 1
    v = S // W
    prices = [stage_price(n, way, s, S, bounds[s], bounds[s + 1]) for s in range(S)]
    if fullest(prices, method, W) > n["memory"]:
        return None
    if method in CHUNKED:
        return max(chunked(prices, s, min(e for e in ends(S, chunks) if e > s), M) for s in range(S))
    if method == "overlapping(delay=0)":
        return max(hop(prices, s) for s in range(S))
    turns = []
    for f, b, _, x, *_ in prices:
        if method == "gpipe":
            turns.append(max(f, x) + max(b, x))
        elif method in ("zb-h2", *VEES, *CLOCKED, *LOCAL):
            turns.append(max(f + b, x))
        else:
            turns.append(f + b + 2 * x)
    last = [price[4] for price in prices]
    if method in TWICE:
        gap = zb_v_gap if method == "zb-v" else dualpipe_v_gap
        loads = [
            (M * v + W - 1) * turn + v * price[4] if method == "interleaved" else
            looped(price[0], price[3], M, W) + looped(price[1], price[3], M, W) + 2 * price[4]
            if method == "looped-bfs" else
            2 * M * turn + (W - 1) * (gap(*price[:3]) + 5 * price[3]) + 2 * price[4]
            for turn, price in zip(turns, prices, strict=True)
        ]  # fmt: skip
        return max(sum(load for s, load in enumerate(loads) if home(method, s, S, W) == w) / v for w in range(W))
    if method == "zb-h1":
        bubble = sum(2 * price[3] for price in prices)
        for f, b, w, *_ in prices[1:]:
            bubble += max(f, b - w, f + b - 2 * w) if M >= S else f + b
        return bubble + max(M * turn + end for turn, end in zip(turns, last, strict=True))
    if method == "zb-h2":
        bubble = sum(2 * price[3] for price in prices)
        bubble += sum(max(0, b - w - f, f + b - 3 * w) for f, b, w, *_ in prices[1:])
        return bubble + max(M * turn + end for turn, end in zip(turns, last, strict=True))
    if method in SYNC:
        fill = sum(f + b + 2 * x for f, b, _, x, *_ in prices)
        return fill + max((M - 1) * turn + end for turn, end in zip(turns, last, strict=True))
    return max(M * turn + end for turn, end in zip(turns, last, strict=True))


def fullest(prices, method, W):
    """The bytes of the worker that needs most, of stages at these prices."""
    found = []
    for worker in range(W):
        own = [price[5:] for s, price in enumerate(prices) if home(method, s, len(prices), W) == worker]
        found.append(sum(kept for kept, _ in own) + max(passing for _, passing in own))
    return max(found)


def fullest_that_fits(n, way, bounds):
    """Those of a cut; None where a worker's memory is too small."""
    S = len(bounds) - 1
    num_bytes = fullest([stage_price(n, way, s, S, bounds[s], bounds[s + 1]) for s in range(S)], way[3], way[0])
    return num_bytes if num_bytes <= n["memory"] else None


def device_of(n, worker):
    """The price an hour, the watts and the idle watts of a worker's device."""
    return n["devices"][n["paces"][worker // n["per_node"]]]


def joules(n, way, bounds):
    """The energy of a step: each device's idle watts for all of it, and the rest of its watts while it is busy."""
    W, R, T, method, M, _, _, _, space, _ = way
    seconds, inside, S = step(n, way, bounds), T * space[0] * space[1], len(bounds) - 1
    if seconds is None:
        return None
    busy = [Q(0)] * W
    for s in range(S):
        f, b, _, _, end, *_ = stage_price(n, way, s, S, bounds[s], bounds[s + 1])
        busy[home(method, s, S, W)] += M * (f + b) + end
    total = Q(0)
    for process in range(R * W * inside):
        _, watts, idle = device_of(n, at(n, process))
        total += idle * seconds + (watts - idle) * busy[process // inside % W]
    return total


def money(n, way, bounds):
    """The price of a step, of all workers that it uses."""
    seconds, processes = step(n, way, bounds), way[0] * way[1] * way[2] * way[8][0] * way[8][1]
    return None if seconds is None else seconds * sum(device_of(n, at(n, p))[0] for p in range(processes)) / 3600


def least_cost(n, methods, cost):
    """The least cost of all on any workers, in any order; with `placed`, else on the first ones."""
    found = []
    for way in ways(n, methods):
        S = way[0] * (2 if way[3] in TWICE else 1)
        processes = way[0] * way[1] * way[2] * way[8][0] * way[8][1]
        for order in orders(n, processes) if n.get("placed") else [range(processes)]:
            cuts = itertools.combinations(range(1, len(n["layers"])), S - 1)
            found += [cost(n | {"order": order}, way, (0, *inner, len(n["layers"]))) for inner in cuts]
    return min((each for each in found if each is not None), default=None)


def chunked(prices, s, end, M):
    """Up from a stage to the last of its chunk and down again, its other micro-batches, and its update."""
    turns = [f + b + 2 * x for f, b, _, x, *_ in prices[s : end - 1]]
    f, b, _, x, *_ = prices[end - 1]
    turns.append(max(f + b, x))
    return sum(turns) + (M - 1) * turns[0] + prices[s][4]


def hop(prices, s):
    """A stage's forward, the next one's forward and input gradient, the stage's weight gradient and update."""
    f, b, w, x, end, *_ = prices[s]
    alone = max(f + b, x) + end
    if s == len(prices) - 1:
        return alone
    f2, b2, w2, *_ = prices[s + 1]
    return max(alone, f + x + (f2 + b2 - w2) + x + w + end)


def looped(t, x, M, W):
    """Two rounds of M micro-batches over W workers, the second not before the first has come around."""
    slow = max(t, x)
    return max(M * slow, W * (t + x)) + (M - 1) * slow + W * t + (W - 1) * x


def zb_v_gap(f, b, w):
    return max(f, b - w, w, 2 * f - (b - w), 2 * (f - w), 2 * (b - w - w))


def dualpipe_v_gap(f, b, w):
    return max(f, b - w, 2 * b - 3 * w, f + b - 2 * w, 2 * (f - w), 2 * f - b)


def best(n, methods=SYNC + ASYNC + LOCAL):
    """The least seconds of all; None if nothing fits."""
    least = math.inf
    looked = 0
    for way in ways(n, methods):
        looked += 1
        S = way[0] * (2 if way[3] in TWICE else 1)
        for inner in itertools.combinations(range(1, len(n["layers"])), S - 1):
            found = step(n, way, (0, *inner, len(n["layers"])))
            if found is not None and found < least:
                least = found
    return looked, None if least is math.inf else least
