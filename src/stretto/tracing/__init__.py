"""What a run did and when: recorded by each worker, read by people in Perfetto and in the report. No torch in here."""

from stretto.tracing.recording import Count, Mark, Recording, Span, read_recordings

__all__ = ["Count", "Mark", "Recording", "Span", "read_recordings"]
