"""A training script for Hugging Face models that knows nothing of processes."""

import torch

import stretto
from hugging_face_models import LENGTH, build, next_word, padding, words


def batches(kind, number=5):
    """Texts; Llama's come with masks, and in every other minibatch some of them are padded."""
    for n in range(number):
        x, mask = words(n), padding() if n % 2 else torch.ones(6, LENGTH, dtype=torch.long)
        yield ((x, mask) if kind == "llama" else x), words(n).roll(-1, 1)


def example(kind):
    return {"input_ids": words(0), "attention_mask": padding()} if kind == "llama" else words(0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(kind, method, folder, **options):
    """Losses, and what the trained model says about a text; the model is saved in `folder`, as Hugging Face saves."""
    model = build(kind)
    stages = stretto.split(model, 3, example=example(kind))
    trainer = stretto.Trainer(stages, next_word, sgd, method, **options)
    losses = [trainer.step(x, y) for x, y in batches(kind)]
    losses += trainer.flush()
    gathered = trainer.gather()
    if gathered is None:
        return losses, None
    model.load_state_dict(stages.model_state(gathered))
    model.save_pretrained(f"{folder}/{kind}-{method}")
    return losses, logits(model)


def train_all(runs, folder):
    return [train(kind, method, folder) for kind, method in runs]


def logits(model):
    with torch.no_grad():
        return model.eval()(words(9), attention_mask=padding()).logits
