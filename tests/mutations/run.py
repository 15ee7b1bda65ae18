"""Put faults into copies of the working tree, and see which tests find them. Exit status 1 if too few are found."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutations.copies import TIERS, Copy
from mutations.draw import drawn
from mutations.faults import DRAWN, HERE, ROOT, Fault, every

RESULT = HERE / "result.json"
ENOUGH = {"quick": 18, "all": 20}
ALONE = 300.0  # seconds after which a test that runs alone hangs, at least
HEADER = "# Ten faults drawn by Cosmic Ray: python tests/mutations/run.py --seed {seed}, at commit {commit}.\n"


@dataclass(frozen=True)
class Verdict:
    """Whether a fault was found, by which test, and after how many seconds.

    `reason` is "fails", or "hang" where tests did not end; of a fault that was not found it is empty.
    """

    name: str
    area: str
    file: str
    what: str
    found: bool
    by: str
    reason: str
    seconds: float

    def __str__(self) -> str:
        found = f"{self.reason}: {self.by}" if self.found else "NOT FOUND"
        return f"{self.name:<30} {self.seconds:6.0f} s  {found}"


class Search:
    """Looks for faults with the tests of one tier, in a copy with the fault and in one without."""

    def __init__(self, folder: Path, tier: str, jobs: int, limit: float) -> None:
        self._faulty, self._clean = Copy(folder / "faulty"), Copy(folder / "clean")
        self._tier, self._jobs, self._limit = tier, jobs, limit
        self._passing: dict[str, float] = {}  # tests that pass without a fault, and their seconds
        self._failing: set[str] = set()  # tests that do not: they find nothing
        self._unsteady: set[str] = set()  # tests that pass with this fault, once they run alone

    def look_for(self, fault: Fault, *, likely_only: bool) -> Verdict:
        """Run the tests that most likely see a fault, then all others, up to the first that finds it."""
        began = time.monotonic()
        self._unsteady.clear()
        self._faulty.put(fault)
        try:
            reason, by = self._first(fault.likely)
            if not reason and not likely_only:
                reason, by = self._first([f"--ignore={folder}" for folder in fault.likely])
        finally:
            self._faulty.mend(fault)
        seconds = round(time.monotonic() - began, 1)
        return Verdict(fault.name, fault.area, fault.file, fault.what, bool(reason), by, reason, seconds)

    def _first(self, what: Sequence[str]) -> tuple[str, str]:
        # The reason, and the test; empty if none finds the fault. A test that does not is left out, and the rest runs.
        while True:
            left_out = [f"--deselect={name}" for name in sorted(self._failing | self._unsteady)]
            outcome = self._faulty.tests(self._tier, self._jobs, [*what, *left_out], self._limit)
            print(f"  {' '.join(what)}: {outcome.seconds:.0f} s, {last_line(outcome.said)}", flush=True)
            suspects = outcome.failed or outcome.hung
            if suspects is None or (not suspects and outcome.hung is None):
                return "", ""
            if not suspects:
                raise RuntimeError(f"no test began within {self._limit:.0f} s:\n{outcome.said[-3000:]}")
            for name in suspects:
                if self._passes(name) and self._fails_again(name):
                    return "fails" if outcome.failed else "hang", name

    def _passes(self, name: str) -> bool:
        # Whether this very test passes without the fault.
        if name not in self._passing and name not in self._failing:
            outcome = self._clean.tests(self._tier, 0, alone(name), self._limit)
            if outcome.good:
                self._passing[name] = outcome.seconds
            else:
                self._failing.add(name)
            print(f"  {name} {'passes' if outcome.good else 'FAILS, too,'} without the fault", flush=True)
        return name in self._passing

    def _fails_again(self, name: str) -> bool:
        # Whether it fails, or hangs, with the fault once more: some tests fail beside others, where a machine is busy.
        limit = max(ALONE, 10 * self._passing[name])
        if not self._faulty.tests(self._tier, 0, alone(name), limit).good:
            return True
        print(f"  {name} passes with the fault, too, when it runs alone", flush=True)
        self._unsteady.add(name)
        return False


def main() -> int:
    """Run what the command line asks for."""
    given = arguments()
    if given.seed is not None:
        DRAWN.write_text(HEADER.format(seed=given.seed, commit=commit()) + "".join(f"\n{e}" for e in drawn(given.seed)))
        print(f"written to {DRAWN.relative_to(ROOT)}: read each; struck.toml is for those that change nothing")
        return 0
    faults = [fault for fault in every() if given.only in (None, fault.name)]
    if not faults:
        sys.exit(f"no fault {given.only!r}; there are: {', '.join(fault.name for fault in every())}")
    verdicts = []
    for verdict in looked_for(faults, given):
        verdicts.append(verdict)
        if not given.likely:
            keep(given.tier, verdict)
    found = sum(verdict.found for verdict in verdicts)
    print("", *verdicts, f"{found} of {len(verdicts)} found", sep="\n")
    return int(found < (ENOUGH[given.tier] if given.only is None else 1))


def arguments() -> argparse.Namespace:
    """What stands on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", choices=TIERS, default="quick", help="which tests: make test, or make test-all")
    parser.add_argument("--only", metavar="NAME", help="one fault, not all")
    parser.add_argument("--likely", action="store_true", help="only the fault's folder and the laws; nothing is kept")
    parser.add_argument("--jobs", type=int, default=3, help="processes of pytest (default: 3)")
    parser.add_argument("--limit", type=float, default=45, help="minutes after which tests hang (default: 45)")
    parser.add_argument("--seed", type=int, help="only draw ten faults by this seed, and write drawn.toml")
    return parser.parse_args()


def looked_for(faults: Sequence[Fault], given: argparse.Namespace) -> Iterator[Verdict]:
    """The verdict on each fault, as soon as there is one."""
    for fault in faults:
        fault.applied()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        search = Search(Path(folder).resolve(), given.tier, given.jobs, 60 * given.limit)
        for number, fault in enumerate(faults, start=1):
            print(f"[{number}/{len(faults)}] {fault.name}: {fault.what}", flush=True)
            verdict = search.look_for(fault, likely_only=given.likely)
            print(f"  {verdict}", flush=True)
            yield verdict


def keep(tier: str, verdict: Verdict) -> None:
    """Write a verdict into the tier's table, in the order of the faults; those on former faults are dropped."""
    tables = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    known = {row["name"]: row for row in tables.get(tier, {}).get("faults", [])}
    known[verdict.name] = {**asdict(verdict), "commit": commit()}
    rows = [known[fault.name] for fault in every() if fault.name in known]
    tables[tier] = {"found": sum(row["found"] for row in rows), "of": len(every()), "faults": rows}
    RESULT.write_text(json.dumps(tables, indent=1) + "\n")


def commit() -> str:
    """What git calls the working tree."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8"]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def alone(name: str) -> list[str]:
    """The words of pytest for one test. A file that cannot be collected stands for all its tests."""
    return [name] if "::" in name else [name, "--collect-only"]


def last_line(said: str) -> str:
    """What pytest says at its end."""
    return (said.strip().splitlines() or ["nothing said"])[-1].strip("= ")


if __name__ == "__main__":
    sys.exit(main())
