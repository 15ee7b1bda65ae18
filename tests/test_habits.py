"""What keeps the project in order: workflows, commit subjects, releases."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import stretto

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCE = 'import x\n\n__version__ = "0.1.0"\n__all__ = []\n'


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release, commit_subject = script("release"), script("commit_subject")


def test_the_workflow_runs_what_ci_runs_on_every_supported_cpython():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    supported = [found[1] for line in PROJECT["classifiers"] if (found := re.search(r"Python :: (3\.\d+)$", line))]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == supported
    assert {"run": "bash .ci/run"} in jobs["tests"]["steps"]
    assert [step["run"] for step in jobs["packages"]["steps"] if "run" in step] == ["make docs", "make wheel"]


@pytest.mark.parametrize("path", [*sorted(ROOT.glob(".github/**/*.yml")), ROOT / ".pre-commit-config.yaml"], ids=str)
def test_files_of_the_forge_can_be_read(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_commands_of_the_habits_exist():
    makefile = (ROOT / "Makefile").read_text()
    pages = "".join((ROOT / page).read_text() for page in ("CONTRIBUTING.md", "README.md", "docs/releases.md"))
    for target in set(re.findall(r"`make ([\w-]+)", pages)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for entry in re.findall(r"scripts/\w+\.py", makefile + pages + (ROOT / ".pre-commit-config.yaml").read_text()):
        assert (ROOT / entry).exists(), entry


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("A site\n\nWhy.\n", None),
        ("x" * 72, None),
        ("x" * 73, "73 characters, 1 too many"),
        ("A site\nWhy.\n", "second line is not empty"),
        ("\nA site\n", "empty line"),
        ("# a remark of git's\nA site\n", None),
    ],
)
def test_subjects_of_commits(message, complaint):
    found = commit_subject.complaint(message)
    assert found is complaint if complaint is None else complaint in found


def test_a_release_sets_the_version_in_its_one_place():
    assert release.with_version(SOURCE, "0.2.0") == SOURCE.replace("0.1.0", "0.2.0")
    assert release.current(Path(stretto.__file__).read_text()) == release.parse(stretto.__version__)
    assert "version" in PROJECT["dynamic"]
    for wrong, message in (("0.0.9", "lower"), ("0.2", "no version")):
        with pytest.raises(SystemExit, match=message):
            release.with_version(SOURCE, wrong)


def test_a_release_needs_its_section_of_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)[1]
    assert release.parse(newest) >= release.parse(stretto.__version__)
    assert release.section(changelog, newest)
    with pytest.raises(SystemExit, match="says nothing of 9"):
        release.section(changelog, "9.0.0")
