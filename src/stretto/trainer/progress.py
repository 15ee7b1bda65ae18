"""Progress on stderr: one live line on a terminal, elsewhere a line per tenth of the work."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich import progress as rich

EVERY = 100  # steps between two lines where the total is unknown


class Progress:
    """Counts steps towards `total`, None while it is unknown, and shows nothing.

    What is shown after the share is `note`, or else what `figures` return whenever something is shown.
    """

    def __init__(self, title: str, total: int | None, done: int = 0, figures: Callable[[], str] | None = None) -> None:
        self.title, self.total, self.done, self.figures = title, total, done, figures
        self.note = ""
        self._before = done

    def __str__(self) -> str:
        return self.note if self.figures is None else self.figures()

    def advance(self, steps: int = 1) -> None:
        """Count so many more steps as done."""
        self.done += steps

    def reach(self, done: int) -> None:
        """Count what is new of a number that rises up to `total`, wherever a larger one is told."""
        if (new := (done if self.total is None else min(done, self.total)) - self.done) > 0:
            self.advance(new)


class Lines(Progress):
    """A line whenever another tenth of the work is done; the last one, if it has a note, at the `end`."""

    def advance(self, steps: int = 1) -> None:
        before = self.done
        super().advance(steps)
        if self.total is None:
            if self.done // EVERY > before // EVERY:
                say(f"{self.title}: step {self.done}, {self}")
        elif self.done * 10 // self.total > before * 10 // self.total and (self.figures or self.done < self.total):
            self._print()

    def end(self) -> None:
        """Print the last line, if all the work is done, with what it has come to."""
        if self.figures is None and self.done > self._before and self.total is not None and self.done >= self.total:
            self._print()

    def _print(self) -> None:
        assert self.total is not None
        share = f"{self.title}: {self.done * 100 // self.total} %"
        say(f"{share} {self}".rstrip() if self.figures is None else f"{share}, {self}")


class Live(Progress):
    """A line of a terminal, which is drawn again ten times a second."""

    bar: "rich.Progress"
    task: "rich.TaskID"

    def advance(self, steps: int = 1) -> None:
        super().advance(steps)
        self.bar.advance(self.task, steps)


@contextmanager
def progress(
    title: str,
    total: int | None,
    *,
    done: int = 0,
    silent: bool = False,
    lines: bool = True,
    figures: Callable[[], str] | None = None,
) -> Iterator[Progress]:
    """Show progress towards `total` steps, `done` of which were made before.

    Without `lines` nothing is shown where stderr is no terminal. With `figures` there is no bar: they fit into 80
    characters without one.
    """
    if silent:
        yield Progress(title, total, done)
        return
    from rich.console import Console

    console = Console(file=sys.stderr, soft_wrap=False, highlight=False)
    if console.is_terminal:
        from rich import progress as rich

        times = (rich.TimeElapsedColumn(), rich.TextColumn("left"), rich.TimeRemainingColumn())
        columns = (
            rich.TextColumn("{task.description}"),
            *(() if figures else (rich.BarColumn(),)),
            rich.TaskProgressColumn(),
            rich.TextColumn("{task.fields[live]}"),
            *(() if figures else times),
        )
        live = Live(title, total, done, figures)
        with rich.Progress(*columns, console=console) as live.bar:
            live.task = live.bar.add_task(title, total=total, completed=done, live=live)
            yield live
    elif lines:
        printed = Lines(title, total, done, figures)
        yield printed
        printed.end()
    else:
        yield Progress(title, total, done)


def say(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)
