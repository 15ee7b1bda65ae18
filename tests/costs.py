"""What each test costs: processes started, training steps, random examples, seconds of CPU; and how much all may cost.

Processes and steps are counted in the process of pytest and in those that tests fork from one that runs Python: each
adds a byte to a file. `make test` fails when a sum passes its limit in budget.toml; --compare-cpu compares CPU seconds,
which depend on the machine (costs.csv). `python tests/costs.py FILE [BEFORE]` makes a table of what --costs wrote.
"""

import collections
import contextlib
import csv
import hashlib
import json
import multiprocessing.process
import multiprocessing.util
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

COUNTED = ("processes", "steps", "examples")
FOLDER = "STRETTO_TEST_COUNTS"  # environment variable: where the files are to which bytes are added
HERE = Path(__file__).parent
BUDGET, TABLE = HERE / "budget.toml", HERE / "costs.csv"
COLUMNS = ("test", *COUNTED, "cpu", "longest", "reason")  # of all its cases; of that with most CPU
COSTLY = {"processes": 1, "steps": 100, "examples": 50, "cpu": 0.1}  # a test that needs no less stands in the table
LONG = 0.5  # CPU seconds of one case of a quick test that need a reason
TWICE = 2.0  # how much more CPU than in the table is too much
ONCE = 4.0  # seconds that whichever test comes first pays: to import transformers, or what processes are forked from
SHORT = 0.03  # seconds in which no other process does much for a test; looking at them would take longer
TICKS = os.sysconf("SC_CLK_TCK")


# -- counting ----------------------------------------------------------------------------------------------------------


def count(what, number=1):
    """Add to the count of the test that runs, if there is one."""
    folder = os.environ.get(FOLDER)
    if folder:
        with contextlib.suppress(OSError), Path(folder, what).open("ab", buffering=0) as file:
            file.write(b"." * number)


def count_processes():
    """Count processes that this one and its forks start from now on."""
    os.register_at_fork(before=lambda: count("processes"))
    counting(subprocess.Popen, "__init__", "processes")
    counting(multiprocessing.process.BaseProcess, "start", "processes")
    counting(multiprocessing.util, "spawnv_passfds", "processes")


def count_steps():
    """Count training steps of this process and of its forks from now on."""
    from stretto.trainer.trainer import Trainer

    counting(Trainer, "step", "steps")


def counting(owner, name, what):
    """Let a function count its calls."""
    function = getattr(owner, name)

    def call(*args, **kwargs):
        count(what)
        return function(*args, **kwargs)

    call.__wrapped__ = function
    call.__doc__, call.__name__, call.__qualname__ = function.__doc__, function.__name__, function.__qualname__
    setattr(owner, name, call)


def cpu_of_others():
    """CPU seconds of all that descend from this process, those that have ended and been waited for included."""
    if sys.platform != "linux":
        return sum(os.times()[2:4])
    total, left = sum(os.times()[2:4]), children(os.getpid())
    while left:
        pid = left.pop()
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / TICKS
            left += children(pid)
    return total


def children(pid):
    """The processes that one has started, as the kernel lists them."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (thread / "children").read_text().split())
    return found


def processes_started():
    """How many the tests have started so far."""
    return Path(os.environ[FOLDER], "processes").stat().st_size


# -- in each process of pytest -----------------------------------------------------------------------------------------


class Ledger:
    """Notes what each test costs, in this process of pytest."""

    def __init__(self, folder):
        self.folder, self.rows, self._others = folder, [], cpu_of_others()
        os.environ[FOLDER] = str(folder)
        for what in COUNTED:
            (folder / what).touch()
        count_processes()
        count_steps()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        """Files that take long come first, so that no process has one left when the others have ended."""
        files = collections.Counter()
        for name, row in read_table()[0].items():
            files[name.partition("::")[0]] += float(row["cpu"])
        items.sort(key=lambda item: -files[item.nodeid.partition("::")[0]])  # stable: a file's tests stay together
        tests = [item.obj.hypothesis for item in items if hasattr(getattr(item, "obj", None), "hypothesis")]
        for test in {id(test): test for test in tests}.values():
            counting(test, "inner_test", "examples")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        before, began, cpu = self._sizes(), time.monotonic(), time.process_time()
        result = yield
        counts = [now - then for now, then in zip(self._sizes(), before, strict=True)]
        cpu = time.process_time() - cpu
        if time.monotonic() - began > SHORT:
            others = cpu_of_others()
            cpu, self._others = cpu + others - self._others, others
        self.rows.append([item.nodeid, *counts, round(cpu, 3)])
        return result

    def _sizes(self):
        return [(self.folder / what).stat().st_size for what in COUNTED]


# -- over all of them --------------------------------------------------------------------------------------------------


def by_test(rows):
    """Sums for each test, whatever its parameters, and the most CPU of one case."""
    sums = collections.defaultdict(lambda: [0, 0, 0, 0.0, 0.0])
    for name, *costs in rows:
        of_test = sums[name.partition("[")[0]]
        for i, cost in enumerate(costs):
            of_test[i] += cost
        of_test[4] = max(of_test[4], costs[3])
    return dict(sums)


def read_table():
    """The costly tests on record, by name, and the CPU seconds of the reference and of all tests on that machine."""
    with TABLE.open(newline="") as file:
        table = {row["test"]: row for row in csv.DictReader(file)}
    return table, float(table.pop("reference")["cpu"]), float(table.pop("all")["cpu"])


def write_table(rows):
    """Record the costly tests, with the reasons that are known."""
    reasons = {name: row["reason"] for name, row in read_table()[0].items()} if TABLE.exists() else {}
    least = list(COSTLY.values())
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        why = "arithmetic that tells how fast the machine is"
        writer.writerow(["reference", 0, 0, 0, f"{reference():.4f}", 0, why])
        sums = [sum(row[i] for row in rows) for i in range(1, 5)]
        writer.writerow(["all", *sums[:3], f"{sums[3]:.1f}", 0, ""])
        for name, costs in sorted(by_test(rows).items()):
            if any(cost >= enough for cost, enough in zip(costs[:4], least, strict=True)):
                reason = reasons.get(name, "") if costs[4] > LONG else ""
                writer.writerow([name, *costs[:3], f"{costs[3]:.2f}", f"{costs[4]:.2f}", reason])


def write_budget(rows):
    """Allow a tenth more than it is now."""
    sums = [sum(row[i] for row in rows) for i in (1, 2, 3)]
    lines = [f"{what} = {-(-total * 11 // 10)}\n" for what, total in zip(COUNTED, sums, strict=True)]
    BUDGET.write_text(BUDGET.read_text().partition("processes =")[0] + "".join(lines))


def over_budget(rows):
    """What to say where the quick tests need more than they may, naming those that are new or have grown."""
    limits, (table, _, _) = tomllib.loads(BUDGET.read_text()), read_table()
    said = []
    for i, what in enumerate(COUNTED, start=1):
        total = sum(row[i] for row in rows)
        if total > limits[what]:
            grown = {
                name: costs[i - 1] - int(table[name][what] if name in table else 0)
                for name, costs in by_test(rows).items()
            }
            most = sorted(grown, key=grown.__getitem__, reverse=True)[:8]
            said.append(f"{what}: {total:,} where {BUDGET.name} allows {limits[what]:,}. New since {TABLE.name}:")
            said += [f"    {grown[name]:6,} {name}" for name in most if grown[name] > 0]
    if said:
        said.append("Make them cheaper or mark them slow; else: make costs, and say in the commit why")
    return said


def too_slow(rows):
    """What to say where tests take more CPU than twice what is on record, for a machine of this one's speed."""
    table, then, known = read_table()
    speed = reference() / then
    sums, said = by_test(rows), []
    total = sum(costs[3] for costs in sums.values())
    for name, costs in sorted(sums.items(), key=lambda pair: -pair[1][3]):
        seconds = costs[3] / speed
        before = float(table[name]["cpu"]) if name in table else 0.0
        if seconds > TWICE * max(before, LONG) + ONCE:
            said.append(f"    {seconds:6.2f} s, {before:.2f} on record: {name}")
    if total / speed > TWICE * known:
        said.append(f"    {total / speed:6.2f} s, {known:.2f} on record: all together")
    if said:
        said.insert(0, f"CPU, as on the machine of {TABLE.name} (this one takes {speed:.2f} times as long):")
    return said


def without_reason():
    """Quick tests on record that take long, and nobody says why."""
    rows = read_table()[0].values()
    return [f"{row['test']} takes {row['longest']} s: mark it slow, or give its reason in {TABLE.name}"
            for row in rows if float(row["longest"]) > LONG and not row["reason"]]  # fmt: skip


def reference():
    """CPU seconds of some arithmetic, the least of three."""
    seconds = []
    for _ in range(3):
        before = time.process_time()
        text, total = b"stretto", 0
        for i in range(150_000):
            total += i * i % 7
            if i % 8 == 0:
                text = hashlib.sha256(text).digest()
        seconds.append(time.process_time() - before)
    return min(seconds)


class Accounts:
    """Adds up what the processes of pytest have noted, and judges it. For the process that reports."""

    def __init__(self, config):
        self.config, self.rows, self.said, self.began = config, [], [], time.monotonic()

    def judge(self, whole):
        """Compare with what is on record; `whole`: whether all quick tests have run, and nothing else."""
        given = self.config.option
        if given.costs:
            Path(given.costs).parent.mkdir(parents=True, exist_ok=True)
            Path(given.costs).write_text(json.dumps({"seconds": time.monotonic() - self.began, "rows": self.rows}))
        if given.keep_costs:
            write_table(self.rows)
            write_budget(self.rows)
        elif whole:
            self.said += over_budget(self.rows) + (too_slow(self.rows) if given.compare_cpu else [])
        return not self.said


# -- a table for people ------------------------------------------------------------------------------------------------


def by_folder(file):
    """Tests, processes, steps, examples and CPU of each folder."""
    sums = collections.defaultdict(lambda: [0, 0, 0, 0, 0.0])
    for name, *costs in json.loads(Path(file).read_text())["rows"]:
        parts = name.partition("::")[0].split("/")
        of_folder = sums["/".join(parts[:2]) if len(parts) > 2 else "tests/*.py"]
        for i, cost in enumerate((1, *costs)):
            of_folder[i] += cost
    return dict(sums)


def main():
    """Print a Markdown table of one file, or of two, the later one first."""
    now, before = by_folder(sys.argv[1]), by_folder(sys.argv[2]) if len(sys.argv) > 2 else None
    print("| folder | tests | processes | steps | examples | CPU s |" + " before |" * (before is not None))
    print("|---|" + "---:|" * (5 + (before is not None)))
    rows = [*sorted(now, key=lambda folder: -now[folder][4]), "all"]
    for table in filter(None, (now, before)):
        table["all"] = [sum(column) for column in zip(*table.values(), strict=True)]
    for folder in rows:
        *counts, cpu = now[folder]
        then = "" if before is None else f" {before.get(folder, [0.0])[-1]:.1f} |"
        print(f"| {folder} | " + " | ".join(f"{each:,}" for each in counts) + f" | {cpu:.1f} |{then}")


if __name__ == "__main__":
    main()
