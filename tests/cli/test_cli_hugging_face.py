"""--model hf:FOLDER from the command line: trained where it lies, written back as a folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stretto.cli import main

WORDS = 41
OWN = f"""
import torch
from transformers import AutoModelForCausalLM


def data():
    words = torch.randint({WORDS}, (24, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(24, 8, dtype=torch.long)
    mask[3, 5:] = 0
    x = {{"input_ids": words[:, :-1], "attention_mask": mask}}
    y = words[:, 1:].masked_fill(mask == 0, -100)
    train, validation = slice(16), slice(16, None)
    return [({{name: part[rows] for name, part in x.items()}}, y[rows]) for rows in (train, validation)]


def build():
    return AutoModelForCausalLM.from_pretrained("model")
"""
RUN = ["--data", "own.py:data", "--stages", "2", "--steps", "4", "--batch-size", "8", "--evaluations", "2"]
SGD = ["--optimizer", "sgd", "--lr", "0.1"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model as `save_pretrained` leaves it, and what else may lie in its folder."""
    import transformers

    place = tmp_path_factory.mktemp("saved") / "model"
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=64, n_layer=2, n_head=2, n_positions=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(place)
    (place / "tokenizer.json").write_text("{}")
    (place / "chat_template.jinja").write_text("")
    return place


@pytest.fixture(autouse=True)
def folder(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, "model")
    Path("own.py").write_text(OWN)


def trained(out, *options, model="hf:model", method="1f1b"):
    assert main(["train", "--model", model, *RUN, *SGD, "--method", method, "--out", out, *options]) == 0
    return json.loads(Path(out, "run.json").read_text())


def weights(out):
    return {name: value for file in Path(out, "model").glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.slow
def test_processes_train_it_as_emulation_does(capsys):
    here, there = trained("here"), trained("there", "--workers", "2")
    for name in ("train_loss", "validation_loss"):
        assert here["record"][name] == there["record"][name]
    assert weights("here").keys() == weights("there").keys()
    assert all(torch.equal(value, weights("there")[name]) for name, value in weights("here").items())
    assert len(there["peak_memory"]) == 2
    assert all(most > 2**20 for most in there["peak_memory"])
    assert "peak_memory" in capsys.readouterr().out


@pytest.mark.slow
def test_it_is_trained_as_a_function_would_be():
    here, own = trained("here"), trained("own", model="own.py:build")
    for name in ("train_loss", "validation_loss"):
        assert here["record"][name] == own["record"][name]
    function = load_file("own/model.safetensors")
    assert all(torch.equal(value, function[name]) for name, value in weights("here").items())


@pytest.mark.slow
def test_what_it_leaves_is_a_folder_that_from_pretrained_reads():
    import transformers

    run = trained("out", "--workers", "2")
    names = {path.name for path in Path("out/model").iterdir()}
    parts = {f"model-0000{part}-of-00002.safetensors" for part in (1, 2)}
    assert names >= {*parts, "config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"}
    assert all(
        Path("out/model", name).stat().st_mode & 0o777 == Path("own.py").stat().st_mode & 0o777 for name in parts
    )
    model, told = transformers.AutoModelForCausalLM.from_pretrained("out/model", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert model.lm_head.weight is model.transformer.wte.weight
    before = transformers.AutoModelForCausalLM.from_pretrained("model")
    assert not torch.equal(model.transformer.wte.weight, before.transformer.wte.weight), "trained"
    again = trained("again", model="hf:out/model")
    assert again["record"]["train_loss"] < run["record"]["train_loss"]


@pytest.mark.slow
def test_every_command_takes_it(capsys):
    assert main(["doctor", "--model", "hf:model"]) == 0
    assert "15 modules with 103,232 parameters: every method can train them" in capsys.readouterr().out
    assert main(["simulate", "--model", "hf:model", "--data", "own.py:data", "--method", "1f1b", "--stages", "2"]) == 0
    assert main(["plan", "--model", "hf:model", "--data", "own.py:data", "--cluster", "8-a100", "--json"]) == 0
    capsys.readouterr()
    few = ["--steps", "2", "--lr", "0.1", "--batch-size", "8", "--evaluations", "1", "--stages", "2", "--seeds", "1"]
    words = ["--model", "hf:model", "--data", "own.py:data", "--methods", "backprop,greedy", *few]
    assert main(["compare", *words, "--out", "study", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {run["status"] for run in said["runs"]} == {"finished"}
    assert main(["report", "study", *words[:4]]) == 0


@pytest.mark.slow
def test_a_configuration_alone_is_trained_from_the_start(capsys):
    Path("model/model.safetensors").unlink()
    assert trained("a", "--seed", "1")["record"]["train_loss"] != trained("b", "--seed", "2")["record"]["train_loss"]
    emulated, on_two = trained("c", method="greedy"), trained("d", "--workers", "2", method="greedy")
    assert emulated["record"]["train_loss"] == on_two["record"]["train_loss"]
    assert Path("c/heads.safetensors").is_file()
    assert "from a seed" in on_two["model"]


@pytest.mark.parametrize("workers", [[], ["--workers", "2"]])
def test_weights_that_do_not_fit_are_refused(capsys, workers):
    words = ["train", "--model", "hf:model", "--model-options.n_inner", "96", *RUN, "--method", "1f1b", *workers]
    assert main([*words, "--out", "out"]) == 2
    said = capsys.readouterr().err
    assert "transformer.h.0.mlp.c_fc.bias is [256], but the model" in said
    assert not Path("out").exists()


def test_a_mistyped_folder_is_refused(capsys):
    assert main(["train", "--model", "hf:modle", *RUN]) == 2
    assert "there is no modle/config.json" in capsys.readouterr().err


def test_edited_weights_are_another_run(capsys):
    trained("out")
    file = Path("model/model.safetensors")
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    assert main(["train", "--model", "hf:model", *RUN, *SGD, "--method", "1f1b", "--out", "out"]) == 2
    assert "from before hf:model changed" in capsys.readouterr().err
