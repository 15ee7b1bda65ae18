"""Language models whose embedding is their unembedding, under every way to train: what messages advise works."""

import copy

import pytest
import torch

import stretto
from hugging_face_models import build, next_word, words
from late_imports import Late
from pairwise import in_turn
from stretto.errors import UsageError

transformers = Late("transformers")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def t5():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2, "num_layers": 1, "relative_attention_num_buckets": 8}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=61, dropout_rate=0.0, **sizes))


def loss_of(output, target):
    return next_word(output[0] if isinstance(output, tuple) else output, target)


MODELS = {"gpt2": lambda: build("gpt2"), "llama": lambda: build("llama", tie_word_embeddings=True), "t5": t5}


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *in_turn(["greedy", "chunked(chunks=2)"], ["gpt2", "llama"], rounds=2, slow=1),
        *in_turn(["overlapping"], ["gpt2", "llama"], rounds=2, slow=2),
        pytest.param("greedy", "t5", marks=pytest.mark.slow),
    ],
)
def test_local_methods_train_them(kind, method):
    """The loss falls; the unembedding is the embedding, before and after."""
    model, x = MODELS[kind](), words(0)
    before = copy.deepcopy(model.state_dict())
    example = {"input_ids": x, "decoder_input_ids": x} if kind == "t5" else x
    stages = stretto.split(model, 2, example=example)
    given = tuple(example.values()) if isinstance(example, dict) else x
    trainer = stretto.Trainer(stages, loss_of, sgd, method, example=given)
    at_first = trainer.evaluate([(given, x)])["loss"]
    for _ in range(15):
        trainer.step(given, x)
    trainer.flush()
    assert trainer.evaluate([(given, x)])["loss"] < at_first
    embedding, out = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert embedding is out
    assert not torch.equal(embedding, before[next(name for name, p in model.named_parameters() if p is embedding)])


@pytest.mark.slow
def test_what_cannot_stay_together_may_come_apart():
    model, x = build("gpt2"), words(0)
    with pytest.raises(UsageError, match=r"only 1 piece can be separated: .*or tied='apart'"):
        stretto.split(model, 2, example=x, tied="together")
    stages = stretto.split(model, 2, example=x, tied="apart")
    assert "local methods (greedy, overlapping, chunked) on the last" in stages.explanation
    with pytest.raises(UsageError, match=r"head 'solo' reads .* the last stage ends otherwise: use head='language'"):
        stretto.Trainer(stages, loss_of, sgd, "greedy(head=solo)", example=x)
    for head in ("language", "auto"):
        stretto.Trainer(stages, loss_of, sgd, f"greedy(head={head})", example=x).step(x, x)
