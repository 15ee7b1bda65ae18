"""Every schedule's file begins with its picture. Here it is again, and the simulator must draw it.

F = 1, B = 2, I = W = 1, updates take no time. Digits are forwards, letters backwards (a belongs to micro-batch 0),
capitals weight gradients. One row a stage, where a worker has several: "1:3" is stage 3 on worker 1, and blank is the
time in which worker 1 is at another stage.
"""

from string import ascii_lowercase, ascii_uppercase, digits

import pytest

from stretto.schedule import Reach, Rules
from stretto.schedule.library import dualpipe_v, gpipe, interleaved, one_f_one_b, pipedream, zero_bubble
from stretto.simulate import simulate

MARKS = {"F": digits, "B": ascii_lowercase, "I": ascii_lowercase, "W": ascii_uppercase}

PICTURES = {
    (gpipe, "gpipe", (4, 4, 4), 1): """\
3 ...0123aabbccdd......
2 ..0123...aabbccdd....
1 .0123......aabbccdd..
0 0123.........aabbccdd""",
    (one_f_one_b, "one_f_one_b", (4, 4, 6), 1): """\
3 ...0aa1bb2cc3dd4ee5ff......
2 ..01..aa2bb3cc4dd5ee.ff....
1 .012....aa3bb4cc5dd.ee.ff..
0 0123......aa4bb5cc.dd.ee.ff""",
    (one_f_one_b, "one_f_one_b", (4, 4, 6, 1), 1): """\
3 ...0aa1bb2cc3dd4ee5ff......
2 ..012.aa3bb4cc5dd.ee.ff....
1 .01234..aa5bb.cc.dd.ee.ff..
0 012345....aa.bb.cc.dd.ee.ff""",
    (interleaved, "interleaved", (4, 2, 4), 1): """\
1:3 .  0aa1bb      2cc3dd    ..
1:1 .01      2aa3bb      ccdd..
0:2   01 .aa bb2  3  .cc.dd
0:0 01  2.  3   aa bb.  .  ccdd""",
    (interleaved, "looped_bfs", (4, 2, 4), 1): """\
1:3 .    0123ddccbbaa        ..
1:1 .0123            ddccbbaa..
0:2     0123...ddccbbaa
0:0 0123    ...        ddccbbaa""",
    (zero_bubble, "zb_h1", (4, 4, 6), 1): """\
3 ...0a1b2c3dA4eB5fCDEF
2 ..01.a2b3cA4dB5eCfDEF
1 .012..a3bA4cB5dCeDfEF
0 0123...aa4bb5ccddeeff""",
    (zero_bubble, "zb_h2", (4, 4, 7), 1): """\
3 ...0a1b2c3d4e5f6gABCDEFG
2 ..012a3b4c5d6eAfBgCDEFG.
1 .01234a5b6cAdBeCfDgEFG..
0 0123456aabbccddeeffgg...""",
    (dualpipe_v, "dualpipe_v", (6, 3, 7), 1): """\
2:3 .. 0 1 2 aa3   bb4   cc5   dd6  ee  ff g  G
2:2 ..0 1 2 3   aa4   bb5   cc6   dd  ee  f gF G
1:4 .   0 1aA2 bb3   cc4   dd5  ee6.  ff  g G
1:1 .012 3    4   aa5   bb6   cc   .dd  ee f gFG
0:5      0aA1bB2 cc3   dd4  ee5.  ff6.  gg
0:0 01234       5   aa6   bb   .cc   .dd  eeffgg""",
    (zero_bubble, "zb_v", (6, 3, 6), 1): """\
2:3 .. 0 1 2aA   3bB   4cC   5d e f D E F
2:2 ..0 1 2   3aA   4bB   5cC  d e f D E F
1:4 .   0 1aA2bB   3cC   4dD  5e f E  F  .
1:1 .012 3      4aA   5bB   cC  d e fD EF.
0:5      0aA1bB2cC   3dD  4eE  5f      F..
0:0 01234         5aa   bb   cc  ddeeff ..""",
    (pipedream, "pipedream", (4, 4), 6): """\
3 ...0aa1bb2cc3dd4ee5ff......
2 ..01..aa2bb3cc4dd5ee.ff....
1 .012....aa3bb4cc5dd.ee.ff..
0 0123......aa4bb5cc.dd.ee.ff""",
    (pipedream, "pipelined_backprop", (4, 4), 6): """\
3 ...0aa1bb2cc3dd4ee5ff......
2 ..012.aa3bb4cc5dd.ee.ff....
1 .01234..aa5bb.cc.dd.ee.ff..
0 012345....aa.bb.cc.dd.ee.ff""",
}


def rules(schedule):
    S = schedule.num_stages
    return Rules.of(schedule, Reach((*[None] * (S - 1), S - 1)))


def draw(timeline):
    home = timeline.schedule.worker_of
    idle = [["."] * int(timeline.makespan) for _ in timeline.schedule.body]
    for span in timeline.spans:
        idle[span.worker][int(span.start) : int(span.end)] = " " * int(span.end - span.start)
    rows = {stage: list(idle[worker]) for stage, worker in home.items()}
    for _, (kind, stage, microbatch), start, end in timeline.spans:
        if kind != "U":
            rows[stage][int(start) : int(end)] = MARKS[kind][microbatch] * int(end - start)
    order = sorted(rows, key=lambda stage: (home[stage], stage), reverse=True)
    label = "{1}" if len(rows) == len(timeline.schedule.body) else "{0}:{1}"
    return "\n".join(f"{label.format(home[s], s)} {''.join(rows[s])}".rstrip() for s in order)


@pytest.mark.parametrize(("module", "name", "counts", "turns"), PICTURES, ids=[key[1] for key in PICTURES])
def test_pictures(module, name, counts, turns):
    schedule = getattr(module, name)(*counts)
    picture = PICTURES[module, name, counts, turns]
    assert draw(simulate(schedule, rules(schedule), turns)) == picture
    assert all(line in module.__doc__ for line in picture.splitlines())
