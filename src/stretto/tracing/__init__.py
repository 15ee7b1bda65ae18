"""Traces: events of each worker with their times, recorded during a run, for Perfetto and the report. No torch."""

from stretto.tracing.recording import Count, Mark, Recording, Span, read_recordings

__all__ = ["Count", "Mark", "Recording", "Span", "read_recordings"]
