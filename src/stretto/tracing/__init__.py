"""Traces: events of each worker with their times, recorded during a run, for Perfetto and the report. No torch.

A worker appends tuples; text, pairing and tracks are made afterwards. Real, emulated and simulated runs give the same
recordings. Ramp, steady state and drain are read off the order of actions (`run_phases.py`). Pauses are recorded, and
cut out where all workers pause at once. A run without a steady state is compared with the same turns from the first
one on. The profiler's clock is found by eight marks at each end of a step.
"""

from stretto.tracing.recording import Count, Mark, Recording, Span, read_recordings

__all__ = ["Count", "Mark", "Recording", "Span", "read_recordings"]
