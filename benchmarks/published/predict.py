"""`stretto plan`, which also takes `--program`: what else trains a network without data. No option of the product.

python benchmarks/published/predict.py [--program NAME] [options of stretto plan]

Names are those of `stretto.plan.programs`; megatron-2022 unless said otherwise.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import BoundArguments
from typing import Any

from stretto.cli.program import app
from stretto.errors import StrettoError


def parsed(words: Sequence[str]) -> BoundArguments:
    """The arguments of `stretto plan` that words say, `--program` among them."""
    options = list(words)
    program = None
    if "--program" in options:
        place = options.index("--program")
        program = options[place + 1]
        del options[place : place + 2]
    _, bound, _ = app.parse_args(["plan", *options], exit_on_error=False, print_error=False)
    bound.apply_defaults()
    bound.arguments["settings"] = replace(bound.arguments["settings"], program=program)
    return bound


def planned(words: Sequence[str]) -> None:
    """Run `stretto plan` with these words."""
    from stretto.cli.plan import plan

    bound = parsed(words)
    plan(*bound.args, **bound.kwargs)


def facts_of(words: Sequence[str]) -> Mapping[str, Any]:
    """What `--json` prints, in this process, whose rows share what networks cost. Raises StrettoError for a refusal."""
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        planned([*words, "--json", "--out", f"{folder}/plan.toml"])
    facts: Mapping[str, Any] = json.loads(out.getvalue())
    return facts


def main(words: Sequence[str]) -> int:
    """Plan; return the exit status."""
    try:
        planned(words)
    except StrettoError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
