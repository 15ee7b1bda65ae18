"""Random command lines, in this process: exit code 0, or 2 and one clear message without a traceback."""

import contextlib
import io
import random

import stretto.cli
from attack.protocol import Outcome

SHARE = 40
METHODS = ["1f1b", "gpipe", "greedy", "pb", "chunked(chunks=3)", "zb-h1", "interleaved", "backprop"]
WRONG = ["", "-1", "0", "nan", "text", "1e99", "1,2", "None", "[]", "é"]


def attack(seed: int) -> Outcome:
    """A drawing of a schedule with options of which some are wrong."""
    draw = random.Random(seed)
    line = ["show", draw.choice(METHODS)]
    for option in ("stages", "workers", "microbatches"):
        if draw.random() < 0.6:
            line += [f"--{option}", draw.choice([*WRONG, "1", "2", "3", "4"])]
    return ran(line)


def ran(line: list[str]) -> Outcome:
    """Run a command line here, and judge its exit code and what it wrote."""
    said = io.StringIO()
    tried = " ".join(["stretto", *map(repr, line)])
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = stretto.cli.main(line)
    if "Traceback" in said.getvalue():
        return Outcome(tried, f"a traceback:\n{said.getvalue()}")
    if code not in (0, 2):
        return Outcome(tried, f"exit code {code}:\n{said.getvalue()}")
    return Outcome(tried, passed="refused" if code == 2 else "succeeded")
