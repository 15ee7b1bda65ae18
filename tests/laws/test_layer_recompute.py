"""Layers that keep their inputs only: numbers to the last bit, and less memory."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from laws.networks import assert_equal
from pairwise import in_turn, thinned
from stretto.errors import UsageError
from stretto.measure.traced_layers import LiveBytes
from stretto.nn.layer_recompute import layers_of, marked

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2)
WIDTH, TOKENS = 8, 6


class Core(nn.Module):
    """softmax(q k / sqrt(d)), dropout, v."""

    recompute_selectively = True

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, q, k, *, v):
        scores = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), 2)
        return self.dropout(scores) @ v


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.core, self.norm = nn.Linear(WIDTH, 3 * WIDTH), Core(), nn.BatchNorm1d(TOKENS)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, 2)
        return x + self.core(q, k, v=v)


class Classes(nn.Sequential):
    def __init__(self):
        super().__init__(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(WIDTH * TOKENS, 4))


def stages(layers=1):
    torch.manual_seed(5)
    with torch.device("cpu"):
        made = [nn.Sequential(*[Attention() for _ in range(layers)]) for _ in range(3)]
        return [stage.double() for stage in (*made, Classes())]


def batches(number=6, examples=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(examples, TOKENS, WIDTH, generator=generator, dtype=torch.float64),
         torch.randint(4, (examples,), generator=generator))
        for _ in range(number)
    ]  # fmt: skip


def trained(method, recompute, layers=1, number=6, **options):
    trainer = stretto.Trainer(stages(layers), cross_entropy, SGD, method, recompute=recompute, example=batches(1)[0][0],
                              **options)  # fmt: skip
    losses = [trainer.step(x, y) for x, y in batches(number)]
    return trainer, [loss for loss in losses if loss is not None] + trainer.flush()


SYNCHRONOUS = ["backprop", "gpipe(microbatches=2)", "1f1b(microbatches=4)", "zb-h1(microbatches=4)",
               "1f1b(microbatches=4,recompute=True)", "interleaved(microbatches=4)"]  # fmt: skip
STASHED = ["pipedream", "pipedream-2bw", "pb(stash=True)"]
LOCAL = [
    "greedy(head=pooled)",
    "overlapping(head=pooled)",
    "chunked(chunks=2,head=pooled)",
    "chunked(microbatches=2, head=pooled)",
    "1f1b(microbatches=2, head=pooled)",
]
OTHERS = ["pb", "pb-lwp-sc", "spectrain", "pipemare"]
CASES = [*in_turn([*SYNCHRONOUS, *STASHED, *LOCAL], ["full", "selective"]), *((m, "selective") for m in OTHERS)]


@pytest.mark.parametrize(("method", "recompute"), thinned(CASES, 3))
def test_numbers_are_the_same_to_the_last_bit(method, recompute):
    """Dropout draws the same numbers again; running statistics are moved once."""
    (plain, losses), (again, others) = trained(method, "none", 2), trained(method, recompute, 2)
    assert losses == others
    assert_equal([*again.stages, *filter(None, again.heads)], [*plain.stages, *filter(None, plain.heads)])


def test_nothing_of_it_stays_on_modules():
    """Modules are as they were: their forwards, marks and copies."""
    trainer, _ = trained("1f1b(microbatches=2)", "full")
    assert all("forward" not in vars(module) for stage in trainer.stages for module in stage.modules())


def peak(recompute, layers=3):
    trainer, _ = trained("backprop", recompute, layers, 1)
    x, y = batches(1, examples=64)[0]
    with LiveBytes() as live:
        trainer.step(x, y)
    return max(live.held)


def test_memory_is_that_of_inputs_and_one_layer():
    """Of nine attentions; what one keeps, in numbers an example: norm, q k v and core, with scores and their mask."""
    plain, selective, full = map(peak, ("none", "selective", "full"))
    scores = 64 * TOKENS * TOKENS * 8  # bytes of one layer's: softmax, its dropout's mask, the dropped
    activation = 64 * TOKENS * WIDTH * 8
    assert 8 * 2 * scores <= plain - selective <= 9 * 3 * scores
    assert plain - full >= 8 * (4 * activation + 2 * scores)
    assert full < selective < plain


def test_a_second_backward_of_one_graph_computes_again():
    """As I and W do: each of them on its own second forward."""
    from stretto.nn.layer_recompute import Recomputing

    torch.manual_seed(3)
    layer = Attention().double()
    x = torch.randn(4, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(4)
    wanted = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    torch.manual_seed(4)
    with Recomputing([layer])():
        loss = layer(x).square().sum()
    state = torch.get_rng_state()
    halves = [torch.autograd.grad(loss, tensors, retain_graph=True) for tensors in ([x], [*layer.parameters()])]
    assert all(map(torch.equal, wanted, [*halves[0], *halves[1]]))
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_and_marks():
    first, *_, last = stages(2)
    assert layers_of(first) == list(first)
    assert layers_of(first[0]) == [first[0]]
    assert marked(first) == [first[0].core, first[1].core]
    traced = torch.fx.symbolic_trace(last)
    assert [type(layer) for layer in layers_of(traced)] == [nn.ReLU, nn.Flatten, nn.Linear]


class InPlace(nn.Module):
    def forward(self, x):
        return x.add_(1).tanh()


REFUSED = {
    "unknown recompute": (stages, "backprop", "sometimes", "recompute='sometimes'"),
    "nothing marked": (lambda: [nn.Linear(8, 4).double()], "backprop", "selective", "mark what takes memory"),
    "parts of images": (stages, "backprop", "full", "parts of images are not recomputed"),
    "live weights": (stages, "pb", "full", "other weights than their forward saw"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_recomputed(case):
    made, method, recompute, message = REFUSED[case]
    mesh = stretto.Mesh(space=(2, 1)) if case == "parts of images" else None
    with pytest.raises(UsageError, match=message):
        stretto.Trainer(made(), cross_entropy, SGD, method, recompute=recompute, mesh=mesh)


def test_a_layer_that_changes_its_input_is_refused():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), InPlace(), nn.Linear(8, 4)).double()]
    trainer = stretto.Trainer(layers, cross_entropy, SGD, recompute="full")
    with pytest.raises(UsageError, match="InPlace changes its input in place"):
        trainer.step(torch.randn(4, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 3]))
