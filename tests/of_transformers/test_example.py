"""The script in examples/transformers: three changed lines, on text of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from late_imports import Late
from runtime.processes import free_port

transformers = Late("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers"
WORDS = [f"{first}{second}{third}" for first in "bdfgk" for second in "aeiou" for third in ("nt", "rs", "lm", "st")]
OPTIONS = {
    "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 2, "save_steps": 2,
    "eval_strategy": "steps", "eval_steps": 4, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "width": 16,
    "layers": 2, "vocabulary": 300, "block_size": 16,
}  # fmt: skip


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for name, number in (("train", 1500), ("validation", 200)):
        (folder / f"{name}.txt").write_text(" ".join(WORDS[(7 * n + n // 11) % len(WORDS)] for n in range(number)))
    return folder


def run(script, text, folder, processes=1):
    """The script's own metrics."""
    place = {"HF_HOME": str(text.parent / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    place["TMPDIR"] = str(text.parent)  # torchrun may leave a folder there
    command = [str(EXAMPLE / script), "--text", str(text), "--output_dir", str(folder)]
    command += [f"--{name}={value}" for name, value in OPTIONS.items()]
    if processes > 1:
        port = f"--master-port={free_port()}"
        command = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), port, *command]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **place},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "eval_results.json").read_text())


def test_three_lines_are_changed():
    lines = [(EXAMPLE / name).read_text().split('"""', 2)[2].splitlines() for name in ("plain.py", "own.py")]
    plain, own = ([line.strip() for line in each if line.strip()] for each in lines)
    assert [line for line in own if line not in plain] == [
        "from stretto.transformers import StrettoTrainer",
        "trainer = StrettoTrainer(",
        "stages=2,",
    ]


@pytest.mark.slow
def test_the_script_trains_and_saves(text, tmp_path):
    metrics = run("own.py", text, tmp_path / "run")
    assert metrics["eval_accuracy"] > 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert loaded.config.num_hidden_layers == 2
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "run")("bant").input_ids


@pytest.mark.slow
def test_two_processes_come_to_what_the_plain_script_does(text, tmp_path):
    plain = run("plain.py", text, tmp_path / "plain")
    own = run("own.py", text, tmp_path / "own", processes=2)
    for name in ("eval_loss", "eval_accuracy", "perplexity", "epoch"):
        assert own[name] == pytest.approx(plain[name], rel=1e-5)
    saved = [(tmp_path / name / "checkpoint-4" / "trainer_state.json").read_text() for name in ("plain", "own")]
    first, second = (json.loads(state)["log_history"] for state in saved)
    assert [entry["step"] for entry in first] == [entry["step"] for entry in second]
