"""A copy of the working tree with an environment of its own, in which pytest runs.

Every process that tests start has to see the copy's source, also where a test sets PYTHONPATH itself or calls the
command `stretto`. So the copy has a `.venv`: its interpreter, its commands, and a path on which its source comes first
and the packages of the checkout's own environment follow.
"""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutations.faults import HERE, ROOT, Fault

PLUGIN = "mutation_recorder"
ALWAYS = ["--dist", "loadfile", "--no-loadscope-reorder"]  # these and the tiers as the Makefile has them
TIERS = {"quick": ALWAYS, "all": [*ALWAYS, "-m", "", "--hypothesis-profile=many"]}
# pytest's exit statuses without a failed test: all passed, over their budget or with something left behind; none ran
NO_TEST_FAILED = (0, 1, 5)
PULSE = 120.0  # seconds from one sign of life to the next


@dataclass(frozen=True)
class Outcome:
    """What one run of pytest came to. `hung`: the tests under way when its time was over; None if it ended before."""

    failed: list[str]
    hung: list[str] | None
    seconds: float
    said: str

    @property
    def good(self) -> bool:
        """Whether all tests passed."""
        return not self.failed and self.hung is None


class Copy:
    """A copy of the working tree, as it is, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, folder], check=True)
        for name in listed("--cached", "--others", "--exclude-standard"):
            source, place = ROOT / name, folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if source.is_file():
                shutil.copy2(source, place)
            else:
                place.unlink(missing_ok=True)
        self.python = environment(folder)
        self._check()

    def _check(self) -> None:
        code = "import stretto; print(stretto.__file__)"
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        place = subprocess.run([self.python, "-c", code], env=clean, capture_output=True, text=True, check=True).stdout
        assert Path(place).is_relative_to(self.folder), f"the copy imports {place}"

    def put(self, fault: Fault) -> None:
        """Write the fault into the copy."""
        self._write(fault.file, fault.applied())

    def mend(self, fault: Fault) -> None:
        """Write the file as it is in the working tree."""
        self._write(fault.file, (ROOT / fault.file).read_text())

    def _write(self, name: str, source: str) -> None:
        path = self.folder / name
        path.write_text(source)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()  # Python goes by the size and the second of the source

    def tests(self, tier: str, jobs: int, what: Sequence[str], limit: float) -> Outcome:
        """Run these tests of a tier, up to the first failure. `what` are words of pytest, `limit` is in seconds."""
        events, said = self.folder / "build" / "events", self.folder / "build" / "said"
        events.parent.mkdir(exist_ok=True)
        events.write_text("")
        command = [self.python, "-m", "pytest", "-x", "-p", PLUGIN, f"--events={events}", *TIERS[tier]]
        command += ["-n", str(jobs), "--ignore=tests/mutations", *what]
        began = time.monotonic()
        with said.open("w") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self._environment(), stdout=file, stderr=file, start_new_session=True
            )
            status = ended(process, limit, lambda: print(f"  {so_far(events)} tests so far", flush=True))
        lines = [line.split(" ", 1) for line in events.read_text().splitlines()]
        failed = list(dict.fromkeys(name for event, name in lines if event == "failed"))
        under_way = {name for event, name in lines if event == "began"} - {name for e, name in lines if e == "ended"}
        text = said.read_text()
        if status not in (None, *NO_TEST_FAILED) and not failed:
            raise RuntimeError(f"pytest ended with {status}, and no test failed:\n{text[-3000:]}")
        hung = sorted(under_way) if status is None else None
        return Outcome(failed, hung, time.monotonic() - began, text)

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        path = os.pathsep.join([str(self.python.parent), os.environ["PATH"]])
        return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}


def listed(*which: str) -> list[str]:
    """The files of the working tree that git knows, or would."""
    told = subprocess.run(["git", "ls-files", "-z", *which], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [name for name in told.stdout.split("\0") if name]


def environment(folder: Path) -> Path:
    """Make the copy's environment; returns its interpreter."""
    place, own = folder / ".venv", Path(sysconfig.get_path("purelib"))
    venv.EnvBuilder(symlinks=True).create(place)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "copy.pth").write_text(f"{folder / 'src'}\n{own}\n")
    shutil.copy(HERE / "recorder.py", packages / f"{PLUGIN}.py")
    python = place / "bin" / "python"
    for command in Path(sys.prefix, "bin").iterdir():
        target = place / "bin" / command.name
        if not target.exists() and command.is_file():
            _copy_command(command, target, python)
    return python


def _copy_command(command: Path, target: Path, python: Path) -> None:
    first, _, rest = command.read_bytes().partition(b"\n")
    if first.startswith(b"#!" + os.fsencode(sys.prefix)):
        target.write_bytes(b"#!" + os.fsencode(python) + b"\n" + rest)
        target.chmod(0o755)
    else:
        target.symlink_to(command)


def ended(process: "subprocess.Popen[bytes]", limit: float, tell: Callable[[], None] = lambda: None) -> int | None:
    """The exit status of a process in a session of its own; None where its time was over, and all of it was killed."""
    end = time.monotonic() + limit
    try:
        while (left := end - time.monotonic()) > 0:
            try:
                return process.wait(min(PULSE, left))
            except subprocess.TimeoutExpired:
                tell()
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def so_far(events: Path) -> int:
    """How many tests have ended."""
    return sum(line.startswith("ended ") for line in events.read_text().splitlines())
