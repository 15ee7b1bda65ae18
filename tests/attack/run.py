"""Run attacks for a while, add up counts.json, and tell each failing seed. Exit code 1 if any failed."""

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attack.protocol import Attack, Outcome, find, names

COUNTS = Path(__file__).with_name("counts.json")
MEMORY = 12 * 2**30  # bytes: a case that asks for more fails, and not the machine


def main() -> int:
    """Run what the command line asks for."""
    given = arguments()
    attacks = [find(name) for name in names() if given.only in (None, name)]
    if not attacks:
        sys.exit(f"no attack {given.only!r}; there are: {', '.join(names())}")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    if given.seed is not None and given.minutes is None:
        return int(sum([told(attack, given.seed) for attack in attacks]) > 0)
    failed = campaign(attacks, 60 * (given.minutes or 1), given.seed)
    return int(failed > 0)


def arguments() -> argparse.Namespace:
    """What stands on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, help="how long to attack, all attacks together")
    parser.add_argument("--seed", type=int, help="begin here and count nothing; without --minutes: this one case")
    parser.add_argument("--only", metavar="NAME", help="one attack, not all")
    return parser.parse_args()


def told(attack: Attack, seed: int) -> bool:
    """Try one case and print all of it. Returns whether it failed."""
    outcome = attack.case(seed)
    print(f"{attack.name} {seed}: {outcome.tried}\n{outcome.failure or outcome.passed}")
    return outcome.failure is not None


def campaign(attacks: list[Attack], seconds: float, seed: int | None) -> int:
    """Attack for so long, each attack the same share of time. Returns how many cases failed."""
    spent = dict.fromkeys(attacks, 0.0)
    tally = {attack: Tally(attack, seed) for attack in attacks}
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            attack = min(attacks, key=spent.__getitem__)
            began = time.monotonic()
            tally[attack].one()
            spent[attack] += time.monotonic() - began
    finally:
        if seed is None:
            keep(tally.values())
        for each in tally.values():
            print(each)
    return sum(each.failures for each in tally.values())


class Tally:
    """What the cases of one attack came to in this run."""

    def __init__(self, attack: Attack, seed: int | None) -> None:
        self.attack = attack
        self.next = counts().get(attack.name, {}).get("next_seed", 0) if seed is None else seed
        self.cases = self.failures = 0
        self.passed: dict[str, int] = {}

    def one(self) -> None:
        """Try the next seed; tell what failed."""
        outcome: Outcome = self.attack.case(self.next)
        self.cases += 1
        if outcome.failure is None:
            self.passed[outcome.passed] = self.passed.get(outcome.passed, 0) + 1
        else:
            self.failures += 1
            print(f"FAILED {self.attack.again(self.next)}\n  {outcome.tried}\n  {outcome.failure}", flush=True)
        self.next += 1

    def __str__(self) -> str:
        what = ", ".join(f"{count:,} {word}" for word, count in sorted(self.passed.items()))
        return f"{self.attack.name}: {self.cases:,} cases, {self.failures} failed; {what}"


def counts() -> dict:
    """What all runs so far came to."""
    return json.loads(COUNTS.read_text()) if COUNTS.exists() else {}


def keep(tallies) -> None:
    """Add this run's counts to the file."""
    total = counts()
    for tally in tallies:
        mine = total.setdefault(tally.attack.name, {"cases": 0, "failures": 0, "next_seed": 0, "passed": {}})
        mine["cases"] += tally.cases
        mine["failures"] += tally.failures
        mine["next_seed"] = tally.next
        for word, count in tally.passed.items():
            mine["passed"][word] = mine["passed"].get(word, 0) + count
    COUNTS.write_text(json.dumps(total, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
