"""Where runs were computed, in words."""

from dataclasses import replace

from stretto.report.html import render
from stretto.report.record import several_devices

from .synthetic import make_page, run


def test_several_devices_are_said_once():
    here, old = replace(run([1.0, 0.5]), device="cpu", threads=1), run([1.0, 0.5])
    assert several_devices((here, here, old)) == ""
    mixed = (here, replace(here, device="NVIDIA H200"), here, replace(here, threads=4))
    sentence = (
        "Runs were not all computed alike: 2 on cpu, 1 thread; 1 on NVIDIA H200, 1 thread; 1 on cpu, 4 threads. "
        "Do not compare their seconds."
    )
    assert several_devices(mixed) == sentence
    assert render(make_page(mixed)).count(sentence) == 1
    assert "not all computed alike" not in render(make_page((here,)))
