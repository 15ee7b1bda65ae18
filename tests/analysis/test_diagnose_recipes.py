"""The recipes of docs/guide/diagnose.md: a right step that they save is found equal."""

import contextlib
import io
import runpy
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from analysis.recipes import PAGE, PARTS, recipe, traced
from pages import write_files
from runtime.processes import launch
from stretto.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, which has the page's files."""
    monkeypatch.chdir(tmp_path)
    write_files(PAGE, tmp_path)
    return tmp_path


def diagnosed(dumped, *options):
    """The exit status for gradients and weights in a folder, and what is printed."""
    files = [word for kind in ("gradients", "weights") for word in (f"--{kind}", str(dumped / kind))]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = main(["diagnose", "--model", "own.py:build", "--batch", "own.py:batch", *files, *options])
    return status, said.getvalue()


def test_the_example_mended_is_equal(folder, monkeypatch):
    """As the page shows it, tests/test_documents.py runs it."""
    text = (folder / "train.py").read_text()
    assert "    model.zero_grad()\n" in text
    (folder / "train.py").write_text(text.replace("    model.zero_grad()\n", ""))
    monkeypatch.syspath_prepend(folder)
    runpy.run_path("train.py")
    sys.modules.pop("own")
    options = ["--gradients", "gradients.safetensors", "--microbatches", "4"]
    assert main(["diagnose", "--model", "own.py:build", "--batch", "own.py:batch", *options]) == 0


def test_a_loop_of_ones_own(folder):
    """Clipped, in its second step: the weights are those of that step."""
    found, model, (x, y) = recipe("A loop of your own, DDP, FSDP2", folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found["dump_loop"](optimizer, model)
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert diagnosed(folder / "dumped", "--clip", "0.1")[0] == 0
    assert diagnosed(folder / "dumped")[0] == 1


def test_ddp_and_fsdp(folder):
    launch(2, "analysis.recipes:replicas", str(folder))
    for kind in ("ddp", "fsdp"):
        assert diagnosed(folder / kind / "dumped", "--replicas", "2")[0] == 0


def test_pipelining(folder):
    launch(2, "analysis.recipes:stages", str(folder))
    for kind in ("anew", "slices"):
        dumped = folder / kind / "dumped"
        assert len([*(dumped / "gradients").iterdir()]) == 2
        status, said = diagnosed(dumped, "--microbatches", str(PARTS), "--stages", "2")
        assert (status, "names:" in said) == (0, False), said


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of its tracing
def test_stages_that_torch_cuts_keep_the_names_of_the_whole_model(folder):
    assert traced(folder) == [["0.weight", "0.bias"], ["2.weight", "2.bias", "4.weight", "4.bias"]]


@pytest.mark.filterwarnings("ignore")  # Lightning's own, of loaders and loggers
def test_lightning(folder):
    found, model, (x, y) = recipe("Lightning", folder)
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, index):
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=PARTS, gradient_clip_val=0.1,
        callbacks=[found["Dump"]()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(TensorDataset(x, y), batch_size=len(y) // PARTS))
    assert diagnosed(folder / "dumped", "--accumulation", str(PARTS))[0] == 0


def test_accelerate(folder):
    found, model, (x, y) = recipe("accelerate", folder)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found["dump_accelerated"](accelerator, optimizer, model)
    model, optimizer = accelerator.prepare(model, optimizer)
    for rows, targets in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(rows), targets))
            optimizer.step()
            optimizer.zero_grad()
    assert diagnosed(folder / "dumped", "--accumulation", str(PARTS))[0] == 0


GPT = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

def build():
    torch.manual_seed(0)
    none = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    sizes = dict(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=8, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(GPT2Config(**sizes, **none))

def batch():
    torch.manual_seed(1)
    tokens = torch.randint(1, 40, (8, 8))
    padded = torch.arange(8) >= torch.randint(3, 9, (8,))[:, None]
    return {"input_ids": tokens}, tokens.masked_fill(padded, -100)
"""


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("told", [True, False])
def test_transformers(folder, told):
    """Unless it is told the loss, its Trainer counts a label of each row that is no target."""
    found, *_ = recipe("transformers' Trainer", folder)
    from transformers import Trainer, TrainingArguments

    (folder / "own.py").write_text(GPT)
    own = {}
    exec(GPT, own)
    model, (inputs, labels) = own["build"](), own["batch"]()
    if told:
        model.loss_type = "ForCausalLM"
    rows = [{"input_ids": a, "labels": b} for a, b in zip(inputs["input_ids"], labels, strict=True)]
    arguments = TrainingArguments(
        "run", max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=PARTS, use_cpu=True,
        max_grad_norm=0, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=rows, callbacks=[found["DumpCallback"]()]).train()
    options = ["--accumulation", str(PARTS), "--loss", "next_token_cross_entropy"]
    status, said = diagnosed(folder / "dumped", *options)
    assert (status, "multiplied by" in said) == ((0, False) if told else (1, True)), said
