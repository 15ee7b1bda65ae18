"""Every candidate and every way to cut, priced on plain fractions: shares no code with the planner.

A problem is a dict of numbers. Layer: flops and bytes kept are per example; times are flops x the device's pace.
"""

import itertools
import math
from fractions import Fraction as Q

SYNC = ("backprop", "gpipe", "1f1b", "zb-h1", "interleaved")
ASYNC = ("pipedream", "pipedream-2bw", "paci", "spectrain", "pb", "pb-lwp-sc", "pipemare")
LOCAL = ("greedy", "overlapping")


def ways(n):
    """(pipeline, data, tensor, method, microbatches, recompute, shard) of everything that is allowed."""
    for workers in (w for w in range(1, n["workers"] + 1) if n["workers"] % w == 0):
        for pipeline, data, tensor in itertools.product(range(1, workers + 1), repeat=3):
            if pipeline * data * tensor != workers or tensor not in (1, 2, 4) or tensor > n["per_node"]:
                continue
            if n["batch"] % data:
                continue
            for method in SYNC + ASYNC + LOCAL:
                if (pipeline == 1 and method not in ("backprop", "1f1b")) or (pipeline > 1 and method == "backprop"):
                    continue
                stages = pipeline * (2 if method == "interleaved" else 1)
                if stages > len(n["layers"]):
                    continue
                for m in range(1, n["batch"] // data + 1):
                    if method in ("gpipe", "1f1b", "zb-h1", "interleaved", "pipedream-2bw", "paci"):
                        if n["batch"] // data % m or (pipeline == 1 and m == 1):
                            continue
                        if method == "pipedream-2bw" and m < pipeline:
                            continue
                        if method == "interleaved" and m > pipeline and m % (m // pipeline):
                            continue
                    elif m > 1:
                        continue
                    for again in (False, True):
                        if again and (method not in SYNC or held(method, 0, stages, m) <= 1):
                            continue
                        shards = ("none", "keep", "reshard") if method in SYNC and data > 1 else ("none",)
                        for shard in shards:
                            yield pipeline, data, tensor, method, m, again, shard


def held(method, s, S, M):
    if method in ("backprop", "greedy"):
        return 1
    if method == "gpipe":
        return M
    if method == "1f1b":
        return min(M, S - s)
    if method == "zb-h1":
        return min(M, S)
    if method == "interleaved":
        W = S // 2
        return min(Q(M), Q(W + 2 * (W - 1 - s % W) + 1, 2))
    if method in ("pipedream", "pipedream-2bw", "paci", "spectrain"):
        return S - s
    if method == "overlapping":
        return 2 if S > 1 else 1
    return 2 * (S - 1 - s) + 1


def versions(method, s, S):
    if method == "pipedream":
        return S - s
    return 2 if method in ("pipedream-2bw", "overlapping") and S > 1 else 1


def hop(n, a, b):
    """Latency and seconds a byte between two workers."""
    return n["near"] if a // n["per_node"] == b // n["per_node"] else n["far"]


def ring(n, workers, size, adds=True, halves=2):
    """The slowest link of a ring decides."""
    P = len(workers)
    if P == 1 or not size:
        return Q(0)
    pairs = {hop(n, a, b) for a in workers for b in workers if a != b}
    half = max((P - 1) * (latency + Q(size) / P * beta) for latency, beta in pairs)
    return halves * half + (Q(P - 1, P) * size * n["gamma"] if adds else 0)


def stage_price(n, way, s, S, i, j):
    """(work forward, work backward, late W, message, end, bytes)."""
    W, R, T, method, M, again, shard = way
    w = s % W
    b = Q(n["batch"], R * M)
    ranks = [[(r * W + w) * T + t for t in range(T)] for r in range(R)]
    layers = n["layers"][i:j]

    def slowest(price):
        return max(price(n["paces"][rank // n["per_node"]]) for group in ranks for rank in group)

    def cut(x):  # by tensor parallelism
        return T if x["weights"] else 1

    def forward(pace):
        return sum(pace * x["f"] * b / cut(x) for x in layers)

    def late(pace):
        lowest = next((k for k, x in enumerate(layers) if x["weights"]), None)
        if lowest is None:
            return Q(0)
        above = sum(pace * x["b"] * b / cut(x) for x in layers[lowest + 1 :])
        return above + pace * layers[lowest]["w"] * b / cut(layers[lowest])

    def inputs(pace):
        return sum(pace * x["i"] * b / cut(x) for x in layers) if i else Q(0)

    def whole(pace):
        return sum(pace * x["b"] * b / cut(x) for x in layers) if i else late(pace)

    f = slowest(forward)
    split = method in ("zb-h1", "overlapping") and s > 0
    back = slowest(inputs) + slowest(late) if split else slowest(whole)
    params = sum(Q(x["weights"]) / T for x in layers)
    if M > 1:
        back += 3 * params / n["bandwidth"]
    update = slowest(lambda pace: sum(n["step"] * 5 * Q(x["weights"]) / T * pace for x in layers))
    gradients, kept = params, sum(x["kept"] * b / cut(x) for x in layers)
    static = versions(method, s, S) * params
    if (method == "greedy" and s < S - 1) or (method == "overlapping" and 0 < s < S - 1):
        head = n["heads"][j - 1]
        f += slowest(lambda pace: pace * head["f"] * b)
        back += slowest(lambda pace: pace * head["b"] * b)
        update += slowest(lambda pace: n["step"] * 5 * Q(head["weights"]) * pace)
        static += head["weights"]
        gradients += head["weights"]
        kept += head["kept"] * b
    for x in layers:
        if x["weights"]:
            f += max(ring(n, group, x["out"] * b) for group in ranks)
            back += max(ring(n, group, x["in"] * b) for group in ranks)
    count = held(method, s, S, M)
    recomputed = f if again and count > 1 else Q(0)
    back += recomputed
    replicas = [[ranks[r][t] for r in range(R)] for t in range(T)]
    end = max(ring(n, group, gradients) for group in replicas) + update
    size = static + gradients
    if shard == "keep":
        end = max(ring(n, group, params) for group in replicas) + update / R
        size = 2 * params + params / R
    elif shard == "reshard":
        gather = max(ring(n, group, params, adds=False, halves=1) for group in replicas)
        scatter = max(ring(n, group, params, halves=1) for group in replicas)
        f, back = f + gather, back + gather * (2 if recomputed else 1) + scatter
        end = update / R
        size = 2 * params / R + 2 * max(Q(x["weights"]) / T for x in layers)
    size += count * layers[0]["in"] * b + kept if recomputed else count * kept
    x = Q(0)
    if s < S - 1:
        nxt = [[(r * W + (s + 1) % W) * T + t for t in range(T)] for r in range(R)]
        pairs = [hop(n, p, q) for one, two in zip(ranks, nxt, strict=True) for p, q in zip(one, two, strict=True)]
        x = max(latency + layers[-1]["out"] * b * beta for latency, beta in pairs)
    return f, back, slowest(late), x, end, size


def step(n, way, bounds):
    """Seconds of a step, or None where a worker's memory is too small."""
    W, _, _, method, M, _, _ = way
    S = len(bounds) - 1
    v = S // W
    prices = [stage_price(n, way, s, S, bounds[s], bounds[s + 1]) for s in range(S)]
    if any(size > Q(n["memory"]) / v for *_, size in prices):
        return None
    turns = []
    for f, b, _, x, _, _ in prices:
        if method == "gpipe":
            turns.append(max(f, x) + max(b, x))
        elif method in ("pb", "pb-lwp-sc", "pipemare", *LOCAL):
            turns.append(max(f + b, x))
        else:
            turns.append(f + b + 2 * x)
    ends = [price[4] for price in prices]
    if method == "interleaved":
        return max((M * v + W - 1) * turn + v * end for turn, end in zip(turns, ends, strict=True))
    if method == "zb-h1":
        bubble = sum(2 * price[3] for price in prices)
        for f, b, w, *_ in prices[1:]:
            bubble += f + b - 2 * w if 2 * w <= f + b and M >= S else f + b
        return bubble + max(M * turn + end for turn, end in zip(turns, ends, strict=True))
    if method in SYNC:
        fill = sum(f + b + 2 * x for f, b, _, x, _, _ in prices)
        return fill + max((M - 1) * turn + end for turn, end in zip(turns, ends, strict=True))
    return max(M * turn + end for turn, end in zip(turns, ends, strict=True))


def best(n):
    """The least seconds of all; None if nothing fits."""
    least = math.inf
    looked = 0
    for way in ways(n):
        looked += 1
        S = way[0] * (2 if way[3] == "interleaved" else 1)
        for inner in itertools.combinations(range(1, len(n["layers"])), S - 1):
            found = step(n, way, (0, *inner, len(n["layers"])))
            if found is not None and found < least:
                least = found
    return looked, None if least is math.inf else least
