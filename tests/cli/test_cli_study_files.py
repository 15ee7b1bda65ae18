"""Study files: what a paper's figure says, at the size of the machine at hand."""

import json
import tomllib

import pytest

from stretto.cli import main
from stretto.cli.study_file import built_in

STUDY = """
title = "Narrow and wide"
source = "Somebody 2020, figure 3"
claim = "Width <matters>."
methods = ["backprop", "greedy"]
lr = 0.05
seeds = 1
batch_size = 32
evaluations = 2
model_options = { depth = 3, width = 8 }

[small]
steps = 4

[full]
steps = 9
parts = ["wide"]

[parts.narrow]
model_options = { width = 4 }

[parts.wide]
lr = [0.1, 0.2]
model_options = { width = 16 }
[parts.wide.full]
lr = 0.3
"""
WHOLE = STUDY.partition("[parts")[0].replace('parts = ["wide"]\n', "")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many.toml").write_text(STUDY)
    (tmp_path / "one.toml").write_text(WHOLE)


def settings(capsys, *words):
    assert main(["compare", *words, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_strongest_is_said_last_and_the_command_line_is_stronger(capsys):
    assert settings(capsys, "one.toml")["steps"] == 4
    assert settings(capsys, "one.toml", "--size", "full")["steps"] == 9
    small = settings(capsys, "many.toml")["parts"]
    assert list(small) == ["narrow", "wide"]
    assert [each["model_options"] for each in small.values()] == [{"depth": 3, "width": 4}, {"depth": 3, "width": 16}]
    assert [each["lr"] for each in small.values()] == [[0.05], [0.1, 0.2]]
    full = settings(capsys, "--size", "full", "many.toml")["parts"]
    assert {name: (each["steps"], each["lr"]) for name, each in full.items()} == {"wide": (9, [0.3])}
    forced = settings(capsys, "many.toml", "--lr", "0.7", "--model-options.width", "2")["parts"]
    assert {(*each["lr"], each["model_options"]["width"]) for each in forced.values()} == {(0.7, 2)}
    assert settings(capsys, "many.toml", "--part", "wide")["lr"] == [0.1, 0.2]


def test_a_dry_run_names_its_parts(capsys):
    assert main(["compare", "many.toml", "--dry-run"]) == 0
    _, narrow, wide = capsys.readouterr().out.split("# part ")
    assert tomllib.loads(narrow.removeprefix("narrow\n"))["model_options"]["width"] == 4
    assert tomllib.loads(wide.removeprefix("wide\n"))["model_options"]["width"] == 16


@pytest.mark.slow
def test_each_part_has_a_page_that_says_what_it_is_about(capsys, tmp_path):
    assert main(["compare", "many.toml", "--jobs", "1", "--methods", "greedy", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["parts"]
    assert [len(each["runs"]) for each in found.values()] == [1, 2]
    assert found["wide"]["report"].startswith("runs/many-small-wide-")
    page = (tmp_path / found["wide"]["report"]).read_text(encoding="utf-8")
    for text in ("<h1>Narrow and wide: wide</h1>", "Width &lt;matters&gt;.", "Somebody 2020, figure 3", "<dd>small"):
        assert text in page
    folder = found["wide"]["report"].rpartition("/")[0]
    assert main(["report", folder, "--quiet"]) == 0
    assert "Somebody 2020, figure 3" in (tmp_path / folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_folder_of_ones_own_holds_one_for_each_part(capsys, tmp_path):
    assert main(["compare", "many.toml", "--jobs", "1", "--methods", "greedy", "--out", "s"]) == 0
    assert sorted(path.parent.name for path in (tmp_path / "s").glob("*/report.html")) == ["narrow", "wide"]
    assert "Narrow and wide: narrow (small)" in capsys.readouterr().out


MISTAKES = {
    ("one.toml", "--size", "ful"): "size='ful': did you mean 'full'",
    ("one.toml", "--part", "wide"): "one.toml has no part 'wide': there are none",
    ("many.toml", "--part", "wdie"): "many.toml has no part 'wdie': did you mean 'wide'",
    ("plain.toml", "--size", "full"): "size='full' is one of a study file: name its file, or leave --size out",
    ("--part", "wide"): "part='wide' is one of a study file",
    ("one.toml", "--examples", "64"): "steps=4, examples=64: give one of both",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_flags_that_do_not_fit_the_file(capsys, tmp_path, words):
    (tmp_path / "plain.toml").write_text("steps = 3\n")
    assert main(["compare", *words, "--json"]) == 2
    assert MISTAKES[words] in capsys.readouterr().err


FILES = {
    "[small]\n[full]\n": "s.toml: a study file has a title: write title",
    "title = 3\n[small]": 's.toml: title = 3: write title = "..."',
    "title = 't'": "s.toml has neither [small] nor [full]: add a table [small], or ask for another --size",
    "title = 't'\n[full]": "s.toml has [full]: add a table [small]",
    "title = 't'\nsmall = 3": "s.toml: [small] is 3: write [small] and its settings below",
    "title = 't'\n[small]\n[parts]\na = 1": "s.toml: [parts.a] is 1: write [parts.a] and its settings below",
    "title = 't'\nstpes = 3\n[small]": "s.toml: unknown key 'stpes': did you mean 'steps'",
    "title = 't'\n[small]\n[full]\nstpes = 3": "s.toml: [full]: unknown key 'stpes': did you mean 'steps'",
    "title = 't'\n[small]\n[parts.a.small]\nstpes = 3": "s.toml: [parts.a.small]: unknown key 'stpes'",
    "title = 't'\n[small]\nlr = []": "s.toml: [small]: lr = []: give at least one value",
    "title = 't'\n[small]\nparts = 'a'": "s.toml: [small] parts = 'a': write parts = [",
    "title = 't'\n[small]\nparts = ['b']\n[parts.a]": "s.toml has no part 'b': choose from a",
    "title = 't'\ncommands = ['stretto plan']\n[small]": "s.toml is no training study, its table is made by other "
    "commands: stretto plan",
    "title = 't'\ncommands = 'stretto plan'\n[small]": "s.toml: commands = 'stretto plan': write commands = [",
    "title = 't'\nsteps = 3\n[small]\nexamples = 64": "steps=3, examples=64: give one of both (with the settings in",
}


@pytest.mark.parametrize("text", FILES)
def test_mistakes_in_a_study_file_name_the_place(capsys, tmp_path, text):
    (tmp_path / "s.toml").write_text(text)
    assert main(["compare", "s.toml", "--json"]) == 2
    out, err = capsys.readouterr()
    assert FILES[text] in err
    assert (out, err.count("\n")) == ("", 1)


def test_a_study_that_comes_with_the_package_goes_by_its_name(capsys):
    words = ["--part", "resnet-20", "--methods", "pb"]
    named = settings(capsys, "pb-cifar10", *words)
    assert named["model"] == "cifar-resnet"
    assert settings(capsys, "pb-cifar10.toml", *words) == named
    (file,) = [file for name, file in built_in().items() if name == "pb-cifar10"]
    assert settings(capsys, str(file), *words) == named


def test_a_file_is_stronger_than_a_study_of_its_name(capsys, tmp_path):
    (tmp_path / "pb-cifar10.toml").write_text(WHOLE)
    assert settings(capsys, "pb-cifar10.toml")["steps"] == 4


def test_an_unknown_study_is_answered_with_the_nearest(capsys):
    assert main(["compare", "pb-cifar11"]) == 2
    assert "no configuration file pb-cifar11, nor a study of this name: did you mean 'pb-cifar10'" in (
        capsys.readouterr().err
    )
