import tomllib
from pathlib import Path

import pytest

from stretto.doctor import environment as doctor

ROOT = Path(__file__).parents[2]


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
    with pytest.raises(RuntimeError, match=r"torch 2\.9\.1; at least 2\.11"):
        doctor.torch_works()


def test_the_oldest_torch_is_the_one_that_is_tested():
    oldest = ".".join(map(str, doctor.OLDEST_TORCH))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={oldest}" in project["dependencies"]
    assert f'"torch=={oldest}.*"' in (ROOT / "tox.toml").read_text()
    assert f"torch {oldest} to" in (ROOT / "README.md").read_text()


def test_the_pythons_that_are_told_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told = [each.rpartition(" ")[2] for each in project["classifiers"] if "Python :: 3." in each]
    ((tested, _),) = (group["product"] for group in tomllib.loads((ROOT / "tox.toml").read_text())["env_list"])
    assert [f"py{version.replace('.', '')}" for version in told] == tested
    assert project["requires-python"] == f">={told[0]}"
