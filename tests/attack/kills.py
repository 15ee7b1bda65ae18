"""`stretto train --workers 2` of which one process is killed, told to end, or stopped, at a random moment.

Whatever comes of it, no process stays, no file in TMPDIR but those of a killed launcher, which the next command
removes, and nobody prints a traceback (but Python's tracker of resources, about the one that was killed before it).
What is started again, or goes on, comes to the weights of an undisturbed run to the bit.
"""

import functools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from attack.protocol import Outcome

SHARE = 1
LIMIT = 400.0
STEPS = 200
GONE = 10.0  # seconds in which all processes have to end
SMALL = ("--model-options.width", "8", "--model-options.depth", "4", "--batch-size", "32", "--evaluations", "3")
METHODS = (
    "backprop",
    "gpipe",
    "1f1b",
    "zb-h1",
    "pb",
    "pb-lwp-sc",
    "pipedream-2bw",
    "greedy",
    "overlapping",
    "pipemare",
)
DRAINED = ("backprop", "gpipe", "1f1b", "zb-h1")  # a stop in between changes no number
SERVER = "parameter-server(staleness=2)"
SYNCS = (None, None, "all-reduce", "fully-shard", "local-sgd(every=4)", "diloco(every=4)", SERVER)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)
VICTIMS = ("launcher", "server", "tracker", "worker 0", "worker 1")
TRACKERS = r"Traceback[^\n]*\n *File [^\n]*resource_tracker.py[^\n]*\n[^\n]*\n(?: *\^*\n)?KeyError: [^\n]*\n"
MARK = "STRETTO_ATTACK"  # in the environment of every process of a case


@dataclass(frozen=True)
class Case:
    """What is run, and what happens to it."""

    words: tuple[str, ...]
    restarts: int
    method: str
    sync: str | None
    victim: str
    number: signal.Signals
    moment: str
    delay: float

    @property
    def exact(self) -> bool:
        """Whether an undisturbed run comes to the same weights: a parameter server's order is free."""
        return self.sync is None or not self.sync.startswith("parameter")

    @property
    def drained(self) -> bool:
        """Whether it may be stopped anywhere without a change."""
        return self.exact and self.method in DRAINED and self.sync in (None, "all-reduce", "fully-shard")


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    sync = rng.choice(SYNCS)
    method = rng.choice(DRAINED if sync == "fully-shard" else METHODS)  # it gathers the current weights only
    if sync == SERVER and method == "pb-lwp-sc":  # spike compensation needs the optimizer, which is at the server
        method = "pb-lwpw"
    words = ["train", *SMALL, "--steps", str(STEPS), "--method", method, "--quiet"]
    if sync is not None:
        words += ["--data-parallel", "2", "--sync", sync]
    if rng.random() < 0.7:
        words += ["--checkpoint-every", "40"]
    number, victim = rng.choice(SIGNALS), rng.choice(VICTIMS)
    first = 1 if victim.startswith("worker") else 0  # they are not there before
    moment, delay = rng.choice([("begun", 6.0), ("forked", 0.5), ("trains", 0.5)][first:])
    return Case(tuple(words), rng.choice((0, 2)), method, sync, victim, number, moment, delay * rng.random())


def attack(seed: int) -> Outcome:
    """Try one case."""
    case = draw(seed)
    tried = f"{case.number.name} to {case.victim}, {case.delay:.2f} s after it {case.moment}: {' '.join(case.words)}"
    tried += f" --restarts {case.restarts}"
    with tempfile.TemporaryDirectory() as folder:
        found = Round(case, Path(folder))
        try:
            failure = found.play()
        finally:
            found.clear()
    return Outcome(tried, failure, f"{case.number.name} {case.victim.split()[0]}" if found.hit else "ended before")


class Round:
    """One case in a folder of its own."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.hit = case, folder, False
        self.mark = uuid.uuid4().hex
        self.scratch = folder / "tmp"
        self.scratch.mkdir()
        self.commands: list[subprocess.Popen[str]] = []

    def play(self) -> str | None:
        """Run, hit, look, and go on from what is kept; what is wrong, or None."""
        case = self.case
        words = ("--workers", "2", "--restarts", str(case.restarts), "--timeout", "15", "--auto-resume")
        command = self.start(*words)
        self.strike(command)
        code, said = self.ended(command)
        wrong = self.judge(code, said)
        if wrong or code == 0:
            return wrong or self.compare(stopped=False)
        kept = list(self.folder.glob(".run.checkpoints/step-*"))
        again = self.start(*words)  # the same, as a job array repeats it
        code, said = self.ended(again)
        if code != 0:
            return f"the next command ends with {code}: {said}"
        return self.left(swept=True) or self.compare(stopped=bool(kept))

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """The command, with more words."""
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(self.scratch), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "stretto", *self.case.words, *words, "--out", "run"]
        said = (self.folder / "said").open("w")
        with said:
            made = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=said, stderr=said, start_new_session=True, text=True
            )
        self.commands.append(made)
        return made

    def strike(self, command: "subprocess.Popen[str]") -> None:
        """Wait for the moment, then send the signal; who was stopped goes on after a second, but a worker."""
        reached = {"begun": lambda: True, "forked": self.workers, "trains": self.trains}[self.case.moment]
        while command.poll() is None and not reached():
            time.sleep(0.02)
        time.sleep(self.case.delay)
        victim = self.find(command)
        if victim is None or command.poll() is not None:
            return
        try:
            os.kill(victim, self.case.number)
            self.hit = True
            if self.case.number == signal.SIGSTOP and not self.case.victim.startswith("worker"):
                time.sleep(1)
                os.kill(victim, signal.SIGCONT)
        except ProcessLookupError:
            return

    def processes(self) -> dict[int, tuple[int, str]]:
        """All of this case: parent and command line by process id."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (entry / "environ").read_bytes():
                    state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                    if state != "Z":
                        found[int(entry.name)] = (int(parent), (entry / "cmdline").read_text())
            except OSError:
                continue
        return found

    def server(self, command: "subprocess.Popen[str]", kind: str) -> int | None:
        """The launcher's fork server or tracker."""
        there = self.processes().items()
        return next((pid for pid, (parent, words) in there if parent == command.pid and kind in words), None)

    def workers(self) -> list[int]:
        """What the fork server has forked."""
        server = self.server(self.commands[-1], "forkserver")
        return sorted(pid for pid, (parent, _) in self.processes().items() if parent == server and server is not None)

    def trains(self) -> bool:
        """Whether both workers have begun to train."""
        return all((self.folder / ".run.partial" / f"worker-{rank}.jsonl").exists() for rank in (0, 1))

    def find(self, command: "subprocess.Popen[str]") -> int | None:
        """Whom the signal is for, if it is there already."""
        kind, _, number = self.case.victim.partition(" ")
        if kind == "launcher":
            return command.pid
        if kind != "worker":
            return self.server(command, {"server": "forkserver", "tracker": "resource_tracker"}[kind])
        workers = self.workers()
        return workers[int(number)] if len(workers) > int(number) else None

    def ended(self, command: "subprocess.Popen[str]") -> tuple[int, str]:
        """How a command has ended, and what it said."""
        code = command.wait(LIMIT / 2)
        return code, (self.folder / "said").read_text()

    def judge(self, code: int, said: str) -> str | None:
        """What is wrong with how the command that was hit has ended."""
        case = self.case
        until = time.monotonic() + GONE
        while there := self.processes():
            if time.monotonic() > until:
                return f"processes stay: {there}"
            time.sleep(0.05)
        if (case.victim, case.number) == ("tracker", signal.SIGKILL):
            said = re.sub(TRACKERS, "", said)
        killed = case.victim == "launcher" and case.number == signal.SIGKILL and self.hit
        early = case.victim == "launcher" and "stretto:" not in said and case.moment == "begun" and self.hit
        wrong = None
        if "Traceback" in said and not early:
            wrong = "a traceback"
        elif code not in self.expected(killed=killed, early=early):
            wrong = f"exit code {code}"
        elif code == 1 and "stretto: " not in said:
            wrong = "no message"
        return f"{wrong}: {said}" if wrong else None if killed else self.left(swept=False)

    def expected(self, *, killed: bool, early: bool) -> tuple[int, ...]:
        """The exit codes that may come of it."""
        case = self.case
        if killed:
            return (-signal.SIGKILL, 0)
        if early:  # while Python itself begins
            return (0, 1, 130, -case.number, 128 + case.number)
        if case.victim == "launcher" and case.number in (signal.SIGTERM, signal.SIGINT):
            return (130, 0)
        fatal = case.number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP) and case.victim.startswith("worker")
        fatal = fatal or (case.victim, case.number) == ("server", signal.SIGKILL)
        return (0, 1) if self.hit and fatal and not case.restarts else (0,)

    def left(self, *, swept: bool) -> str | None:
        """Files that are left in TMPDIR; torch keeps a cache there."""
        names = [path.name for path in self.scratch.iterdir() if not path.name.startswith("torchinductor_")]
        return f"files stay{' after the next command' * swept}: {names}" if names else None

    def compare(self, *, stopped: bool) -> str | None:
        """Whether the weights are those of an undisturbed run."""
        interrupted = stopped and self.case.number in (signal.SIGTERM, signal.SIGINT)
        if not (self.case.drained if interrupted or self.told_to_stop() else self.case.exact):
            return None
        weights = safetensors.torch.load_file(self.folder / "run" / "model.safetensors")
        wanted = undisturbed(self.case.words)
        same = weights.keys() == wanted.keys() and all(torch.equal(weights[key], wanted[key]) for key in wanted)
        return None if same else "other weights than without"

    def told_to_stop(self) -> bool:
        """Whether a worker has saved and drained because it was told to end, and was started again."""
        return self.hit and self.case.number == signal.SIGTERM and self.case.victim.startswith("worker")

    def clear(self) -> None:
        """End what is left, and only that."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for command in self.commands:
            command.wait()


@functools.lru_cache(maxsize=64)
def undisturbed(words: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The weights that the command comes to in one process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "stretto", *words, "--out", "run"]
        subprocess.run(command, cwd=folder, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return safetensors.torch.load_file(Path(folder) / "run" / "model.safetensors")
