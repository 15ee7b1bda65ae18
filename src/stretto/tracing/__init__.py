"""Traces: what each worker did and when, recorded while it runs, shown in Perfetto and the report. No torch in here."""

from stretto.tracing.recording import Count, Mark, Recording, Span, read_recordings

__all__ = ["Count", "Mark", "Recording", "Span", "read_recordings"]
