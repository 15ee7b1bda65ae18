"""Progress on stderr: a live bar where there is a terminal, a line now and then where there is none."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from stretto.cli.output import console


class Progress(Protocol):
    """Shows how far the work is."""

    def advance(self, steps: int) -> None:
        """Count so many more steps as done."""

    def note(self, text: str) -> None:
        """Show a text after the bar from now on."""


class Silent:
    """Progress that is not shown."""

    def advance(self, steps: int) -> None:
        """Show nothing of the steps that are done."""

    def note(self, text: str) -> None:
        """Show nothing of the text."""


class Lines(Silent):
    """Progress as lines on stderr, one whenever another tenth of the work is done."""

    def __init__(self, title: str, total: int, done: int) -> None:
        self.title, self.total, self.done = title, total, done
        self._note, self._before = "", done

    def advance(self, steps: int) -> None:
        """Count steps; print a line if they complete a tenth of the work, but the last: `end` does, with what it is."""
        before, self.done = self.done, self.done + steps
        if self.done < self.total and self.done * 10 // self.total > before * 10 // self.total:
            self._print()

    def end(self) -> None:
        """Print the last line, if all the work is done."""
        if self.done >= self.total and self.done > self._before:
            self._print()

    def _print(self) -> None:
        print(f"{self.title}: {self.done * 100 // self.total} % {self._note}".rstrip(), file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Keep a text for the end of the next line."""
        self._note = text


@contextmanager
def progress(title: str, total: int, *, done: int = 0, silent: bool = False) -> Iterator[Progress]:
    """Show progress towards `total` steps, `done` of which were made before."""
    target = console(stderr=True)
    if silent:
        yield Silent()
    elif not target.is_terminal:
        lines = Lines(title, total, done)
        yield lines
        lines.end()
    else:
        from rich import progress as rich

        columns = (
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.TaskProgressColumn(),
            rich.TextColumn("{task.fields[note]}"),
            rich.TimeElapsedColumn(),
            rich.TextColumn("left"),
            rich.TimeRemainingColumn(),
        )
        with rich.Progress(*columns, console=target) as bar:
            task = bar.add_task(title, total=total, completed=done, note="")

            class Bar:
                def advance(self, steps: int) -> None:
                    bar.advance(task, steps)

                def note(self, text: str) -> None:
                    bar.update(task, note=text)

            yield Bar()


def rising(advance: Callable[[int], object], most: int) -> Callable[[int], None]:
    """Call `advance` with what is new of a number that rises up to `most`, wherever a larger one is told."""
    done = 0

    def tell(number: int) -> None:
        nonlocal done
        if (now := min(number, most)) > done:
            advance(now - done)
            done = now

    return tell
