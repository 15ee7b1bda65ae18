"""Do the runs of runs.py with the present source, and name each whose weights or losses are not those on record.

    python tests/recorded/compare.py                     against digests.json
    python tests/recorded/compare.py --only pipedream    runs whose names contain a text
    python tests/recorded/compare.py --source ../before --record before.json     make a record of another checkout
    python tests/recorded/compare.py --against before.json                       and compare with it

Exit status: 0 all is as recorded, 1 a run differs, 2 the record is of another machine, or there is none.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DIGESTS = HERE / "digests.json"
REMEDY = """Digests hold for one machine, to the last bit. To compare on this one, record the older commit here first:

    git worktree add ../before COMMIT
    python tests/recorded/compare.py --source ../before --record before.json
    python tests/recorded/compare.py --against before.json
"""


def main() -> int:
    """Record or compare, as the command line says."""
    given = arguments()
    source = (given.source / "src").resolve()
    if not (source / "stretto").is_dir():
        print(f"{source} holds no stretto: give --source the root of a checkout", file=sys.stderr)
        return 2
    on_path(source)
    record = None
    if given.record is None:
        record = read(given.against)
        if record is None:
            return 2
    began = time.monotonic()
    found = digests(given.only or "")
    seconds = f"{time.monotonic() - began:.0f} s, {sum(os.times()[:4]):.0f} s of processor time"
    if record is None:
        write(given.record, {"commit": commit(given.source), "machine": machine()}, found)
        print(f"{given.record}: {len(found)} runs of {source}: {seconds}")
        return int(any("error" in each for each in found.values()))
    return judged(found, {name: each for name, each in record["runs"].items() if (given.only or "") in name}, seconds)


def arguments() -> argparse.Namespace:
    """What stands on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT, help="root of the checkout whose src is run; this one")
    parser.add_argument("--only", metavar="TEXT", help="only runs whose names contain this")
    parser.add_argument("--against", type=Path, default=DIGESTS, metavar="FILE", help="the record to compare with")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what is found instead of comparing")
    return parser.parse_args()


def on_path(source: Path) -> None:
    """That source, here and in every process started from here; one thread, and nobody's calibration."""
    tests = str(HERE.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(source), tests])
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    sys.path[:] = [str(source), tests, *(path for path in sys.path if path != str(HERE))]
    import stretto

    assert Path(stretto.__file__).is_relative_to(source), f"{stretto.__file__} is not of {source}"


def machine() -> dict[str, Any]:
    """What the last bits of a sum depend on."""
    import torch

    return {
        "cpu": cpu(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "python": ".".join(platform.python_version_tuple()[:2]),  # pydoc's text is data of some runs
    }


def cpu() -> str:
    """The model, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.system()} {platform.machine()} {platform.processor()}"
    told = dict(line.split("\t", 1) for line in reversed(lines) if "\t" in line)
    known = [told.get(key, "").strip("\t: ") for key in ("model name", "cpu family", "model", "stepping")]
    return "{}, family {}, model {}, stepping {}".format(*known)


def commit(checkout: Path) -> str:
    """What of git's history a checkout holds."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def read(file: Path) -> dict[str, Any] | None:
    """A record of this machine; None, once it is said why, if there is none."""
    if not file.exists():
        print(f"{file} does not exist.\n{REMEDY}", file=sys.stderr)
        return None
    record: dict[str, Any] = json.loads(file.read_text())
    here = machine()
    others = [
        f"    {key}: {record['machine'].get(key)}; here {here[key]}"
        for key in here
        if here[key] != record["machine"].get(key)
    ]
    if others:
        said = "\n".join(others)
        print(f"{file} was recorded on another machine:\n{said}\n{REMEDY}", file=sys.stderr)
        return None
    return record


def write(file: Path, about: dict[str, Any], runs: dict[str, dict[str, str]]) -> None:
    """A record, a line for each run."""
    head = json.dumps(about, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in runs.items())
    file.write_text(f'{head},\n "runs": {{\n{lines}\n }}\n}}\n')


def digests(only: str) -> dict[str, dict[str, str]]:
    """Of every run, by its name."""
    found = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name, digest in everything(only):
            found[name] = digest
            if sys.stderr.isatty():
                print(f"\r{time.monotonic() - began:4.0f} s  {name[:100]:100}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(f"\r{'':108}\r", end="", file=sys.stderr)
    return found


def everything(only: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Runs on this process, on two, and command lines."""
    import torch

    from recorded import processes
    from recorded.pages import PAGES
    from recorded.runs import COMMANDS, RUNS
    from recorded.training import emulated, of_page, on_line

    torch.set_num_threads(1)
    wanted = [run for run in RUNS if only in run.name]
    for run in wanted:
        if run.processes == 1:
            yield run.name, tried(emulated, run)
    for run, digest in processes.do([run for run in wanted if run.processes > 1]):
        yield run.name, digest
    for command in COMMANDS:
        if only in command.name:
            yield command.name, tried(on_line, command)
    for page in PAGES:
        if only in f"page | {page}":
            yield f"page | {page}", tried(of_page, page)


def tried(do: Any, run: Any) -> dict[str, str]:
    """The digests, or the error that a run ends with."""
    try:
        found: dict[str, str] = do(run)
    except Exception as error:  # noqa: BLE001 (it is told beside the run's name, and the others go on)
        return {"error": f"{type(error).__name__}: {error}"}
    return found


def judged(found: dict[str, dict[str, str]], recorded: dict[str, dict[str, str]], seconds: str) -> int:
    """Name the runs that differ; 1 if there are any."""
    wrong, same = [], 0
    for name in [*recorded, *(name for name in found if name not in recorded)]:
        mine, theirs = found.get(name), recorded.get(name)
        if mine is None or theirs is None:
            wrong.append(f"{name}: {'not on record' if theirs is None else 'recorded, but no longer in the list'}")
        elif "error" in mine:
            wrong.append(f"{name}: {mine['error']}")
        elif mine != theirs:
            what = " and ".join(
                key for key in ("weights", "losses", "json", "page") if mine.get(key) != theirs.get(key)
            )
            last = f"; last loss {mine['last']}, was {theirs.get('last')}" if "last" in mine else ""
            wrong.append(f"{name}: other {what}{last}")
        else:
            same += 1
    print("\n".join([*wrong, f"{same} of {len(found)} runs as recorded: {seconds}"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
