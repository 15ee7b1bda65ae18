"""Runs situations beside plain PyTorch: python tests/situations/run.py --half seen|unseen --out FILE."""

import argparse
import json
import logging
import random
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import situations.situations  # noqa: F401 (fills the table)
from situations.kit import SITUATIONS, answer

SEEN = sorted(
    random.Random(45).sample(range(50), 25)
)  # looked at while the library was mended; first_look.json: others
HALVES = {"seen": SEEN, "unseen": [number for number in range(50) if number not in SEEN]}


def plain_only(number, method):
    """Whether the plain side runs, and what it comes to: for those who write situations."""
    try:
        numbers = SITUATIONS[number].sides(method).plain()
    except Exception as error:  # noqa: BLE001 (it is the answer)
        return f"raises {type(error).__name__}: {error}"
    finite = all(torch.as_tensor(value).isfinite().all() for value in numbers.values())
    return f"{len(numbers)} numbers{'' if finite else ', not all finite'}"


def main():
    """Write the answers as JSON, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", choices=[*HALVES])
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    numbers = given.only or (HALVES[given.half] if given.half else list(range(50)))
    found = {}
    for number in numbers:
        case, began = SITUATIONS[number], time.perf_counter()
        told = {method: (plain_only if given.plain else answer)(number, method) for method in case.methods}
        found[number] = {"kind": case.kind, "source": case.source, "answers": told}
        print(f"{number:02d} {case.kind} ({time.perf_counter() - began:.1f} s)", flush=True)
        for method, said in told.items():
            print(f"   {method}: {' '.join(said.split())[:400]}", flush=True)
    kinds = [max((said.partition(":")[0] for said in each["answers"].values()), key=rank) for each in found.values()]
    print({kind: kinds.count(kind) for kind in dict.fromkeys(kinds)})
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


def rank(kind):
    """The worst answer of a situation counts."""
    return (
        ["equal", "refused", "ERROR", "SILENT"].index(kind) if kind in ("equal", "refused", "ERROR", "SILENT") else -1
    )


if __name__ == "__main__":
    main()
