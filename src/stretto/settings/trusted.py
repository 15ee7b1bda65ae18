"""Functions of the user's that a run's folder names, named again by whoever has them called."""

from dataclasses import dataclass
from typing import Annotated

from stretto.settings.command_line import TEXTS


@dataclass(frozen=True, kw_only=True)
class Trusted:
    """The functions that a folder's settings name are called only if the command names them, too.

    A folder may come from somebody else, and what it names would be executed.
    """

    model: str | None = None
    """The run's own network, path/to/file.py:function, where it has one: it is called only if it is named here."""
    data: str | None = None
    """Its data, alike."""
    loss: str | None = None
    """Its loss, alike."""
    metric: Annotated[tuple[str, ...], TEXTS] = ()
    """Its metrics, alike: NAME=path/to/file.py:function."""
    optimizer: str | None = None
    """Its optimizer, alike."""
    method: Annotated[tuple[str, ...], TEXTS] = ()
    """Its methods of your own, alike."""

    @property
    def functions(self) -> tuple[str, ...]:
        """All that are named."""
        from stretto.settings.runs import parse_metric

        named = [text for text in (self.model, self.data, self.loss, self.optimizer) if text is not None]
        return (*named, *self.method, *(parse_metric(text)[1] for text in self.metric))
