"""Embeddings with sparse=True come to the numbers of plain training, clipped and measured as dense ones are."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import stretto
from pairwise import in_turn

METHODS = ["backprop", "1f1b(microbatches=2)", "gpipe(microbatches=3)"]
LATE = ["pb", "pipedream", "pb-sc", "pipedream-2bw(microbatches=3)"]
KINDS = {
    "embedding": nn.Embedding,
    "mean": nn.EmbeddingBag,
    "sum": lambda *a, **k: nn.EmbeddingBag(*a, mode="sum", **k),
}

torch.manual_seed(0)
IDS, Y = torch.randint(12, (5, 7, 3)), torch.randn(5, 7, 1, dtype=torch.float64)


class First(nn.Module):
    def __init__(self, kind, *, sparse):
        super().__init__()
        self.kind, self.table = kind, KINDS[kind](12, 4, sparse=sparse, dtype=torch.float64)

    def forward(self, ids):
        return self.table(ids).mean(1) if self.kind == "embedding" else self.table(ids)


def stages(kind, *, sparse):
    torch.manual_seed(1)
    return [First(kind, sparse=sparse), nn.Tanh(), nn.Linear(4, 1, dtype=torch.float64)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def with_momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(kind, method, *, sparse, clip, optimizer=sgd):
    trainer = stretto.Trainer(stages(kind, sparse=sparse), mse_loss, optimizer, method, clip=clip, device="cpu")
    norms = []
    for ids, y in zip(IDS, Y, strict=True):
        trainer.step(ids, y)
        norms.append(trainer.grad_norm)
    trainer.flush()
    return trainer, norms


def apart(one, other):
    return max(float((a - b).detach().abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("kind", "method"), in_turn(KINDS, METHODS, rounds=3))
@pytest.mark.parametrize("clip", [None, 0.05])
def test_they_equal_a_plain_loop(kind, method, clip):
    """torch.nn.utils.clip_grad_norm_ refuses sparse gradients: the plain loop has dense ones, the same otherwise."""
    plain = nn.Sequential(*stages(kind, sparse=clip is None))
    optimizer, norms = sgd(plain.parameters()), []
    for ids, y in zip(IDS, Y, strict=True):
        optimizer.zero_grad()
        mse_loss(plain(ids), y).backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), clip)))
        optimizer.step()
    trainer, measured = trained(kind, method, sparse=True, clip=clip)
    assert apart(trainer.model, plain) < 1e-12
    assert clip is None or measured == pytest.approx(norms, abs=1e-12)


@pytest.mark.parametrize(("kind", "method"), in_turn(KINDS, LATE, rounds=3))
@pytest.mark.parametrize("clip", [None, 0.05])
def test_late_gradients_equal_dense_ones(kind, method, clip):
    optimizer = with_momentum if "sc" in method else sgd
    (one, norms), (other, dense) = (
        trained(kind, method, sparse=sparse, clip=clip, optimizer=optimizer) for sparse in (True, False)
    )
    assert apart(one.model, other.model) < 1e-12
    assert norms == (dense if clip is None else pytest.approx(dense, abs=1e-12))


def test_a_tracker_is_told_their_norm(tmp_path):
    def fitted(sparse):
        trainer = stretto.Trainer(stages("mean", sparse=sparse), mse_loss, sgd, device="cpu")
        log = stretto.trackers.CSV(folder=str(tmp_path / str(sparse)))
        trainer.fit((IDS[0], Y[0]), epochs=2, batch_size=3, log=log, quiet=True)
        return copy.deepcopy(trainer.model), trainer.grad_norm

    (one, norm), (other, dense) = fitted(sparse=True), fitted(sparse=False)
    assert apart(one, other) < 1e-12
    assert norm == pytest.approx(dense, abs=1e-12)


class Back(nn.Module):
    """An unembedding that looks all tokens up, or multiplies with the weight."""

    def __init__(self, weight, *, sparse):
        super().__init__()
        self.weight, self.sparse = weight, sparse

    def forward(self, hidden):
        every = nn.functional.embedding(torch.arange(12), self.weight, sparse=True) if self.sparse else self.weight
        return hidden @ every.T


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sparse", [False, True])
def test_tied_weights_add_sparse_and_dense_ones(method, sparse):
    def tied():
        torch.manual_seed(1)
        embedding = nn.Embedding(12, 4, sparse=not sparse, dtype=torch.float64)
        return [embedding, nn.Tanh(), Back(embedding.weight, sparse=sparse)]

    plain = nn.Sequential(*tied())
    optimizer = sgd(plain.parameters())
    trainer = stretto.Trainer(tied(), cross_entropy, sgd, method, clip=math.inf, device="cpu")
    for ids in IDS[:, :, 0]:
        optimizer.zero_grad()
        cross_entropy(plain(ids), ids.flip(0)).backward()
        optimizer.step()
        trainer.step(ids, ids.flip(0))
    assert apart(trainer.model, plain) < 1e-12
