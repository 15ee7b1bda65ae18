"""Hugging Face models, given as they are."""

import copy

import pytest
import torch
from torch import nn

import stretto
from hugging_face_models import build, images, next_word, padding, words
from late_imports import Late
from pairwise import in_turn, thinned
from stretto.errors import UsageError
from stretto.nn.chain import Chain

transformers = Late("transformers")
KINDS = ("gpt2", "llama", "bert", "vit")


def example_of(kind):
    """A batch as the model takes it."""
    if kind in ("llama", "bert"):
        return {"input_ids": words(0), "attention_mask": padding()}
    return images(0) if kind == "vit" else words(0)


def tensors(example):
    return tuple(example.values()) if isinstance(example, dict) else (example,)


def ask(model, example, **options):
    return (model(**example, **options) if isinstance(example, dict) else model(example, **options)).logits


def carried(stages):
    return [line.partition(": ")[2] for line in stages.explanation.splitlines() if line.startswith("carried")]


@pytest.mark.parametrize(("kind", "attention"), in_turn(KINDS, ["sdpa", "eager"], rounds=2, slow=1))
def test_stages_give_what_the_model_gives(kind, attention):
    """Logits and every gradient, bit for bit, in training (with dropout drawn alike) and in evaluation."""
    drop = {"gpt2": "resid_pdrop", "llama": "attention_dropout"}.get(kind, "hidden_dropout_prob")
    model, example = build(kind, attn_implementation=attention, **{drop: 0.1}), example_of(kind)
    cache = getattr(model.config, "use_cache", None)
    uncached = {} if cache is None else {"use_cache": False}  # copies of a cache lie otherwise: other last bits
    stages = stretto.split(model, 3, example=example)
    assert getattr(model.config, "use_cache", None) == cache
    assert {id(p) for stage in stages for p in stage.parameters()} == {id(p) for p in model.parameters()}
    for training in (True, False):
        model.train(training)
        results = []
        for module in (lambda: ask(model, example, **uncached), lambda: Chain(*stages)(*tensors(example))):
            torch.manual_seed(3)
            logits = module()
            results.append((logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_a_mask_is_there_for_the_batches_that_need_one(kind):
    """Split on padded texts, or on whole ones; other numbers of texts and words."""
    model = build(kind).eval()
    whole, padded = torch.ones_like(padding()), padding()
    for mask in (whole, padded):
        stages = Chain(*stretto.split(model, 3, example={"input_ids": words(0), "attention_mask": mask}))
        for ids, seen in ((words(1), whole), (words(1), padded), (words(2, 3, 8), padding(3, 8))):
            assert torch.equal(stages(ids, seen), model(ids, attention_mask=seen).logits)


def test_rotary_tables_and_masks_travel_without_gradients():
    model, example = build("llama", attn_implementation="eager"), example_of("llama")
    stages = stretto.split(model, 3, example=example)
    assert carried(stages) == [
        f"model_layers_{last}, unsqueeze, model_rotary_emb, create_causal_mask" for last in (1, 2)
    ]
    hidden, *others = stages[0](*tensors(example))
    given = [hidden.detach(), *(tensor.detach() for tensor in others)]
    for tensor in given:
        tensor.requires_grad_(tensor.is_floating_point())
    passed = stages[1](*given)
    assert [tensor.requires_grad for tensor in passed] == [True, False, False, False, False]
    passed[0].sum().backward()
    assert [tensor.grad is None for tensor in given] == [False, True, True, True, True]


def test_of_a_tensor_whose_shape_counts_only_the_shape_travels():
    """GPT-2 looks at the sizes of its input and its embeddings once more after the last block."""
    stages = stretto.split(build("gpt2"), 3, example=words(0))
    given = stages[0](words(1, 2, 7))
    assert [list(tensor.shape) for tensor in given if not tensor.numel()] == [[0, 2, 7], [0, 2, 7, 16], [0]]
    assert carried(stages)[0].endswith("transformer_h_1, unsqueeze, create_causal_mask")


@pytest.mark.parametrize(
    ("kind", "method"),
    thinned(in_turn(["bert", "vit"], ["1f1b(microbatches=3)", "gpipe(microbatches=2)"], rounds=2, slow=1), 4),
)
def test_classifiers_train_as_on_one_device(kind, method):
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = build(kind, **options).double()
    reference = copy.deepcopy(model)
    answers = torch.tensor([0, 1, 2, 2, 1, 0])

    def batches():
        for n in range(3):
            if kind == "vit":
                yield images(n).double()
            else:
                yield {"input_ids": words(n), "attention_mask": padding() if n % 2 else torch.ones_like(padding())}

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    stages = stretto.split(model, 3, example=next(batches()))
    trainer = stretto.Trainer(stages, nn.functional.cross_entropy, sgd, method)
    optimizer = sgd(reference.parameters())
    for batch in batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ask(reference, batch), answers)
        loss.backward()
        optimizer.step()
        assert trainer.step(tensors(batch), answers) == pytest.approx(loss.item(), abs=1e-12)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)
    assert trainer.evaluate([(tensors(batch), answers)]).keys() == {"loss", "accuracy"}


def test_gathered_weights_under_the_models_own_names():
    """Tied ones under both names; what no stage uses as the model has it; a compiled stage's as any other."""
    model = build("gpt2")
    model.spare = nn.Linear(2, 2)
    stages = stretto.split(model, 3, example=words(0))
    trainer = stretto.Trainer(stages, next_word, lambda ps: torch.optim.SGD(ps, lr=0.1), "1f1b")
    trainer.step(words(1), words(1).roll(-1, 1))
    gathered = trainer.gather()
    state = stages.model_state(gathered)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert state["lm_head.weight"] is state["transformer.wte.weight"]
    compiled = {key.replace("1.", "1._orig_mod.", 1): value for key, value in gathered.items()}
    assert stages.model_state(compiled).keys() == state.keys()
    with pytest.raises(UsageError, match=r"'3\.transformer\.ln_f\.weight' is no weight of these 3 stages"):
        stages.model_state({"3.transformer.ln_f.weight": gathered["2.transformer.ln_f.weight"]})


def test_a_bare_model_gives_all_its_tensors():
    config = build("bert").config
    model = transformers.BertModel(config).eval()
    stages = stretto.split(model, 2, example=words(0))
    assert "output: last_hidden_state, pooler_output" in stages.explanation
    wanted = model(words(1))
    assert all(map(torch.equal, Chain(*stages)(words(1)), (wanted.last_hidden_state, wanted.pooler_output)))


def test_mistakes():
    model = build("gpt2")
    with pytest.raises(UsageError, match=r"5 stages from 4 blocks: .*one block\. Ask for at most 4"):
        stretto.split(model, 5, path="transformer.h", example=words(0))
    with pytest.raises(UsageError, match=r"every argument of GPT2LMHeadModel\.forward\(input_ids.*example=x"):
        stretto.split(model, 2)
    with pytest.raises(UsageError, match=r"fails on the example \(the example fills input_ids, past_key_values; ex"):
        stretto.split(model, 2, example=(words(0), padding()))
    config = transformers.T5Config(vocab_size=61, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    with pytest.raises(UsageError, match=r"path=\.\.\.; it has: 'encoder\.block' \(2 T5Block\), 'decoder\.block'"):
        stretto.split(transformers.T5ForConditionalGeneration(config), 2)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_what_a_configuration_gathers_from_all_blocks_is_refused(name):
    model = build("llama", attn_implementation="eager", **{name: True})
    with pytest.raises(UsageError, match=rf"{name}=True.* on several stages\. Set model\.config\.{name} = False"):
        stretto.split(model, 2, example=words(0))
    setattr(model.config, name, False)
    assert len(stretto.split(model, 2, example=words(0))) == 2
