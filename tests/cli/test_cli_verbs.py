"""Each verb as a user calls it, in this process."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from xml.etree import ElementTree

import pytest
import safetensors.torch
import torch

import stretto.cli
from stretto.cli import main
from stretto.cli.program import show_warning
from stretto.optimizers import OPTIMIZERS
from stretto.trainer.progress import progress

SMALL = [
    "--model-options.width",
    "8",
    "--model-options.depth",
    "3",
    "--steps",
    "6",
    "--evaluations",
    "2",
    "--batch-size",
    "32",
]
STUDY = ["compare", *SMALL, "--seeds", "1", "--lr", "0.05", "--jobs", "1"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """The folder of a finished study, whose page is plain, and what it said."""
    from stretto.report.html import write

    folder, said = tmp_path_factory.mktemp("study") / "s", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        patch.setattr("stretto.study.report_page.build", lambda page, path: write(page.title, path))
        assert main([*STUDY, "--out", str(folder), "--quiet"]) == 0
    return folder, said.getvalue()


@pytest.fixture
def finished(quiet, tmp_path):
    """A finished study, in the folder s."""
    return shutil.copytree(quiet[0], tmp_path / "s")


def answer(capsys, *words):
    assert main([*words]) == 0
    return capsys.readouterr()


def strict(text):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.usefixtures("plain_pages")
def test_compare_in_a_folder_named_after_its_settings(capsys, tmp_path):
    out, err = answer(capsys, *STUDY)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("compare-mlp-digits-")
    assert "chunked(chunks=2)" in out
    assert "report.html" in out
    assert "mlp on digits: 100 %" in err
    again, err = answer(capsys, *STUDY)
    assert "4 of 4 runs are finished already" in again.replace("\n", " ")
    assert err == ""


@pytest.mark.slow
def test_batch_sizes_side_by_side(capsys, tmp_path):
    """Equal examples, scaled rates, a large-batch optimizer, and what was measured beside the runs."""
    small = [word for word in STUDY if word not in ("--steps", "6", "--batch-size", "32")]
    words = ["--methods", "backprop", "--examples", "192", "--batch-size", "16,64", "--optimizer", "lars"]
    words += ["--reference-batch", "16", "--lr-scaling", "sqrt", "--lr-warmup", "0.25", "--measure", "noise,sharpness"]
    out, err = answer(capsys, *small, *words, "--out", "s", "--json")
    assert err == ""
    runs = strict(out)["runs"]
    assert [each["measured"][-1]["step"] for each in runs] == [12, 3]
    assert all(set(each["measured"][-1]) == {"step", "sharpness", "noise_trace", "gradient_square"} for each in runs)
    assert '<section id="batches">' in (tmp_path / "s" / "report.html").read_text(encoding="utf-8")
    assert "2 of 2 runs are finished already" in answer(capsys, *small, *words, "--out", "s").out.replace("\n", " ")


@pytest.mark.parametrize("precision", ["bf16", "bf16-autocast"])
def test_a_run_in_low_precision(capsys, precision):
    words = ["train", *SMALL, "--method", "greedy", "--precision", precision, "--out", "run", "--json"]
    run = strict(answer(capsys, *words).out)
    assert run["train_loss"] > 0
    low = safetensors.torch.load_file("run/model.safetensors")
    assert {tensor.dtype for tensor in low.values()} == {torch.bfloat16 if precision == "bf16" else torch.float32}
    dry = answer(capsys, "train", "--precision", precision, "--dry-run").out
    assert tomllib.loads(dry)["precision"] == precision


@pytest.mark.usefixtures("plain_pages")
def test_quiet_says_nothing_and_json_one_object(capsys, quiet, finished):
    assert quiet[1] == ""
    out, err = answer(capsys, *STUDY, "--out", "s", "--json")
    assert err == ""
    content = strict(out)
    assert [each["method"] for each in content["runs"]] == ["backprop", "greedy", "overlapping", "chunked(chunks=2)"]
    assert content["report"] == "s/report.html"
    assert answer(capsys, "report", "s", "--quiet") == ("", "")
    assert strict(answer(capsys, "report", "s", "--json").out) == content


@pytest.mark.usefixtures("plain_pages")
def test_the_json_of_runs_that_diverge(capsys):
    words = ["--methods", "backprop,greedy", "--json", "--lr", "1e12"]
    content = strict(answer(capsys, *(word for word in STUDY if word not in ("--lr", "0.05")), *words).out)
    assert {each["status"] for each in content["runs"]} == {"diverged"}
    assert content["runs"][0]["train_loss"] is None
    assert main(["train", *SMALL, "--lr", "1e12", "--json"]) == 1, "a single run that diverged has failed"
    out, err = capsys.readouterr()
    assert strict(out)["status"] == "diverged"
    assert err.endswith("try a smaller --lr\n")
    assert main(["train", *SMALL, "--lr", "1e12", "--method", "pb", "--out", "old"]) == 1
    said = "try a smaller --lr, as gradients 4 updates old bear smaller rates than new ones, or --method pipedream-2bw"
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("plain_pages")
def test_a_half_finished_study_has_a_report(capsys, finished):
    (finished / "runs" / "greedy-lr0.05-b32-s0" / "run.json").unlink()
    out, _ = answer(capsys, "report", "s")
    assert "1 of 4 runs are not finished yet" in out
    assert len(strict(answer(capsys, "report", "s", "--json").out)["runs"]) == 3


@pytest.mark.usefixtures("plain_pages")
def test_train_and_its_report(capsys, tmp_path):
    out, err = answer(capsys, "train", *SMALL, "--method", "overlapping", "--out", "run")
    assert "test_accuracy" in out
    assert "100 %" in err
    content = strict(answer(capsys, "train", *SMALL, "--method", "overlapping", "--out", "run", "--json").out)
    assert {"steps", "seconds_per_step", "train_loss", "test_loss", "test_accuracy", "out"} <= set(content)
    assert content["steps"] == 6
    assert "report: run/report.html" in answer(capsys, "report", "run").out
    assert main(["train", *SMALL, "--out", "run"]) == 2
    assert "method: 'overlapping' there, 'backprop' here" in capsys.readouterr().err


def test_defaults_then_file_then_command_line(capsys, tmp_path):
    (tmp_path / "s.toml").write_text(
        "methods = 'greedy'\nsteps = 7\nseeds = 3\nlr = 0.5\n[model-options]\nwidth = 16\ndepth = 4\n"
    )
    for words in (["s.toml", "--steps", "9"], ["--steps", "9", "s.toml"], ["--lr", "0.1", "0.2", "s.toml"]):
        settings = tomllib.loads(answer(capsys, "compare", *words, "--dry-run").out)
        assert settings["steps"] == (9 if "9" in words else 7)
        assert settings["lr"] == ([0.5] if "9" in words else [0.1, 0.2])
        assert settings["seeds"] == 3
        assert settings["momentum"] == 0.9
    settings = strict(answer(capsys, "compare", "s.toml", "--model-options.width", "8", "--dry-run", "--json").out)
    assert settings["model_options"] == {"width": 8, "depth": 4}
    assert settings["stages"] == 4


@pytest.mark.usefixtures("plain_pages")
def test_a_file_may_hold_every_option(capsys, tmp_path):
    (tmp_path / "s.toml").write_text(
        'out = "x.toml"\nquiet = true\njobs = 1\nseeds = 1\nmethods = "greedy"\nlr = 0.1\n'
    )
    assert answer(capsys, *["compare", *SMALL, "s.toml"]) == ("", "")
    assert (tmp_path / "x.toml" / "report.html").is_file()
    assert answer(capsys, *["compare", *SMALL, "s.toml", "--out", "y.toml"]) == ("", "")
    assert (tmp_path / "y.toml" / "report.html").is_file()


@pytest.mark.parametrize("verb", ["compare", "train"])
def test_a_dry_run_can_be_fed_back_and_makes_nothing(capsys, tmp_path, verb):
    method = ["--methods" if verb == "compare" else "--method", "chunked( chunks = 2 )"]
    first = answer(capsys, verb, *SMALL, *method, "--dry-run").out
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "again.toml").write_text(first)
    assert answer(capsys, verb, "again.toml", "--dry-run").out == first
    assert "chunked(chunks=2)" in first


def test_saved_settings_are_the_resolved_ones(capsys, finished):
    dry = strict(answer(capsys, *STUDY, "--dry-run", "--json").out)
    assert strict((finished / "study.json").read_text())["settings"] == dry


def test_show_as_text_json_and_svg(capsys, tmp_path):
    out, _ = answer(capsys, "show", "greedy", "--stages", "3")
    assert "worker 2  .   .   2F0 2B0====" in out
    assert "auxiliary heads after  0 1" in out
    assert "mean delay" not in out
    out, _ = answer(capsys, "show", "pipemare(microbatches=3)", "--stages", "4")
    assert "delay by stage         2 2 1 0 updates\nmean delay by stage    2 1.33 0.667 0 updates" in out
    words = ["show", "overlapping(delay=1)", "--stages", "4", "--workers", "2", "--svg", "new/folder/s.svg", "--json"]
    facts = strict(answer(capsys, *words).out)
    assert facts["delay"] == facts["mean_delay"] == [1] * 4
    assert facts["steady_bubble"] == pytest.approx(0.0)
    assert facts["workers"] == len(facts["actions"]) == 2
    assert ElementTree.parse(tmp_path / "new" / "folder" / "s.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize("method", ["backprop", "greedy", "overlapping", "chunked(chunks=2)"])
@pytest.mark.parametrize("stages", [2, 40])
def test_show_draws_every_method(capsys, method, stages):
    for workers in (1, stages):
        out, _ = answer(capsys, "show", method, "--stages", str(stages), "--workers", str(workers))
        assert len([line for line in out.splitlines() if line.startswith("worker ")]) == workers
        assert ("is backprop: the loss at the top" in out) == (method == "overlapping" and stages == 2)


def test_doctor(capsys):
    assert "everything Stretto needs is here" in answer(capsys, "doctor").out
    content = strict(answer(capsys, "doctor", "--json").out)
    assert content["ok"] is True
    assert {each["state"] for each in content["checks"]} <= {"good", "missing"}


def test_warnings_of_stretto_are_said_without_a_line_of_code(capsys):
    own, other = stretto.cli.__file__, __file__
    show_warning(UserWarning("the loss is no mean"), UserWarning, own, 7)
    assert capsys.readouterr().err == "stretto: mind: the loss is no mean\n"
    show_warning(UserWarning("theirs"), UserWarning, other, 1)
    show_warning(DeprecationWarning("old"), DeprecationWarning, own, 1)
    said = capsys.readouterr().err
    assert f"{other}:1: UserWarning: theirs" in said
    assert "DeprecationWarning: old" in said


def test_a_full_disk_is_a_failure_not_a_mistake(capsys, monkeypatch):
    monkeypatch.setattr("stretto.study.store.FREE_BYTES", 2**80)
    assert main([*STUDY, "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert " free, a study needs" in err


def test_lines_end_at_100_percent(capsys):
    with progress("title", 4) as bar:
        bar.note = "1/2 runs"
        bar.advance(1)
        bar.advance(3)
    assert capsys.readouterr().err.splitlines() == ["title: 25 % 1/2 runs", "title: 100 % 1/2 runs"]
    with progress("title", 4, silent=True) as bar:
        bar.advance(4)
    assert capsys.readouterr() == ("", "")


def test_the_live_bar_ends_at_100_percent(capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress("title", 4, done=1) as bar:
        bar.note = "2/2 runs"
        bar.advance(3)
    frames = capsys.readouterr().err.split("title")
    assert "100% 2/2 runs" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frames[-1])


def python(code):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


VERBS = ("calibrate", "compare", "diagnose", "doctor", "inspect", "plan", "report", "show", "simulate", "train")
HELP = ["--help", *(f"{verb} --help" for verb in VERBS), "--version"]
ASKED = f"""
import sys
from stretto.cli import main
for words in {HELP}:
    assert main(words.split()) == 0, words
    heavy = {{"torch", "numpy", "sklearn", "altair", "jinja2", "vl_convert"}} & set(sys.modules)
    assert not heavy, (words, heavy)
    print(end="\\f")
assert main(["plan"]) == 2, "it lacks a cluster"
assert "torch" not in sys.modules
"""


def test_help_imports_nothing_heavy_and_fits_on_two_screens():
    done = python(ASKED)
    assert done.returncode == 0, done.stderr
    *helps, version = done.stdout.split("\f")[:-1]
    assert [words.split()[0] for words, said in zip(HELP, helps, strict=False) if "stretto" not in said.lower()] == []
    assert len(helps) == len(HELP) - 1
    assert [said.split()[2] for said in helps if len(said.splitlines()) > 100] == []
    assert version[0].isdigit()
    groups = [
        "Network and data",
        "Training",
        "Stages, workers and replicas",
        "Checkpoints and processes",
        "Evaluation ",
    ]
    for said in helps:
        if said.split()[2] in ("train", "compare"):
            assert sorted(groups, key=said.index) == groups
    for verb in ("train", "compare", "plan", "simulate", "doctor"):
        assert missing_optimizers(next(said for said in helps if said.split()[2] == verb)) == [], verb


def missing_optimizers(said):
    """Of the table, those that the help of --optimizer does not name."""
    option = re.split(r"[│ ]+--", said.partition("--optimizer ")[2])[0]
    return sorted(set(OPTIMIZERS) - set(re.findall(r"[a-z0-9-]+", option)))


def test_a_schedule_goes_to_torch(capsys, tmp_path):
    """The file that `show --csv` writes is what torch.distributed.pipelining reads."""
    answer(capsys, "show", "1f1b", "--stages", "3", "--csv", str(tmp_path / "deep" / "1f1b.csv"))
    rows = (tmp_path / "deep" / "1f1b.csv").read_text().split()
    assert [row.split(",")[0] for row in rows] == ["0F0", "1F0", "2F0"]
    assert main(["show", "pb", "--csv", str(tmp_path / "pb.csv")]) == 2
    assert "pb.csv" not in [path.name for path in tmp_path.iterdir()]


def test_all_methods_from_the_command_line_and_from_a_file(capsys, tmp_path):
    (tmp_path / "s.toml").write_text('methods = ["all", "paci(every=3)"]\n')
    words = ["compare", *SMALL, "--lr", "0.05", "--seeds", "1", "--dry-run"]
    from_file = tomllib.loads(answer(capsys, *words, "s.toml").out)["methods"]
    assert from_file[-1] == "paci(every=3)"
    assert tomllib.loads(answer(capsys, *words, "--methods", "all").out)["methods"] == from_file[:-1]
    assert {"backprop", "greedy", "1f1b", "pb", "spectrain"} < set(from_file)
    assert not {"all", "zb-v"} & set(from_file)
