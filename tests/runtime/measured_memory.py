"""What tensors take in each of several processes that train, by torch's own allocator."""

import os
from itertools import pairwise

import torch
from torch import nn

import stretto
from laws.networks import token_loss
from stretto.optim.by_name import make_optimizer
from stretto.runtime.process_memory import peak_memory

VOCABULARY, WIDTH, TOKENS, BATCH, ENDS = 3000, 64, 8, 16, (0, 2, 4)
SIZE = 4 * VOCABULARY * WIDTH  # bytes of the shared weight


def network():
    """An embedding that is the unembedding, too, and two blocks."""
    torch.manual_seed(0)
    embedding, readout = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    readout.weight = embedding.weight
    blocks = [nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH)) for _ in "ab"]
    return [embedding, *blocks, readout]


def words():
    return torch.randint(VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def peak(method, optimizer, workers=None):
    """The peak bytes of training in this process, without weights of stages that live in others alone."""
    momentum = 0.9 if optimizer == "sgd" else None
    with peak_memory() as measured:
        layers = network()
        stages = [nn.Sequential(*layers[a:b]) for a, b in pairwise(ENDS)]
        trainer = stretto.Trainer(
            stages, token_loss, make_optimizer(optimizer, 1e-3, momentum, 0.0), method, workers=workers, device="cpu",
            example=words(),
        )  # fmt: skip
        for _ in range(8):
            trainer.step(words(), words())
        trainer.flush()
    own = stages if "RANK" not in os.environ else stages[int(os.environ["RANK"]) :][:1]
    return measured.bytes - size_of(stages) + size_of(own)


def size_of(stages):
    """Bytes of the parameters of stages, those that they share once."""
    return sum(4 * p.numel() for p in {p for stage in stages for p in stage.parameters()})
