"""What was measured, kept and used."""

import pytest

from stretto.collectives import ALGORITHMS, Calibration, Link, formula
from stretto.collectives.calibration import NOMINAL, SizeTimes, cheapest, predicted
from stretto.collectives.pricing import compared
from stretto.collectives.reduce import algorithm_for, node_size_for
from stretto.errors import UsageError

LINK = Link(latency=1e-4, seconds_per_byte=1e-9, reduction_seconds_per_byte=2e-10)


def calibration(workers=4, per_node=2):
    small = {"torch": 0.5, **dict.fromkeys(ALGORITHMS, 2.0), "recursive-doubling": 1.0}
    large = {"torch": 0.5, **dict.fromkeys(ALGORITHMS, 2.0), "hierarchical": 1.0}
    rows = (SizeTimes(1024, small), SizeTimes(1 << 20, large))
    return Calibration(workers=workers, per_node=per_node, link=LINK, measured=rows)


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "collectives.toml"
    file.write_text(calibration().to_toml())
    assert Calibration.read(file) == calibration()
    assert "seconds_per_byte = 1e-09" in file.read_text()


def test_what_is_no_calibration_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no calibration in .*absent.toml: No such file"):
        Calibration.read(tmp_path / "absent.toml")
    for text in ("workers = 2", "workers", "all_reduce = 3\nlatency = 1"):
        (tmp_path / "other.toml").write_text(text)
        with pytest.raises(UsageError, match=r"is no calibration .*write one with stretto calibrate --collectives"):
            Calibration.read(tmp_path / "other.toml")


def test_auto_is_what_was_fastest_at_the_nearest_size():
    found = calibration()
    assert (
        algorithm_for(found, 4, 0)
        == algorithm_for(found, 4, 2000)
        == algorithm_for(found, 4, 32_000)
        == "recursive-doubling"
    )
    assert (
        algorithm_for(found, 4, 33_000) == algorithm_for(found, 4, 1 << 26) == "hierarchical"
    )  # torch's own is not ours to choose
    assert algorithm_for(found, 3, 0) == cheapest(LINK, 3, 0)  # another number of processes


def test_auto_without_a_calibration_follows_the_formulas():
    for size in range(2, 18):
        small, large = algorithm_for(None, size, 64), algorithm_for(None, size, 1 << 28)
        seconds = {name: predicted(name, NOMINAL, size, 1 << 28) for name in ALGORITHMS}
        assert large == min(seconds, key=seconds.get)
        assert formula(small, size, 0).messages == min(
            formula(name, size, 0, per_node=1).messages for name in ALGORITHMS if name != "hierarchical"
        )
    assert algorithm_for(None, 8, 64) == "recursive-doubling"


def test_a_calibrated_node_is_used_again():
    class Group:
        def size(self):
            return 4

    assert node_size_for(Group(), calibration()) == 2
    assert node_size_for(Group(), calibration(workers=8)) is None


def test_rows_have_what_the_formula_says():
    rows = {(row.bytes, row.algorithm): row for row in compared(calibration())}
    assert len(rows) == 2 * (len(ALGORITHMS) + 1)
    ring = rows[1 << 20, "ring"]
    assert (ring.messages, ring.sent) == (6, 3 * 2**19)
    assert ring.predicted == pytest.approx(6e-4 + 1.5 * 2**20 * 1e-9 + 0.75 * 2**20 * 2e-10)
    assert ring.ratio == pytest.approx(2 / ring.predicted)
    two_levels = rows[1 << 20, "hierarchical"]
    assert two_levels.fastest
    assert two_levels.messages == 4
    assert rows[1024, "torch"].ratio is None
