"""The parts of a step beside what Korthikanti et al. 2022 say of them: a layer (table 4), and the step of 175B.

python benchmarks/published/parts.py          # writes parts.json; a minute
"""

import json
from collections.abc import Mapping
from typing import Any

from main import Result, percent, predict
from rows import HERE, LOOKED_AT, Row, read_rows

DEPTHS = (6, 12)  # the layers of 22B fit in memory without recomputation; a layer is the difference, over six
WORK = ("computing", "below_peak", "memory_traffic", "launches", "computing_again", "inside_stages")  # not the update
# table 4: milliseconds of a layer's forward and backward
LAYER: Mapping[tuple[str, str], tuple[float, float]] = {
    ("none", "no"): (7.7, 11.9), ("none", "yes"): (7.2, 11.8), ("full", "no"): (7.7, 19.5),
    ("selective", "no"): (7.7, 13.2), ("selective", "yes"): (7.2, 13.1),
}  # fmt: skip
STEP = "GPT 175B, sequence parallel, selective"


def layer_of(recompute: str, sequence_parallel: str) -> dict[str, float]:
    """Milliseconds of a layer of 22B by term, as plans have it."""
    shape = next(row for row in read_rows(LOOKED_AT) if row.name.startswith("GPT 22B"))
    options = shape.options | {"recompute": recompute, "sequence-parallel": sequence_parallel}
    few, many = (terms_of(shape, options | {"model-options.depth": depth}) for depth in DEPTHS)
    return {term: 1000 * (many[term] - few[term]) / (DEPTHS[1] - DEPTHS[0]) for term in WORK}


def terms_of(row: Row, options: Mapping[str, Any]) -> Mapping[str, float]:
    """The terms of a step with other options. Raises RuntimeError if it is refused."""
    result = predict(Row(row.name, row.source, row.place, row.measured, None, options, row.flops))
    if result.refusal:
        raise RuntimeError(result.refusal)
    return result.terms


def layers() -> list[dict[str, Any]]:
    """Table 4, each line beside ours."""
    lines = []
    for (recompute, sequence_parallel), (forward, backward) in LAYER.items():
        ours = layer_of(recompute, sequence_parallel)
        theirs, total = forward + backward, sum(ours.values())
        print(
            f"| {recompute} | {sequence_parallel} | {forward} + {backward} = {theirs:.1f} | {total:.1f} | "
            f"{percent(total / theirs - 1)} | {' | '.join(f'{ours[term]:.1f}' for term in WORK)} |"
        )
        lines.append({
            "recompute": recompute, "sequence_parallel": sequence_parallel, "measured": [forward, backward],
            "predicted": total, "terms": ours,
        })  # fmt: skip
    return lines


def step() -> Result:
    """Where the step of 175B goes."""
    result = predict(next(row for row in read_rows(LOOKED_AT) if row.name == STEP))
    assert result.seconds is not None, result.refusal
    for term, seconds in result.terms.items():
        print(f"| {term.replace('_', ' ')} | {seconds:.2f} s | {seconds / result.seconds:.1%} |")
    print(f"| all | {result.seconds:.2f} s | measured {result.row.seconds:.2f} s |")
    return result


def main() -> None:
    """Print and write both tables."""
    content: dict[str, Any] = {"layer": layers()}
    found = step()
    content["step"] = {
        "name": STEP,
        "seconds": found.seconds,
        "measured": found.row.seconds,
        "terms": dict(found.terms),
    }
    (HERE / "parts.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
