"""What an attack is: a module with `attack(seed) -> Outcome`. README.md has the protocol."""

import importlib
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

HERE = Path(__file__).parent
NO_ATTACKS = {"__init__", "protocol", "run"}


@dataclass(frozen=True)
class Outcome:
    """What one case came to: what was `tried`, and why it counts as a failure, or None.

    `passed` sorts cases without failure for the counts.
    """

    tried: str
    failure: str | None = None
    passed: str = "passed"


@dataclass(frozen=True)
class Attack:
    """One attack: its name, how many seeds `make test` tries, when a case has hung, and how to try one."""

    name: str
    share: int
    limit: float
    run: Callable[[int], Outcome]

    def case(self, seed: int) -> Outcome:
        """Try one case. An error that the attack lets out, or more seconds than its limit, is a failure."""
        try:
            with warnings.catch_warnings(), interrupted(self.limit):
                warnings.simplefilter("ignore")
                return self.run(seed)
        except Hung:
            return Outcome(f"{self.name} {seed}", f"took longer than {self.limit} s\n{traceback.format_exc()}")
        except Exception:  # noqa: BLE001 (told as a failure)
            return Outcome(f"{self.name} {seed}", f"the attack itself raised\n{traceback.format_exc()}")

    def again(self, seed: int) -> str:
        """The command that tries a case again."""
        return f"python tests/attack/run.py --only {self.name} --seed {seed}"


class Hung(BaseException):
    """A case took too long. Not an Exception: what is attacked must not swallow it."""


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Raise Hung in the block after so many seconds; needs the main thread."""

    def ring(_: int, __: FrameType | None) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def names() -> list[str]:
    """The attacks in this folder."""
    files = (path.stem for path in HERE.glob("*.py"))
    return sorted(name for name in files if name not in NO_ATTACKS and not name.startswith("test_"))


def find(name: str) -> Attack:
    """The attack in the file of that name."""
    if str(HERE.parent) not in sys.path:
        sys.path.insert(0, str(HERE.parent))
    module = importlib.import_module(f"attack.{name}")
    return Attack(name, module.SHARE, getattr(module, "LIMIT", 60.0), module.attack)
