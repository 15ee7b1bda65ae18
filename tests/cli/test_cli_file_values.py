"""What a configuration, study or plan file may name: nothing outside the working folder, nobody to talk to."""

from pathlib import Path

import pytest

from stretto.cli import main
from stretto.cli.program import app
from stretto.cli.toml_file import ROLES, spelled, takes_text

WITH_FILE = ("train", "compare", "plan")


def options_of(verb):
    arguments = app[verb].assemble_argument_collection()
    return {spelled(each.name[2:]): each for each in arguments if each.name.startswith("--") and each.parse}


def test_these_commands_read_a_file():
    takers = [
        verb
        for verb in app
        if not verb.startswith("-") and any(each.name == "CONFIG" for each in app[verb].assemble_argument_collection())
    ]
    assert sorted(takers) == sorted(WITH_FILE)


def test_every_option_that_takes_text_says_what_is_done_with_it():
    """An option added later is not forgotten: it stands in the table, or takes numbers, or true and false."""
    taking = {name for verb in WITH_FILE for name, each in options_of(verb).items() if takes_text(each.hint)}
    assert taking == set(ROLES)
    numbers = {name for verb in WITH_FILE for name, each in options_of(verb).items()} - taking
    assert numbers > {"steps", "lr", "seeds", "workers", "json", "resume"}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    home = tmp_path / "work"
    (home / "sub").mkdir(parents=True)
    monkeypatch.chdir(home)
    (home / "mine.toml").write_text("kept")
    (home / "new.csv").write_text("kept")
    (home / "away").symlink_to(tmp_path)
    (home / "nowhere").symlink_to(tmp_path / "gone")


ELSEWHERE = ("/tmp/elsewhere", "../elsewhere", "sub/../../elsewhere", "away/elsewhere", "nowhere", "away", ".",
             ".git/x", "sub/.hidden")  # fmt: skip
BELOW = "writes nowhere but below the working folder"
SENT = "sends nothing to where a file says"
REFUSED = {
    "train": {
        **{f"out = {path!r}": BELOW for path in ELSEWHERE},
        "trace = '/tmp/elsewhere/t.pftrace'": BELOW,
        "trace = 'mine.toml'": "replaces nothing, and mine.toml is there already",
        "log = 'wandb'": SENT,
        "log = ['csv', 'mlflow(uri=\"https://example.com\")']": SENT,
        "log = 'csv,wandb(mode=offline)'": SENT,
        "log = \"csv(folder='/tmp/elsewhere')\"": BELOW,
        "log = ['tensorboard(folder=\"away/logs\")']": BELOW,
        "rendezvous = 'example.com:1234'": "connects to nobody that a file names",
        "secret_file = '/etc/hostname'": "connects to nobody",
        "secret-file = 'mine.toml'": "connects to nobody",
        "model = 'own.py:build'": "nothing that a file says is executed",
    },
    "compare": {
        "out = '/tmp/elsewhere'": BELOW,
        "storage = 'postgresql://example.com/x'": "connects to nobody",
        "storage = 'sqlite:////tmp/elsewhere'": "connects to nobody",
        "storage = 'journal:mine.toml'": "connects to nobody",
        "title = 'T'\n[small]\nout = '../elsewhere'": BELOW,
        "title = 'T'\n[small]\n[parts.one.small]\nstorage = 'journal:x'": "connects to nobody",
        "title = 'T'\n[small]\n[parts.one]\nlog = 'wandb'": SENT,
    },
    "plan": {
        "out = '/tmp/elsewhere.toml'": BELOW,
        "out = 'mine.toml'": "replaces nothing, and mine.toml is there already",
        "out = 'new.toml'": "replaces nothing, and new.csv is there already",
        "cluster = '/tmp/elsewhere/cluster.toml'": BELOW,
        "cluster = 'away/cluster.toml'": BELOW,
    },
}


@pytest.mark.parametrize(("verb", "text"), [(verb, text) for verb, texts in REFUSED.items() for text in texts])
def test_what_a_file_may_not_name(verb, text, capsys, tmp_path):
    Path("own.toml").write_text(text)
    before = sorted(tmp_path.rglob("*"))
    assert main([verb, "own.toml", "--quiet"]) == 2
    told = capsys.readouterr().err
    assert REFUSED[verb][text] in told
    assert "If you trust it, say so in the command" in told
    assert "own.toml" in told
    assert sorted(tmp_path.rglob("*")) == before
    assert Path("mine.toml").read_text() == "kept"


ALLOWED = {
    "train": ["out = 'new'", "out = 'sub/new'", "out = 'sub'", "trace = 'sub/t.pftrace'", "log = 'csv'",
              "log = \"csv(folder='sub/logs')\"", "device = 'cpu'"],
    "compare": ["out = 'new'", "title = 'T'\n[small]\nout = 'sub/new'"],
    "plan": ["out = 'other.toml'"],
}  # fmt: skip


@pytest.mark.parametrize(("verb", "text"), [(verb, text) for verb, texts in ALLOWED.items() for text in texts])
def test_what_a_file_may_name(verb, text, capsys):
    Path("own.toml").write_text(text)
    words = ["--cluster", "8-a100", "--workers", "1"] if verb == "plan" else ["--dry-run"]
    assert main([verb, "own.toml", *words, "--quiet"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("key", ["storage", "out", "log"])
def test_the_command_itself_may_name_it(key, capsys):
    values = {"storage": "journal:sub/x", "out": "../elsewhere", "log": "csv(folder='../logs')"}
    Path("own.toml").write_text(f"{key} = 'mlflow'")
    verb = "compare" if key == "storage" else "train"
    assert main([verb, "own.toml", f"--{key}", values[key], "--dry-run"]) == 0, capsys.readouterr().err


def test_what_is_no_option_is_no_key(capsys):
    """The command that was given, and digests of the user's files, come from the program itself."""
    for verb, key in {"train": "command", "compare": "sources"}.items():
        Path("own.toml").write_text(f"{key} = 'x'")
        assert main([verb, "own.toml", "--dry-run"]) == 2
        assert f"unknown key '{key}'" in capsys.readouterr().err


def test_a_plans_settings_are_a_files(capsys):
    Path("p.toml").write_text("[plan]\n[predicted]\n[train]\nmodel = 'mlp'\nlog = ['wandb']\nout = '/tmp/elsewhere'\n")
    assert main(["train", "--plan", "p.toml"]) == 2
    assert SENT in capsys.readouterr().err
    Path("own.toml").write_text("plan = 'p.toml'")
    assert main(["train", "own.toml"]) == 2
    assert SENT in capsys.readouterr().err
