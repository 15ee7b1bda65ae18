"""What one worker records, and what is left of it on disk."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.errors import UsageError
from stretto.schedule import Action
from stretto.tracing import Count, Mark, Recording, Span, read_recordings


def recorded(worker: int = 3) -> Recording:
    recording = Recording(worker, name="stages 3, 7")
    recording.span("wait", "1F5", 100, 150)
    recording.span("compute", Action("F", 3, 5), 150, 250)
    recording.sent("activation 3>4", 5, 240)
    recording.received("activation 2>3", 5, 149)
    recording.count("delay of stage 3", 250, 2)
    recording.count("bytes", 251, 0.5)
    return recording


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    path = recorded().write(tmp_path)
    again = Recording.read(path)
    assert path.name == "trace-worker-3.jsonl"
    assert (again.worker, again.name, again.host) == (3, "stages 3, 7", recorded().host)
    assert again.spans == [Span("wait", "1F5", 100, 150), Span("compute", "3F5", 150, 250)]
    assert again.sends == [Mark("activation 3>4", 5, 240)]
    assert again.receipts == [Mark("activation 2>3", 5, 149)]
    assert again.counts == [Count("delay of stage 3", 250, 2), Count("bytes", 251, 0.5)]
    assert [path.name for path in tmp_path.iterdir()] == ["trace-worker-3.jsonl"]


def test_names_are_text_before_and_after_writing() -> None:
    assert [span.name for span in recorded().spans] == ["1F5", "3F5"]


def test_times_are_those_of_rank_0(tmp_path: Path) -> None:
    recording = recorded()
    recording.offset = -90
    again = Recording.read(recording.write(tmp_path))
    assert again.offset == -90
    assert again.spans == recording.spans
    assert again.spans[0] == Span("wait", "1F5", 10, 60)
    assert again.sends[0].time == 150
    assert again.receipts[0].time == 59
    assert again.counts[0].time == 160


def test_the_last_events_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    recording = Recording(limit=10)
    for n in range(12):
        recording.span("compute", n, n, n + 1)
        recording.count("n", n, n)
    assert recording.dropped == 14
    assert [span.start for span in recording.spans] == [7, 8, 9, 10, 11]
    again = Recording.read(recording.write(tmp_path))
    assert (again.dropped, again.spans, again.counts) == (14, recording.spans, recording.counts)


def test_a_file_cut_off_anywhere_after_its_header_gives_the_lines_that_are_whole(tmp_path: Path) -> None:
    path = recorded().write(tmp_path)
    content = path.read_bytes()
    whole = [0, *itertools.accumulate(len(line) for line in content.splitlines(keepends=True))]
    for length in range(whole[1], len(content)):
        path.write_bytes(content[:length])
        again = Recording.read(path)
        events = len(again.spans) + len(again.sends) + len(again.receipts) + len(again.counts)
        assert events == sum(end <= length for end in whole[2:])


@pytest.mark.parametrize("text", ["", "hello\n", "[]\n", '{"stretto-trace": 99}\n'])
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace-worker-0.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"trace-worker-0\.jsonl"):
        Recording.read(path)


def test_damage_in_the_middle_is_named_with_its_line(tmp_path: Path) -> None:
    path = recorded().write(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "?\n", *lines[3:]]))
    with pytest.raises(UsageError, match="line 3 is no JSON"):
        Recording.read(path)


def test_all_workers_of_a_run_in_order(tmp_path: Path) -> None:
    assert read_recordings(tmp_path) == []
    for worker in (10, 2, 0):
        recorded(worker).write(tmp_path)
    assert [recording.worker for recording in read_recordings(tmp_path)] == [0, 2, 10]


def test_recording_needs_neither_torch_nor_perfetto() -> None:
    code = "import sys, stretto.tracing.perfetto, stretto.simulate.timeline\n"
    code += "print({'torch', 'perfetto'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
