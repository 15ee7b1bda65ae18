"""A study file: a figure or a table of a paper as settings, for a cluster and for the machine at hand.

    title = "..."
    source = "the paper, its figure or table"
    claim = "what the paper says of it"
    methods = ["backprop", "greedy"]        # settings of both sizes
    [small]                                 # those of one size
    data = "digits"
    [full]
    data = "cifar10"
    [parts.narrow]                          # a figure of several sweeps: what is different in one of them ...
    model_options = { width = 64 }
    [parts.narrow.small]                    # ... at one size
    steps = 100

The strongest is said last, and the command line is stronger than all. `parts = ["narrow"]` in a size's table takes some
of them only. `commands = [...]` instead of settings names what makes a table that no training makes.
"""

import itertools
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import UsageError, nearest
from stretto.options.kinds import parse_toml
from stretto.system.path_names import in_path

if TYPE_CHECKING:
    from stretto.report.record import Heading

SIZES = ("small", "full")
WORDS = ("title", "source", "claim")
KEYS = (*WORDS, *SIZES, "parts", "commands")


def study_file(file: Path) -> "StudyFile | None":
    """Read a study file; None for a plain list of settings. Raises UsageError for what is neither.

    Where there is no such file, it is the name of a study that comes with Stretto.
    """
    try:
        content = read(file)
    except UsageError as error:
        known = built_in()
        if not isinstance(error.__cause__, FileNotFoundError) or not known:
            raise
        if file.stem not in known or file.suffix not in ("", ".toml"):
            raise UsageError(f"{error}, nor a study of this name: {nearest(file.stem, known)}") from error
        file = known[file.stem]
        content = read(file)
    return StudyFile(file, content) if any(key in content for key in KEYS) else None


def built_in() -> dict[str, Path]:
    """The study files that come with Stretto, by name: in the package, or beside its sources."""
    package = Path(__file__).parents[1]
    found = (folder.glob("*.toml") for folder in (package.parents[1] / "studies", package / "studies"))
    return {file.stem: file for files in found for file in sorted(files)}


def read(file: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises UsageError where there is no such file, or it is no TOML."""
    try:
        return parse_toml(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no configuration file {file}") from error
    except OSError as error:
        raise UsageError(f"cannot read the configuration file {file}: {error.strerror}") from error
    except ValueError as error:  # TOML or UTF-8
        raise UsageError(f"{file} is no TOML file: {error}") from error


@dataclass(frozen=True)
class StudyFile:
    """What a study file says. Its form is checked here; its settings are checked by whoever reads them."""

    path: Path
    content: Mapping[str, Any]

    def __post_init__(self) -> None:
        for word in WORDS:
            if not isinstance(self.content.get(word, ""), str):
                raise UsageError(f'{self.path}: {word} = {self.content[word]!r}: write {word} = "..."')
        if "title" not in self.content:
            raise UsageError(
                f'{self.path}: a study file has a title: write title = "..." above all tables, and '
                "source and claim where it is a paper's"
            )
        for place, table in ((f"[{size}]", self.content.get(size, {})) for size in SIZES):
            self._check_table(place, table)
        parts = self.content.get("parts", {})
        self._check_table("[parts.NAME]", parts)
        for name, table in parts.items():
            in_path(name, f"{self.path}: the name of a part")
            self._check_table(f"[parts.{name}]", table)
            for size in SIZES:
                self._check_table(f"[parts.{name}.{size}]", table.get(size, {}))
        for table in (self.content, *(self.content.get(size, {}) for size in SIZES)):
            self._check_commands(table.get("commands", []))

    def _check_table(self, place: str, table: object) -> None:
        if not isinstance(table, Mapping):
            raise UsageError(f"{self.path}: {place} is {table!r}: write {place} and its settings below")

    def _check_commands(self, commands: object) -> None:
        if not isinstance(commands, list) or not all(isinstance(command, str) for command in commands):
            raise UsageError(f'{self.path}: commands = {commands!r}: write commands = ["stretto ...", ...]')

    @property
    def sizes(self) -> tuple[str, ...]:
        """Those of `small` and `full` for which the file has a table."""
        return tuple(size for size in SIZES if size in self.content)

    def size(self, asked: str | None) -> str:
        """The size that is meant, `small` unless another was asked for. Raises UsageError for one that is not there."""
        size = asked or SIZES[0]
        if size not in SIZES:
            raise UsageError(f"size={size!r}: {nearest(size, SIZES)}")
        if size not in self.sizes:
            tables = " and ".join(f"[{name}]" for name in self.sizes) or "neither [small] nor [full]"
            raise UsageError(f"{self.path} has {tables}: add a table [{size}], or ask for another --size")
        return size

    def parts(self, size: str) -> tuple[str, ...]:
        """The parts of a size, in order; none where the study is one sweep. Raises UsageError for unknown ones."""
        every = self.content.get("parts", {})
        chosen = self.content.get(size, {}).get("parts", list(every))
        if not isinstance(chosen, list) or not all(isinstance(name, str) for name in chosen):
            raise UsageError(f'{self.path}: [{size}] parts = {chosen!r}: write parts = ["NAME", ...]')
        for name in chosen:
            self.part(name)
        return tuple(chosen)

    def part(self, name: str) -> Mapping[str, Any]:
        """A part's table. Raises UsageError where there is none of this name."""
        parts: Mapping[str, Mapping[str, Any]] = self.content.get("parts", {})
        if name not in parts:
            raise UsageError(f"{self.path} has no part {name!r}: {nearest(name, parts)}")
        return parts[name]

    def commands(self, size: str) -> tuple[str, ...]:
        """The commands that make the paper's table, where no training makes it."""
        return tuple(self.content.get(size, {}).get("commands", self.content.get("commands", ())))

    def layers(self, size: str | None, part: str | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The settings of a size and a part: from the strongest to the weakest, each with its place."""
        chosen = self.size(size)
        if part is not None:
            table = self.part(part)
            yield f"{self.path}: [parts.{part}.{chosen}]", table.get(chosen, {})
            yield f"{self.path}: [parts.{part}]", without(table, SIZES)
        yield f"{self.path}: [{chosen}]", without(self.content[chosen], ("parts", "commands"))
        yield f"{self.path}", without(self.content, KEYS)

    def tables(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """All settings of all sizes and parts, each with its place."""
        for size, part in itertools.product(self.sizes, (None, *self.content.get("parts", {}))):
            yield from self.layers(size, part)

    def heading(self, size: str | None, part: str | None) -> "Heading":
        """The title, source and claim above the report. Raises UsageError for a size that is not there."""
        from stretto.report.record import Heading  # the report takes a while to import

        words = {word: self.content.get(word, "") for word in WORDS}
        return Heading(**words, name=self.path.stem, size=self.size(size), part=part or "")

    def refuse_commands(self, size: str) -> None:
        """Raise UsageError where no training makes the table."""
        commands = self.commands(size)
        if commands:
            listing = "; ".join(shlex.join(shlex.split(command)) for command in commands)
            raise UsageError(f"{self.path} is no training study, its table is made by other commands: {listing}")


def without(table: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """A table without some of its keys."""
    return {key: value for key, value in table.items() if key not in keys}
