"""--model hf:FOLDER: configurations and weights as transformers writes them, read by the process that needs them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hugging_face_models import WORDS, build, images, words
from late_imports import Late
from stretto.errors import UsageError
from stretto.models.hugging_face import StoredWeights, digest_of_folder, example_of, hugging_face_model
from stretto.nn import deferred

transformers = Late("transformers")
WIDE = {"hidden_size": 64, "intermediate_size": 64}  # so that its matrices are large enough to be deferred


def save(model, folder, **options):
    model.save_pretrained(folder, **options)
    return f"hf:{folder}"


def llama(folder, **options):
    return save(wide_llama(), folder, **options)


def wide_llama():
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=16, initializer_range=0.2, **WIDE,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2(folder):
    """The folder of a GPT-2 without weights."""
    config = transformers.GPT2Config(vocab_size=WORDS * 4, n_embd=64, n_layer=2, n_head=4, n_positions=16)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(folder)
    return f"hf:{folder}"


def edit(folder, **entries):
    """Change entries of a folder's config.json; None removes one."""
    file = folder / "config.json"
    changed = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "40KB"}], ids=["one file", "sharded"])
def test_filled_it_is_the_model_that_was_saved(tmp_path, options):
    text = llama(tmp_path, **options)
    assert len(list(tmp_path.glob("*.safetensors"))) > (1 if options else 0)
    model, weights = hugging_face_model(text, {})
    large = [p for p in wide_llama().parameters() if p.numel() >= 4096]
    assert len(deferred.placeholders([model])) == len(large) > 10
    assert weights.drawn == []
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    deferred.fill(model)
    small = sum(p.nbytes for p in model.parameters() if p.numel() < 4096)
    assert held == small + 4 * len(large)
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) > 5 * held
    original = wide_llama().state_dict()
    assert model.state_dict().keys() == original.keys()
    assert all(torch.equal(value, original[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.eval()(words(0)).logits, wide_llama().eval()(words(0)).logits)


def test_parts_are_filled_alone(tmp_path):
    model, weights = hugging_face_model(llama(tmp_path), {})
    reads = []
    read = weights.stored.read
    weights.stored.read = lambda name, like, **how: reads.append(name) or read(name, like, **how)
    deferred.fill(model.model.layers[1])
    assert reads
    assert all(name.startswith("model.layers.1.") for name in reads)


def test_a_configuration_alone_is_drawn_by_the_seed(tmp_path):
    text = gpt2(tmp_path)
    models = []
    for seed in (0, 0, 1):
        model, weights = hugging_face_model(text, {}, seed)
        assert "transformer.wte.weight" in weights.drawn
        assert "transformer.h.0.attn.c_proj.weight" in weights.drawn
        models.append(model)
    whole, parts, other = models
    deferred.fill(whole)
    deferred.fill(other)
    for part in reversed(list(parts.modules())):  # in another order
        deferred.fill(part)
    states = [model.state_dict() for model in models]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    assert not torch.equal(states[0]["transformer.wte.weight"], states[2]["transformer.wte.weight"])
    assert whole.lm_head.weight is whole.transformer.wte.weight
    torch.manual_seed(0)
    usual = transformers.GPT2LMHeadModel(whole.config).state_dict()
    for name, value in states[0].items():
        assert value.std().item() == pytest.approx(usual[name].std().item(), rel=0.1, abs=1e-6), name
        assert value.mean().item() == pytest.approx(usual[name].mean().item(), abs=3e-3), name


def test_a_base_model_s_weights_fit_a_model_with_a_head(tmp_path):
    base = wide_llama().model
    text = save(base, tmp_path)
    edit(tmp_path, architectures=["LlamaForCausalLM"], vocab_size=WORDS)
    model, weights = hugging_face_model(text, {})
    deferred.fill(model)
    assert torch.equal(model.model.embed_tokens.weight, base.embed_tokens.weight)
    assert not weights.stored or "lm_head.weight" not in weights.stored


def test_options_change_entries_of_the_configuration(tmp_path):
    model, _ = hugging_face_model(gpt2(tmp_path), {"n_layer": 1})
    assert len(model.transformer.h) == 1


def test_weights_of_another_dtype_are_read_as_float32(tmp_path):
    text = save(wide_llama().to(torch.bfloat16), tmp_path)
    model, _ = hugging_face_model(text, {})
    deferred.fill(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.lm_head.weight, wide_llama().lm_head.weight.bfloat16().float())


def test_experts_are_joined_as_transformers_joins_them(tmp_path):
    """Files have a tensor an expert, the model one for all experts of a layer."""
    torch.manual_seed(2)
    config = transformers.MixtralConfig(
        vocab_size=WORDS, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=12,
        max_position_embeddings=16, hidden_size=32, intermediate_size=16,
    )  # fmt: skip
    original = transformers.MixtralForCausalLM(config)
    text = save(original, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(".experts.11." in name for name in stored), "written one by one"
    model, weights = hugging_face_model(text, {})
    assert weights.drawn == []
    deferred.fill(model)
    expected = original.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_encoders_and_images(tmp_path, kind):
    original = build(kind)
    text = save(original, tmp_path)
    model, _ = hugging_face_model(text, {})
    deferred.fill(model)
    x = words(0) if kind == "bert" else images(0)
    assert torch.equal(model.eval()(x).logits, original.eval()(x).logits)
    example = example_of(model)
    assert model(**example).logits.shape[0] == 2


def unknown_architecture(folder):
    edit(folder, architectures=["LlamaForPoetry"])


def no_architecture(folder):
    edit(folder, architectures=None)


def broken_configuration(folder):
    (folder / "config.json").write_text("{")


def unknown_kind(folder):
    edit(folder, model_type="lama")


def no_configuration(folder):
    (folder / "config.json").unlink()


def only_pickles(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def damaged_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\0" * 100)


def damaged_index(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


def lost_shard(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "model-2.safetensors"}}')


def other_names(folder):
    weights = {f"net.{key}": value for key, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (unknown_architecture, "architectures=\\['LlamaForPoetry'\\]"),
        (no_architecture, "no architectures"),
        (broken_configuration, "is no configuration that transformers knows"),
        (unknown_kind, "is no configuration that transformers knows.*lama"),
        (no_configuration, "there is no .*config.json"),
        (only_pickles, "pytorch_model.bin, which may hold code"),
        (damaged_weights, "model.safetensors is damaged"),
        (damaged_index, "index.json is damaged"),
        (lost_shard, "names model-2.safetensors, which is not there"),
        (other_names, "are missing .* are no part of it \\(net."),
    ],
)
def test_folders_that_are_no_model_are_refused(tmp_path, spoil, words):
    text = llama(tmp_path)
    spoil(tmp_path)
    with pytest.raises(UsageError, match=words):
        hugging_face_model(text, {})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"weight_map": {"lm_head.weight": "../secret.safetensors"}}, "leave out '/'"),
        ({"weight_map": {"lm_head.weight": "/secret.safetensors"}}, "leave out '/'"),
        ({"weight_map": {"lm_head.weight": ".."}}, "begin it with a letter"),
        ({"weight_map": {"lm_head.weight": 3}}, "it names a file, so write a text"),
        ({"weight_map": ["model.safetensors"]}, "is damaged: TypeError: weight_map is no table"),
        ([], "is damaged"),
        ({"weight_map": {"other": "model.safetensors"}}, "has 'other' in model.safetensors, which lacks it"),
    ],
)
def test_an_index_names_files_of_its_folder(tmp_path, content, said):
    """The weights of another folder, which a file from others names, are not read."""
    text = llama(tmp_path / "model")
    shutil.copyfile(tmp_path / "model" / "model.safetensors", tmp_path / "secret.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(content))
    for read in (digest_of_folder, lambda text: hugging_face_model(text, {})):
        with pytest.raises(UsageError, match=r"index\.json") as raised:
            read(text)
        assert said in str(raised.value)


@pytest.mark.parametrize("entries", [
    {"architectures": 3}, {"architectures": [3]}, {"architectures": ["set_seed"]}, {"vocab_size": "many"},
    {"n_head": [1]}, {"n_embd": -1}, {"n_layer": {}}, {"model_type": 3},
])  # fmt: skip
def test_a_configuration_with_values_of_the_wrong_kind(tmp_path, entries):
    text = gpt2(tmp_path)
    edit(tmp_path, **entries)
    with pytest.raises(UsageError, match=r"config\.json"):
        hugging_face_model(text, {})


def test_another_width_is_refused(tmp_path):
    text = llama(tmp_path)
    with pytest.raises(UsageError, match=r"mlp.\w+.weight is \[64, 64\], but .* \[(128, 64|64, 128)\] there"):
        hugging_face_model(text, {"intermediate_size": 128})


def test_an_unknown_option_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"has no 'n_layers'.*n_layer"):
        hugging_face_model(gpt2(tmp_path), {"n_layers": 3})


def test_other_weights_have_another_digest(tmp_path):
    text = llama(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert digest_of_folder(text) == digest_of_folder(f"hf:{tmp_path / 'b'}")
    weights = load_file(tmp_path / "b" / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, tmp_path / "b" / "model.safetensors", metadata={"format": "pt"})
    assert digest_of_folder(text) != digest_of_folder(f"hf:{tmp_path / 'b'}")
    edit(tmp_path / "a", num_hidden_layers=1)
    assert len({digest_of_folder(text), digest_of_folder(f"hf:{tmp_path / 'b'}")}) == 2


def test_a_folder_without_weights_has_none(tmp_path):
    text = gpt2(tmp_path)
    model, _ = hugging_face_model(text, {})
    assert not StoredWeights(Path(tmp_path), model)
