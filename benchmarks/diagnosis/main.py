"""Which of the mistakes that were made by hand are named right, of three sets of them (README.md).

python benchmarks/diagnosis/main.py                 all of them; writes result.json
python benchmarks/diagnosis/main.py --only gpt      those whose title, network or names hold a text, printed alone
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from networks import Case, setup

from stretto.analysis.diagnosis.api import diagnose

HERE = Path(__file__).resolve().parent


def judged(case: Case) -> dict[str, Any]:
    """A case's answer beside its truth."""
    made = case.gradients(setup(case.network, case.dtype))
    s = setup(case.network, case.dtype)
    options = case.options(s) if callable(case.options) else case.options
    began = time.perf_counter()
    answer = diagnose(s.model, (s.inputs, s.target), s.loss, made, **options)
    seconds = time.perf_counter() - began
    named = [each.name for each in answer.hypotheses]
    also = [name for each in answer.hypotheses for name in each.same_as]
    return {
        "title": case.title,
        "network": case.network,
        "dtype": str(case.dtype).removeprefix("torch."),
        "truth": sorted(case.truth),
        "named": sorted(named),
        "same_as": sorted(set(also)),
        "right": is_right(case.truth, named, answer),
        "seconds": round(seconds, 2),
        "sentence": answer.sentence,
    }


def is_right(truth: tuple[str, ...], named: list[str], answer: Any) -> bool:
    """Whether every mistake is named, itself or as one that looks the same, and nothing else is."""
    if any(name.startswith("own:") for name in truth):  # one that no hypothesis has
        return bool(answer.verdict == "unexplained")
    if answer.verdict != "explained":
        return False
    left = list(truth)
    for each in answer.hypotheses:
        fits = next((name for name in (each.name, *each.same_as) if name in left), None)
        if fits is None:
            return False
        left.remove(fits)
    return not left


def main() -> int:
    """Judge the cases, print a line for each and the shares."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--halves", default="seen,unseen,unseen_2,unseen_3")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for half in given.halves.split(","):
        cases = __import__(half).CASES
        chosen = [each for each in cases if given.only in f"{each.title} {each.network} {' '.join(each.truth)}"]
        results[half] = [judged(case) for case in chosen]
        for row in results[half]:
            mark = "  " if row["right"] else "X "
            what = f"{row['title']}: {row['truth']} -> {row['named']} {row['same_as'] or ''}"
            print(f"{mark}{row['network']} {row['dtype']:9} {row['seconds']:6.2f}s {what}")
            if not row["right"]:
                print("     ", row["sentence"])
        right = sum(row["right"] for row in results[half])
        print(f"{half}: {right} of {len(results[half])}")
    if not given.only and set(given.halves.split(",")) == {"seen", "unseen", "unseen_2", "unseen_3"}:
        (HERE / "result.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
