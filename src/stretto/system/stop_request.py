"""Ctrl-C and SIGTERM as requests that are granted after the current step."""

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

from stretto import interrupts

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Records Ctrl-C and SIGTERM as requests to stop; the second one raises KeyboardInterrupt. Use as context manager.

    Signals within a second count as one: processes of a job get theirs from the terminal and from the launcher. Outside
    the main thread, where Python allows no handlers, it records nothing.
    """

    def __init__(self) -> None:
        self._received_at: float | None = None
        self._former: dict[int, Any] = {}

    @property
    def received(self) -> bool:
        """Whether this process has been asked to stop."""
        return self._received_at is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received_at is None:
            self._received_at = time.monotonic()
        elif time.monotonic() > self._received_at + interrupts.ONE:
            interrupts.interrupt(number, frame)
