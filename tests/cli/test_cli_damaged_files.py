"""Every file of a study, a run, a plan, a cluster and a calibration, damaged: each command says so, or works."""

import json
import random
import shutil
import zlib
from pathlib import Path

import pytest

from cli.damage import damage
from cluster_text import cluster_text
from stretto import UsageError
from stretto.cli import main
from stretto.collectives.calibration import Calibration
from stretto.settings.runs import TrainSettings
from stretto.study import training_run
from stretto.study.prepare import resolve

NETWORK = ["--model-options.width", "4", "--model-options.depth", "2", "--stages", "2", "--steps", "8", "--evaluations",
           "2", "--batch-size", "8", "--lr", "0.2", "--quiet"]  # fmt: skip
STUDY = ["--methods", "backprop,greedy", "--seeds", "1", "--jobs", "1", *NETWORK]
ONE = "study/runs/backprop-lr0.2-b8-s0"
MEASURES = ["--measure", "sharpness,noise,cosine,probes,filters"]
MEASURED = ["plan", "--measured", "study", "--objective", "loss", "--critical-batch", "99", "--cluster", "8-a100",
            "--workers", "2", "--quiet", "--out", "new.toml"]  # fmt: skip
READ_STUDY = [["report", "study", "--quiet"], ["inspect", "study", "--quiet"], MEASURED]
READ_RUN = [["report", "run", "--quiet"], ["inspect", "run", "--quiet"], ["simulate", "--overlay", "run", "--json"],
            ["train", "--method", "1f1b", *NETWORK, "--out", "run"]]  # fmt: skip
COMMANDS = {  # that read each file
    "study/study.json": [*READ_STUDY, ["compare", *STUDY, *MEASURES, "--out", "study"]],
    f"{ONE}/run.json": READ_STUDY,
    f"{ONE}/events.jsonl": READ_STUDY,
    "run/run.json": READ_RUN,
    "run/events.jsonl": READ_RUN,
    "run/trace-worker-1.jsonl": READ_RUN,
    "plan.toml": [["show", "--plan", "plan.toml"], ["train", "--plan", "plan.toml", "--dry-run"],
                  ["plan", "--diff", "plan.toml", "plan.toml"]],
    "cluster.toml": [["simulate", "--method", "1f1b", "--stages", "2", "--model", "mlp", *NETWORK[:4], "--cluster",
                      "cluster.toml", "--json"], ["report", "run", "--cluster", "cluster.toml", "--quiet"],
                     ["plan", *NETWORK[:4], "--cluster", "cluster.toml", "--batch-size", "8", "--layers", "counted",
                      "--out", "new.toml", "--quiet"]],
    "calibration.toml": [["calibration.toml"]],
    ".broken.checkpoints/step-4/manifest.json": [["train", "--method", "1f1b", *NETWORK, "--checkpoint-every", "4",
                                                  "--out", "broken", "--resume"]],
}  # fmt: skip
CALIBRATION = """workers = 2
per_node = 2
machines = 1
host = "here"
latency = 1e-5
seconds_per_byte = 1e-9
reduction_seconds_per_byte = 1e-10
[[all_reduce]]
bytes = 1024
fastest = "ring"
seconds = {ring = 1e-4, torch = 1e-4}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with one of each file, none of them damaged."""
    place = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr("stretto.report.frontier.pictures", lambda _: {})
        assert main(["compare", *STUDY, *MEASURES, "--out", "study"]) == 0
        assert main(["train", "--method", "1f1b", *NETWORK, "--trace", "run.pftrace", "--out", "run"]) == 0
        Path("cluster.toml").write_text(cluster_text("elsewhere"))
        Path("calibration.toml").write_text(CALIBRATION)
        assert main(["plan", *NETWORK[:4], "--cluster", "cluster.toml", "--batch-size", "8", "--layers", "counted",
                     "--out", "plan.toml", "--quiet"]) == 0  # fmt: skip
        settings = TrainSettings(method="1f1b", model_options={"width": 4, "depth": 2}, stages=2, steps=8,
                                 evaluations=2, batch_size=8, lr=0.2, checkpoint_every=4)  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            training_run.run(resolve(settings), Path("broken"), interrupted_after(5))
    return place


def interrupted_after(steps):
    def on_step(step, _):
        if step >= steps:
            raise KeyboardInterrupt

    return on_step


@pytest.fixture(autouse=True)
def copied(whole, tmp_path, monkeypatch):
    """Makes the current folder a fresh copy of it."""
    (tmp_path / "copy").mkdir()
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setattr("stretto.report.frontier.pictures", lambda _: {})

    def copy():
        for path in Path().iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        left_out = shutil.ignore_patterns("*.pftrace", "report.html", "model.safetensors")
        shutil.copytree(whole, ".", dirs_exist_ok=True, ignore=left_out)

    copy()
    return copy


def read(words):
    """The exit status of a command; anything that no command may raise is raised."""
    if words == ["calibration.toml"]:
        Calibration.read(words[0])
        return 0
    return main(words)


@pytest.mark.slow
@pytest.mark.parametrize("file", COMMANDS)
def test_what_is_whole_is_read(file, capsys):
    for words in COMMANDS[file]:
        assert read(words) == 0, capsys.readouterr().err


def seal(file):
    """Give a manifest the sum that is right: nobody is kept from writing one."""
    try:
        content = json.loads(file.read_bytes())
        content.pop("crc32")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return
    crc = f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
    file.write_text(json.dumps({**content, "crc32": crc}))


def attack(file, seeds, capsys, copied):
    for seed in seeds:
        copied()
        done = damage(Path(file), random.Random(f"{file} {seed}"))
        if file.endswith("manifest.json"):
            seal(Path(file))
        words = random.Random(seed).choice(COMMANDS[file])
        try:
            status = read(words)
        except UsageError as error:  # of a function that is no command
            status, told = 2, str(error)
        except BaseException as error:
            raise AssertionError(f"{file}, {done}, seed {seed}: {' '.join(words)} raises {error!r}") from error
        else:
            told = capsys.readouterr().err
        assert status in (0, 2), (file, done, seed, words, told)
        assert (status == 0) or len(told.strip().splitlines()) == 1, (file, done, seed, words, told)


@pytest.mark.parametrize("file", COMMANDS)
def test_damage_is_told(file, capsys, copied):
    attack(file, range(3), capsys, copied)


@pytest.mark.slow
@pytest.mark.parametrize("file", COMMANDS)
def test_much_damage_is_told(file, capsys, copied):
    attack(file, range(3, 60), capsys, copied)


NAMED = {  # one message of each file: it names file, key and value
    "study/study.json": ("study", '"seeds": 1', '"seeds": 100000000', "study/study.json: seeds=100000000 of"),
    "run/run.json": ("run", '"stages": 2', '"stages": [2]', "run/run.json: stages = [2]: a whole number"),
    "run/events.jsonl": ("run", '"seconds": ', '"seconds": "x", "was": ', "run/events.jsonl, line"),
    "run/trace-worker-1.jsonl": (
        "run",
        '"host": ',
        '"host": 3, "was": ',
        "trace-worker-1.jsonl, line 1: header: host = 3",
    ),
}


@pytest.mark.parametrize("file", NAMED)
def test_a_message_names_file_key_and_value(file, capsys):
    folder, text, other, said = NAMED[file]
    assert text in Path(file).read_text()
    Path(file).write_text(Path(file).read_text().replace(text, other, 1))
    assert main(["report", folder, "--quiet"]) == 2
    assert said in capsys.readouterr().err
