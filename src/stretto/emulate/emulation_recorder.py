"""Records an emulation as one trace per worker of the schedule. Times are those of the one device."""

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
    """Record emulators that take turns (the phases of a method) into the same recordings, one for each worker.

    An accelerator runs asynchronously, so each action ends with a wait for it.
    """
    widest = max((emulator.schedule for emulator in emulators), key=lambda schedule: schedule.num_workers)
    recordings = [Recording(worker, name=worker_name(worker, widest)) for worker in range(widest.num_workers)]
    for emulator in emulators:
        emulator.record = Recorder(emulator, recordings, synchronizer(device))
    return recordings


class Recorder:
    """Records an action; an emulator calls it after each one.

    A message is received at the time it is sent, as on one device values do not travel. The counters of a stage are its
    delay (updates between a micro-batch's forward and backward) and its stashed forwards, whose backward is to come.
    """

    def __init__(
        self, emulator: Emulator, recordings: Sequence[Recording], finish: Callable[[], object] | None
    ) -> None:
        self._emulator = emulator
        self._recordings = recordings
        self._finish = finish

    def __call__(self, action: Action, operands: Mapping[str, Any], start: int, end: int) -> None:
        """Record `action`, run from `start` to `end` ns, while the emulator's values still hold its inputs."""
        if self._finish is not None:
            self._finish()
            end = perf_counter_ns()
        worker_of = self._emulator.schedule.worker_of
        sender = worker_of[action.stage]
        recording = self._recordings[sender]
        recording.span("compute", action, start, end)
        for edge in self._emulator.rules.makes(action):
            receiver = worker_of.get(edge.stage, sender)
            if receiver != sender:
                name = channel(edge)
                recording.sent(name, action.microbatch, end)
                self._recordings[receiver].received(name, action.microbatch, end)
        count(recording, self._emulator, action, operands, end)
