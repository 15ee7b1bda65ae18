"""Study 10, by the clock again: pipelined chunks, local SGD, and links of 20 Mbit/s beside those of study 5.

Its cells are study 5's, and their runs are taken over from its store; the launches are its own. See rules.md.
"""

from dataclasses import replace

import by_the_clock
from clock_parts.launches import launches
from clock_parts.page import clock
from clock_parts.settings import PROCESSES, Chosen

LINKS = (None, 20, 100, 400)
METHODS: Chosen = {
    "asynchronous": {"B": dict.fromkeys(PROCESSES, "pipedream-2bw")},
    "local": {"B": {2: "chunked(chunks=2)", 4: "chunked(chunks=2, microbatches=2)"}},
    "local SGD": {"B": dict.fromkeys(PROCESSES, "local-sgd(every=8)")},
}
BEFORE = by_the_clock.study(METHODS)

STUDY = replace(
    BEFORE,
    name="clock_again",
    title="By the clock, again",
    question=(
        "Who is first at the test error of one process over links of 20, 100 and 400 Mbit/s and over loopback, with a "
        "pipeline in each chunk and with replicas that average now and then?"
    ),
    answer=(),
    setting=BEFORE.setting.partition(" B: ")[2].join((
        "Setting B of [study 5](../by_the_clock/README.md): ", " Its runs are study 5's, but for those of local SGD "
        "(averaged every 8 updates, evaluated every 24 steps, each process with its part of the minibatch): [rules]"
        "(../../rules.md), study 10.",
    )),
    launches=launches(METHODS, LINKS),
    clock=lambda runs, made: clock(STUDY, METHODS, runs, made, LINKS),
    tried=(),
)  # fmt: skip
