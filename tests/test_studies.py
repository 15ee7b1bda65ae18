"""The studies of the papers: every file can be run as it stands, or says which data set it needs."""

import json
import re
import shlex
from pathlib import Path

import pytest

from stretto import UsageError, method
from stretto.cli import main
from stretto.cli.program import app
from stretto.cli.study_file import study_file
from stretto.settings.runs import check
from stretto.study.prepare import resolve

ROOT = Path(__file__).parent.parent
FROM_FILES = ("cifar10", "cifar100", "text", "imagenet", "saved")
STUDIES = sorted((ROOT / "studies").glob("*.toml"))


LARGE = ("-05", "-06b", "-08", "-10", "imagenet", "iwslt14", "wmt17")  # networks that take a while to build
EACH = [
    pytest.param(
        file, size, marks=[pytest.mark.slow] * (size == "small" and file.stem.endswith(LARGE)), id=f"{size}-{file.stem}"
    )
    for size in ("small", "full")
    for file in STUDIES
]


def settings_of(file, size):
    """Of each part of a study."""
    for part in study_file(file).parts(size) or (None,):
        words = ["compare", str(file), "--size", size, *(["--part", part] if part else [])]
        yield app.parse_args(words, exit_on_error=False, print_error=False)[1].arguments["settings"]


@pytest.mark.parametrize("file", [file for file in STUDIES if file.stem.endswith(LARGE)], ids=lambda file: file.stem)
def test_the_small_size_of_a_study_can_be_read(file):
    for settings in settings_of(file, "small"):
        check(settings)
        assert all(method(name) for name in settings.methods)


@pytest.mark.parametrize(("file", "size"), EACH)
def test_a_study_has_all_but_its_data(file, size):
    study = study_file(file)
    if study.commands(size):
        check_commands(study.commands(size))
        return
    for settings in settings_of(file, size):
        if size == "small":
            assert resolve(settings).stages
        else:
            check(settings)
            assert all(method(name) for name in settings.methods)
            with pytest.raises(UsageError, match=rf"^data set '({'|'.join(FROM_FILES)})': .* is not (there|in )"):
                resolve(settings)


@pytest.mark.parametrize("width", [r"width = 8", pytest.param(r"\g<0>", marks=pytest.mark.slow)], ids=["8", "own"])
def test_a_study_of_several_parts_can_be_run(tmp_path, capsys, width):
    """With networks of 8 units, and as it is."""
    text = (ROOT / "studies" / "local-updates-08.toml").read_text(encoding="utf-8")
    file = tmp_path / "local-updates-08.toml"
    file.write_text(re.sub(r"width = \d+", width, text), encoding="utf-8")
    words = ["--methods", "greedy", "--dry-run", "--json"]
    assert main(["compare", str(file), *words]) == 0
    assert len(json.loads(capsys.readouterr().out)["parts"]) == 4


def check_commands(commands):
    """Those of Stretto can be read; the others are files that are there."""
    for command in commands:
        words = shlex.split(command)
        if "stretto" in words:
            app.parse_args(words[words.index("stretto") + 1 :], exit_on_error=False, print_error=False)
        else:
            assert words[0] == "python"
            assert (ROOT / words[1]).is_file()


def test_every_study_says_whose_it_is():
    assert len(STUDIES) >= 19
    for file in STUDIES:
        assert {"title", "source", "claim", "small", "full"} <= set(study_file(file).content), file


def test_the_demo_has_rivals_and_few_runs():
    """`make demo` answers in minutes: six methods, one batch size, two rates, two seeds."""
    words = ["compare", str(ROOT / "examples" / "demo.toml")]
    assert f"stretto {words[0]} examples/demo.toml" in (ROOT / "Makefile").read_text(encoding="utf-8")
    settings = resolve(app.parse_args(words, exit_on_error=False, print_error=False)[1].arguments["settings"])
    assert {"backprop", "1f1b", "pipedream-2bw", "greedy"} < set(settings.methods)
    assert (len(settings.batch_size), len(settings.lr), settings.seeds, len(settings.runs())) == (1, 2, 2, 24)
