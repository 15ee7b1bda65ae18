"""Law 3 with a latency between workers: time and memory are the closed forms, and those of a slow reference.

The reference below shares no code with the simulator: it reads actions as text ("3F5"), knows itself what each waits
for, and raises start times until nothing changes.
"""

import random
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stretto
from stretto.simulate import period, simulate

COST = st.integers(0, 9)


def gpipe_lists(S, M):
    return [[f"{s}F{m}" for m in range(M)] + [f"{s}B{m}" for m in range(M)] for s in range(S)]


def one_f_one_b_lists(S, M):
    """Stage s runs ahead of its backwards by the stages above it."""
    lists = []
    for s in range(S):
        forwards, backwards, own = [f"{s}F{m}" for m in range(M)], [f"{s}B{m}" for m in range(M)], []
        while backwards:
            while forwards and len(forwards) + (S - 1 - s) >= len(backwards):
                own.append(forwards.pop(0))
            own.append(backwards.pop(0))
        lists.append(own)
    return lists


def ends_of(lists, cost, latency):
    """When each action ends: {text: time}."""
    home = {text.partition(text.strip("0123456789"))[0]: w for w, own in enumerate(lists) for text in own}
    starts = {text: 0 for own in lists for text in own}
    S = len(home)

    def sources(text):
        s, kind, m = re.fullmatch(r"(\d+)([A-Z])(\d+)", text).groups()
        s = int(s)
        above = f"{s + 1}I{m}" if f"{s + 1}I{m}" in starts else f"{s + 1}B{m}"
        if kind == "F":
            return [f"{s - 1}F{m}"] if s else []
        if kind == "U":
            return []
        return [f"{s}F{m}"] + [above] * (s + 1 < S) + [f"{s}I{m}"] * (kind == "W")

    def distance(a, b):
        return latency * (home[re.match(r"\d+", a)[0]] != home[re.match(r"\d+", b)[0]])

    waits = {text: [(source, distance(source, text)) for source in sources(text)] for text in starts}
    for own in lists:
        for before, after in pairwise(own):
            waits[after].append((before, 0))
    changed = True
    while changed:
        changed = False
        for text, before in waits.items():
            start = max((starts[source] + cost(source) + way for source, way in before), default=0)
            if start != starts[text]:
                starts[text], changed = start, True
    return {text: start + cost(text) for text, start in starts.items()}


def by_stage(tables):
    """Cost of an action written as text, from {kind: times of the stages}."""
    return lambda text: tables[text.strip("0123456789")][int(re.match(r"\d+", text)[0])]


def durations(tables):
    return lambda action: tables[action.kind][action.stage]


def run(name, S, turns, tables, latency, workers=None):
    schedule, rules = stretto.method(name).plan(S, workers)
    return simulate(schedule, rules, turns, durations(tables), latency=latency)


# -- makespans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("S", [1, 3, *(pytest.param(S, marks=pytest.mark.slow) for S in (2, 4, 5, 6))])
def test_gpipe_and_1f1b_with_latency(S):
    """GPipe's critical path goes up once and down once. 1F1B's also turns around in between: after each of its
    backwards at the top comes a forward that waits for the way down and up again, from S micro-batches earlier.
    """
    for M in range(1, 13):
        for F, B, L in ((1, 2, 0), (1, 2, 1), (3, 1, 2), (2, 5, 40)):
            tables = {"F": [F] * S, "B": [B] * S, "U": [0] * S}
            work = (M + S - 1) * (F + B)
            turns_around = M - 1 - -(-(M - 1) // S)
            for family, lists, way in (
                ("gpipe", gpipe_lists, 2 * (S - 1)),
                ("1f1b", one_f_one_b_lists, 2 * (S - 1 + turns_around)),
            ):
                timeline = run(f"{family}(microbatches={M})", S, 1, tables, L)
                assert timeline.makespan == work + way * L, (family, M)
                assert timeline.makespan == max(ends_of(lists(S, M), by_stage(tables), L).values())
                assert timeline.busy == (M * (F + B),) * S
                assert timeline.bubble == pytest.approx(((S - 1) * (F + B) + way * L) / (work + way * L))


@given(seed=st.integers(0, 10**6), S=st.integers(1, 6), M=st.integers(1, 12), latency=COST)
def test_stages_of_any_cost(seed, S, M, latency):
    generator = random.Random(seed)
    tables = {kind: [generator.randint(0, 9) for _ in range(S)] for kind in "FB"} | {"U": [0] * S}
    for family, lists in (("gpipe", gpipe_lists), ("1f1b", one_f_one_b_lists)):
        timeline = run(f"{family}(microbatches={M})", S, 1, tables, latency)
        wanted = ends_of(lists(S, M), by_stage(tables), latency)
        assert {str(span.action): span.end for span in timeline.spans if span.action.kind != "U"} == wanted


METHODS = (
    "backprop",
    "interleaved(microbatches=4)",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "dualpipe-v",
    "pb",
    "pipedream",
    "paci",
    "pipedream-2bw",
)


@given(seed=st.integers(0, 10**6), half=st.integers(1, 3), turns=st.integers(1, 4), latency=COST)
def test_every_pipeline_on_any_number_of_workers(seed, half, turns, latency):
    """The lists are the library's (other tests compare them with the published ones); the times are the reference's."""
    generator, S = random.Random(seed), 2 * half
    tables = {kind: [generator.randint(0, 9) for _ in range(S)] for kind in "FBIW"} | {"U": [0] * S}
    for name in METHODS:
        workers = half if name.startswith(("zb-v", "dualpipe-v", "interleaved", "looped")) else generator.randint(1, S)
        timeline = run(name, S, turns, tables, latency, workers)
        lists = [[str(a) for a in timeline.schedule.unroll(w, turns)] for w in range(workers)]
        wanted = ends_of(lists, by_stage(tables), latency)
        assert {str(span.action): span.end for span in timeline.spans} == wanted, name


# -- memory ---------------------------------------------------------------------------------------------------------


@given(S=st.integers(1, 6), workers=st.integers(1, 6), M=st.integers(1, 12))
def test_activations_of_a_worker_are_those_of_all_its_stages_at_one_moment(S, workers, M):
    workers = min(S, workers)
    tables = {"F": [1] * S, "B": [2] * S, "U": [0] * S}
    for name in (f"1f1b(microbatches={M})", "pb", "pipedream", f"gpipe(microbatches={M})"):
        timeline = run(name, S, M if name in ("pb", "pipedream") else 1, tables, 0, workers)
        for worker, most in enumerate(timeline.peak_activations):
            held = peak = 0
            for span in timeline.spans:
                held += ((span.action.kind == "F") - (span.action.kind == "B")) * (span.worker == worker)
                peak = max(peak, held)
            assert most == peak
        if workers == S:
            assert timeline.peak_activations == timeline.peak_graphs


def test_peaks_at_different_moments_are_not_added():
    timeline = run("interleaved(microbatches=4)", 4, 1, {"F": [1] * 4, "B": [2] * 4, "U": [0] * 4}, 0, 2)
    assert timeline.peak_graphs == (4, 3, 2, 1)  # workers 0 and 1 have stages 0 and 2, 1 and 3
    assert timeline.peak_activations == (5, 3)


# -- periods --------------------------------------------------------------------------------------------------------


@given(S=st.integers(1, 6), F=COST, B=COST, latency=COST)
def test_periods_with_latency(S, F, B, latency):
    """The way from a stage d stages down and back is amortised over the micro-batches under way: d+1 for PipeDream,
    2d+1 for the PB clock, which therefore hides a latency of half a stage's work.
    """
    tables = {"F": [F] * S, "B": [B] * S, "U": [0] * S}
    work = F + B

    def turn(name):
        return period(*stretto.method(name).plan(S), durations(tables), latency=latency)

    assert turn("pipedream") == pytest.approx(work + 2 * (S - 1) * latency / S)
    assert turn("pb") == pytest.approx(max(work, (S * work + 2 * (S - 1) * latency) / (2 * S - 1)))
    assert turn("greedy") == work
    assert turn("backprop") == S * work + 2 * (S - 1) * latency
    for name in ("gpipe(microbatches=5)", "1f1b(microbatches=5)"):
        assert turn(name) == run(name, S, 1, tables, latency).makespan


@given(data=st.data(), half=st.integers(1, 2), seed=st.integers(0, 10**6), latency=COST)
@settings(max_examples=8)
def test_period_is_what_the_simulation_settles_to(data, half, seed, latency):
    S, generator = 2 * half, random.Random(seed)
    name = data.draw(st.sampled_from([*METHODS, "greedy", "overlapping", "overlapping(delay=1)", "chunked"]))
    workers = half if name.startswith(("zb-v", "dualpipe-v", "interleaved", "looped")) else generator.randint(1, S)
    tables = {kind: [generator.randint(0, 9) for _ in range(S)] for kind in "FBIWU"}
    schedule, rules = stretto.method(name).plan(S, workers)
    T = 420 if schedule.per_turn == 1 else 24  # a multiple of every cycle's turns
    grown = run(name, S, 2 * T, tables, latency, workers).makespan - run(name, S, T, tables, latency, workers).makespan
    turn = period(schedule, rules, durations(tables), latency=latency)
    assert turn == pytest.approx(grown / T, rel=1e-12)
