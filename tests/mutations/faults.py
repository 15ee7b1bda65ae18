"""What a fault is: lines of one file before and after, and where a test should see it."""

import ast
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HAND, DRAWN, STRUCK = HERE / "hand.toml", HERE / "drawn.toml", HERE / "struck.toml"
TESTED_IN = {"losses": "trainer"}  # folders of src whose tests stand in one of another name


@dataclass(frozen=True)
class Fault:
    """`before` stands in `file` once, and `after` takes its place. `what` says what goes wrong, `area` where."""

    name: str
    area: str
    file: str
    what: str
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What is the same for the same fault under another name."""
        return self.file, self.before, self.after

    @property
    def likely(self) -> list[str]:
        """The tests that most likely see it: those of the same folder, and the laws."""
        folder = Path(self.file).parts[2]
        return [f"tests/{TESTED_IN.get(folder, folder)}", "tests/laws"]

    def applied(self, root: Path = ROOT) -> str:
        """The file with the fault. Raises ValueError where it no longer fits the source."""
        source = (root / self.file).read_text()
        times = source.count(self.before)
        if times != 1:
            raise ValueError(
                f"{self.name}: its `before` stands {times} times in {self.file}, not once: the source has moved on. "
                "Write the same fault into today's lines, or draw others (README.md)"
            )
        mutated = source.replace(self.before, self.after)
        ast.parse(mutated, self.file)
        return mutated


def read(path: Path) -> list[Fault]:
    """The faults of one of the files in this folder."""
    fields = Fault.__dataclass_fields__
    entries = tomllib.loads(path.read_text()).get("fault", []) if path.exists() else []
    return [Fault(**{key: value for key, value in entry.items() if key in fields}) for entry in entries]


def every() -> list[Fault]:
    """The twenty: those written by hand, then those drawn."""
    return [*read(HAND), *read(DRAWN)]


def as_toml(fault: Fault, **more: str) -> str:
    """A fault as an entry of a file in this folder; source is written as it stands, in literal strings."""
    lines = ["[[fault]]"]
    texts = {"name": fault.name, "area": fault.area, "file": fault.file, "what": fault.what, **more}
    lines += [f"{key} = {quoted(value)}" for key, value in texts.items()]
    lines += [f"{key} = '''\n{value}'''" for key, value in (("before", fault.before), ("after", fault.after))]
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """A string of one line in TOML."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def excerpts(source: str, mutated: str) -> tuple[str, str]:
    """The lines that differ, with as many around them as make the first of the two stand in `source` once."""
    old, new = source.splitlines(keepends=True), mutated.splitlines(keepends=True)
    start = equal(old, new)
    end = equal(old[start:][::-1], new[start:][::-1])
    stop, more = len(old) - end, len(new) - len(old)
    while source.count("".join(old[start:stop])) != 1 or start == stop:
        start, stop = max(0, start - 1), min(len(old), stop + 1)
    return "".join(old[start:stop]), "".join(new[start : stop + more])


def equal(one: Sequence[str], other: Sequence[str]) -> int:
    """How many lines are the same at the beginning of both."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
