"""How busy a machine is, by a made-up file of the system's."""

import os
import time

import pytest

from stretto.measure import busy_cores as module
from stretto.measure.busy_cores import busy_cores, busy_seconds

LINE = "cpu  {user} 20 300 99999 50000 4 6 70 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n"


def test_what_waits_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STAT", tmp_path / "stat")
    (tmp_path / "stat").write_text(LINE.format(user=1000))
    assert busy_seconds() == pytest.approx((1000 + 20 + 300 + 4 + 6 + 70) / os.sysconf("SC_CLK_TCK"))


def test_only_what_is_used_in_a_moment_counts(tmp_path, monkeypatch):
    used = iter((5.0, 5.3))
    monkeypatch.setattr(module, "busy_seconds", lambda: next(used))
    begin = time.perf_counter()
    busy = busy_cores(0.1)
    assert 0.3 / (time.perf_counter() - begin) <= busy <= 3.0


def test_elsewhere_the_load_average_stands_for_it(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "STAT", tmp_path / "none")
    monkeypatch.setattr(os, "getloadavg", lambda: (1.25, 9.0, 9.0), raising=False)
    assert busy_cores() == 1.25
    monkeypatch.delattr(os, "getloadavg", raising=False)
    assert busy_cores() is None
