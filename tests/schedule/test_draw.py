"""Schedules as text and as SVG."""

from xml.etree import ElementTree

import pytest

import stretto
from stretto.report.charts import checked
from stretto.schedule import draw
from stretto.simulate import simulate

METHODS = ["backprop", "greedy", "overlapping", "overlapping(delay=1)", "chunked(chunks=2)"]


def spans(method, stages=4, turns=3, workers=None, **options):
    return simulate(*stretto.method(method).plan(stages, workers), turns, **options).spans


def test_text_of_greedy():
    assert draw.text(spans("greedy", 3, 2)) == (
        "worker 0  0F0 0B0==== 0F1 0B1==== .   .\n"
        "worker 1  .   1F0 1B0==== 1F1 1B1==== .\n"
        "worker 2  .   .   2F0 2B0==== 2F1 2B1===="
    )


def test_text_of_nothing():
    assert draw.text([]) == ""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers", [1, 3, 5])
def test_text_has_every_action_once(method, workers):
    drawn = spans(method, 5, 3, workers)
    text = draw.text(drawn)
    words = text.replace("=", " ").split()
    assert len(text.splitlines()) == workers
    for span in drawn:
        assert words.count(str(span.action)) == (span.end > span.start)


def test_text_fits_the_width_and_tells():
    text = draw.text(spans("overlapping", 3, 3), width=40)
    assert text == (
        "worker 0  F0I0..W0F1I1..W1F2I2..W2..\n"
        "worker 1  ..F0I0..W0F1I1..W1F2I2..W2\n"
        "worker 2  ....F0I0W0..F1I1W1..F2I2W2\n"
        "(to scale, with names as short as the room)"
    )
    text = draw.text(spans("overlapping", 5, 4), width=20)
    assert max(map(len, text.splitlines()[:-1])) <= 20
    assert text.startswith("worker 0  FI.WFI.WFI\n")
    assert text.endswith("; cut: 53% of the time is drawn)")
    many = draw.text(spans("greedy", 70, 1))
    assert "64 of 70 workers" in many.splitlines()[-1]
    assert len(many.splitlines()) == 65


def test_text_of_measured_times_is_to_scale():
    """A backward takes 2.3 times its forward; where a worker has two stages, names keep their stage."""
    times = {"F": 0.31, "B": 0.713}
    drawn = spans("1f1b(microbatches=3)", 2, 1, durations=lambda action: times.get(action.kind, 0.0))
    text = draw.text(drawn, None, 50)
    assert text.splitlines()[0] == "worker 0  F0 F1 .......B0==== F2 B1==== ...B2===="
    drawn = spans("interleaved", 4, 1, 2, durations=lambda action: times.get(action.kind, 0.0))
    assert "0B0=== " in draw.text(drawn, None, 100)


def shapes(svg):
    root = ElementTree.fromstring(svg)
    return root, [str(element.tag).rpartition("}")[2] for element in root.iter()]


@pytest.mark.parametrize("method", METHODS)
def test_svg_is_shapes_and_text_that_a_report_takes(method):
    drawn = spans(method)
    svg = draw.svg(drawn, title="<a & b>")
    root, tags = shapes(svg)
    assert checked(svg, method) == svg
    assert set(tags) <= {"svg", "g", "rect", "text", "title"}
    boxes = [span for span in drawn if span.end > span.start]
    assert tags.count("g") == len(boxes)
    width, height = (float(value) for value in root.attrib["viewBox"].split()[2:])
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, w, h = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height


def test_svg_is_to_scale():
    root, _ = shapes(draw.svg(spans("greedy", 1, 1)))
    forward, backward = (float(group[1].attrib["width"]) for group in root.iter("{http://www.w3.org/2000/svg}g"))
    assert backward + 1 == pytest.approx(2 * (forward + 1), abs=0.02)


def test_svg_of_a_long_schedule_is_cut_and_says_so(monkeypatch):
    """With room for few workers and actions; and for as many as people can tell apart."""
    monkeypatch.setattr(draw, "MOST_WORKERS", 8)
    monkeypatch.setattr(draw, "MOST_ACTIONS", 16)
    assert_cut(10, 20, "greedy (cut: 8 of 10 workers, up to 24 of ")


@pytest.mark.slow
def test_svg_of_a_schedule_that_is_too_long_to_be_read_is_cut_and_says_so():
    assert_cut(80, 150, "greedy (cut: 64 of 80 workers, up to 192 of ")


def assert_cut(stages, turns, said):
    svg = draw.svg(spans("greedy", stages, turns), title="greedy")
    _, tags = shapes(svg)
    assert said in svg
    assert tags.count("g") <= draw.MOST_WORKERS * draw.MOST_ACTIONS
    assert "(cut" not in draw.svg(spans("greedy", draw.MOST_WORKERS, draw.MOST_ACTIONS // 2))


def test_svg_of_nothing():
    assert checked(draw.svg([]), "nothing")
