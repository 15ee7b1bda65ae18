"""The progress of `Trainer.fit` on stderr: one live line on a terminal, elsewhere a line per tenth of the work."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

REFRESH = 0.1  # seconds between two changes of the live line


class ProgressLine:
    """Progress that is not shown, and the interface of what shows it. `total` is in steps, None while it is unknown."""

    def __init__(self, total: int | None = None, done: int = 0) -> None:
        self.total, self.done = total, done
        self.shown_at = 0.0  # of time.perf_counter

    def advance(self, text: Callable[[], str], seconds_per_step: Callable[[], float]) -> None:
        """One step is done; `text` has its figures. Both are asked for only where they are shown."""
        self.done += 1


class PrintedProgress(ProgressLine):
    """A line on stderr whenever another tenth is done; every so many steps where the total is unknown."""

    EVERY = 100

    def advance(self, text: Callable[[], str], seconds_per_step: Callable[[], float]) -> None:
        super().advance(text, seconds_per_step)
        if self.total is None:
            if self.done % self.EVERY == 0:
                say(f"fit: step {self.done}, {text()}")
        elif self.done * 10 // self.total > (self.done - 1) * 10 // self.total:
            left = max(0, self.total - self.done) * seconds_per_step()
            say(f"fit: {self.done * 100 // self.total} %, {text()}, {left:.0f} s left")


@contextmanager
def progress_line(total: int | None, done: int, *, shown: bool) -> Iterator[ProgressLine]:
    """Show progress towards `total` steps, `done` of which were made before."""
    if not shown:
        yield ProgressLine(total, done)
        return
    from rich.console import Console

    console = Console(file=sys.stderr, soft_wrap=False, highlight=False)
    if not console.is_terminal:
        yield PrintedProgress(total, done)
        return
    from rich import progress as rich

    columns = (  # no bar: figures of a usual size fit into 80 characters
        rich.TextColumn("fit"),
        rich.TaskProgressColumn(),
        rich.TextColumn("{task.fields[text]}"),
        rich.TimeRemainingColumn(compact=True),
        rich.TextColumn("left"),
    )
    with rich.Progress(*columns, console=console) as bar:
        task = bar.add_task("fit", total=total, completed=done, text="")

        class DrawnProgress(ProgressLine):
            def advance(self, text: Callable[[], str], seconds_per_step: Callable[[], float]) -> None:
                super().advance(text, seconds_per_step)
                now = time.perf_counter()
                if now > self.shown_at + REFRESH or self.done == self.total:
                    self.shown_at = now
                    bar.update(task, total=self.total, completed=self.done, text=text())

        yield DrawnProgress(total, done)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
