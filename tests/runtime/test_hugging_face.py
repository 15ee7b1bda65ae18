"""Hugging Face models on processes: the numbers of one device, and files that Hugging Face reads."""

import pytest
import torch

from hugging_face_models import build, next_word
from late_imports import Late
from runtime import hugging_face
from runtime.processes import launch

transformers = Late("transformers")
METHODS = ("1f1b(microbatches=3)", "pb")
pytestmark = pytest.mark.slow  # tests/cli/test_cli_hugging_face.py trains one on processes
KINDS = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
RUNS = [(kind, method) for kind in KINDS for method in METHODS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Where the models are that three processes have trained, and what each process returned of each run."""
    folder = tmp_path_factory.mktemp("trained")
    told = launch(3, "runtime.hugging_face:train_all", RUNS, str(folder), timeout=400)
    return folder, {run: [each[number] for each in told] for number, run in enumerate(RUNS)}


@pytest.mark.parametrize("kind", KINDS)
def test_1f1b_equals_one_device(trained, kind):
    told = trained[1][kind, METHODS[0]]
    model = build(kind)
    optimizer, losses = hugging_face.sgd(model.parameters()), []
    for x, y in hugging_face.batches(kind):
        optimizer.zero_grad()
        loss = next_word(model(*x if isinstance(x, tuple) else (x,)).logits, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found, _ in told:
        assert found == pytest.approx(losses, abs=1e-5)
    loaded = getattr(transformers, KINDS[kind]).from_pretrained(trained[0] / f"{kind}-{METHODS[0]}")
    before = build(kind).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=0, atol=1e-5)
        assert not torch.allclose(before[name], value, rtol=0, atol=1e-4), name
    torch.testing.assert_close(told[0][1], hugging_face.logits(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "method"), RUNS)
def test_the_trained_model_loads_with_equal_logits(trained, kind, method):
    folder, told = trained
    loaded = getattr(transformers, KINDS[kind]).from_pretrained(folder / f"{kind}-{method}")
    assert torch.equal(hugging_face.logits(loaded), told[kind, method][0][1])
    shared = [p.data_ptr() for p in (loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight)]
    assert (shared[0] == shared[1]) == (kind == "gpt2")  # tied


@pytest.mark.parametrize(("kind", "method"), RUNS)
def test_processes_equal_emulation(trained, tmp_path, kind, method):
    losses, said = hugging_face.train(kind, method, tmp_path)
    assert [found for found, _ in trained[1][kind, method]] == [losses] * 3
    assert torch.equal(said, trained[1][kind, method][0][1])
