"""Records an emulation as if each worker of the schedule did its part itself. Time is that of the one device."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import torch

from stretto.emulate.emulator import Emulator
from stretto.nn.devices import synchronizer
from stretto.schedule import Action
from stretto.stage.interpreter import count
from stretto.tracing import Recording
from stretto.tracing.naming import channel, worker_name


def record(emulators: Sequence[Emulator], device: torch.device) -> list[Recording]:
    """Let emulators that take turns (the phases of a method) write the same recordings, one a worker of the schedule.

    On an accelerator, where computation goes on after the host's function has returned, it is waited for.
    """
    widest = max((emulator.schedule for emulator in emulators), key=lambda schedule: schedule.num_workers)
    recordings = [Recording(worker, name=worker_name(worker, widest)) for worker in range(widest.num_workers)]
    for emulator in emulators:
        emulator.record = Recorder(emulator, recordings, synchronizer(device))
    return recordings


class Recorder:
    """What an emulator calls after each action.

    A message is received when it is sent: on one device values do not travel. Counters of each stage are its delay
    (updates between a micro-batch's forward and backward) and the forwards it keeps something of for their backward.
    """

    def __init__(
        self, emulator: Emulator, recordings: Sequence[Recording], finish: Callable[[], object] | None
    ) -> None:
        self._emulator = emulator
        self._recordings = recordings
        self._finish = finish

    def __call__(self, action: Action, operands: Mapping[str, Any], start: int, end: int) -> None:
        """`action` has run; what it consumed is still among the emulator's values, what it made is not yet."""
        if self._finish is not None:
            self._finish()
            end = perf_counter_ns()
        homes = self._emulator.schedule.worker_of
        here = homes[action.stage]
        recording = self._recordings[here]
        recording.span("compute", action, start, end)
        for edge in self._emulator.rules.makes(action):
            there = homes.get(edge.stage, here)
            if there != here:
                name = channel(edge)
                recording.sent(name, action.microbatch, end)
                self._recordings[there].received(name, action.microbatch, end)
        count(recording, self._emulator, action, operands, end)
