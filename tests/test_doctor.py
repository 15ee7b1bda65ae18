import pytest

from stretto import doctor


def test_everything_that_is_needed_is_here():
    findings = {finding.name: finding for finding in doctor.examine()}
    assert list(findings) == list(doctor.CHECKS)
    assert [finding for finding in findings.values() if finding.state == "broken"] == []
    assert all(finding.detail for finding in findings.values())
    assert findings["emulation"].to_json() == {"name": "emulation", "state": "good", "detail": "trains"}


def test_a_check_that_fails_stops_no_other(monkeypatch):
    def breaks():
        raise ImportError("no such library")

    def lacks():
        raise doctor.AbsentError("not here")

    monkeypatch.setattr(doctor, "CHECKS", {"a": breaks, "b": lacks, "c": lambda: "fine"})
    assert [(finding.state, finding.detail) for finding in doctor.examine()] == [
        ("broken", "ImportError: no such library"),
        ("missing", "not here"),
        ("good", "fine"),
    ]


def test_an_old_torch_is_broken(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.9.1")
    with pytest.raises(RuntimeError, match=r"torch 2\.9\.1; at least 2\.10"):
        doctor.torch_works()
