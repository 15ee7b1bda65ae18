"""A chunk trains as the method inside it trains a network of the chunk's stages, on what the chunk below sends up."""

import copy
import json
from functools import partial

import pytest
import torch
from torch import nn

import stretto
from laws.networks import NETWORKS, assert_equal
from stretto import UsageError
from stretto.cli.program import main

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
INSIDE = {
    "1f1b(microbatches=3)": 3, "zb-h2(microbatches=2)": 2, "pipedream": 1,
    "paci(every=2)": 2, "pb": 1, "pb(spike=True)": 1, "pb-lwp-sc": 1, "pb(warmup=3)": 1, "spectrain": 1,
    "pipeoptim": 1, "pipemare(microbatches=2)": 2,
}  # fmt: skip


def trained(stages, loss, method, batches, **options):
    trainer = stretto.Trainer(stages, loss, SGD, method, example=batches[0][0], **options)
    for x, y in batches:
        trainer.step(x, y)
    trainer.flush()
    return trainer


@pytest.mark.parametrize(
    "inside", [pytest.param(each, marks=[pytest.mark.slow] * (n % 3 > 0)) for n, each in enumerate(INSIDE)]
)
def test_each_chunk_is_the_method_inside_it(inside):
    network = NETWORKS["mlp"]
    stages, batches, sent = network.stages(4), network.batches(7), []
    below, above = copy.deepcopy(stages[:2]), copy.deepcopy(stages[2:])
    trainer = stretto.Trainer(stages, network.loss, SGD, f"chunked(inside={inside})", example=batches[0][0])
    below[1] = nn.Sequential(below[1], copy.deepcopy(trainer.heads[1]))
    trainer.stages[1].register_forward_hook(lambda *given: sent.append(given[-1].detach().clone()))
    for x, y in batches:
        trainer.step(x, y)
    trainer.flush()
    parts = INSIDE[inside]
    inputs = [torch.cat(sent[first : first + parts]) for first in range(0, len(sent), parts)]
    assert len(inputs) == len(batches)
    one = trained(below, network.loss, inside, batches)
    other = trained(above, network.loss, inside, [(x, y) for x, (_, y) in zip(inputs, batches, strict=True)])
    assert_equal([trainer.stages[0], nn.Sequential(trainer.stages[1], trainer.heads[1])], one.stages, tolerance=1e-12)
    assert_equal(trainer.stages[2:], other.stages, tolerance=1e-12)


@pytest.mark.parametrize("inside", ["1f1b(microbatches=2)", "pb(spike=True)", "zb-h1", "interleaved"])
def test_one_chunk_is_the_method_to_the_bit(inside):
    network = NETWORKS["mlp"]
    stages, batches = network.stages(4), network.batches(5)
    alone = trained(copy.deepcopy(stages), network.loss, inside, batches, clip=0.5)
    chunk = trained(stages, network.loss, f"chunked(chunks=1, inside={inside})", batches, clip=0.5)
    assert all(map(torch.equal, alone.gather().values(), chunk.gather().values()))


@pytest.mark.parametrize("method", ["chunked(chunks=3, inside=1f1b(microbatches=2))", "greedy(microbatches=2)",
                                    "chunked(inside=pb)", "overlapping(microbatches=3)"])  # fmt: skip
def test_any_number_of_workers_comes_to_the_same(method):
    network = NETWORKS["mlp"]
    stages, batches = network.stages(4), network.batches(5)
    found = [
        trained(copy.deepcopy(stages), network.loss, method, batches, workers=count).gather() for count in (1, 2, 3, 4)
    ]
    assert all(torch.equal(one[name], found[0][name]) for one in found for name in one)


def simulated(capsys, *arguments):
    assert main(["simulate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_two_chunks_of_four_stages_idle_no_more_than_1f1b_on_four(capsys):
    pipeline = simulated(capsys, "--method", "1f1b(microbatches=8)", "--stages", "4")
    chunks = simulated(capsys, "--method", "chunked(chunks=2, microbatches=8, inside=1f1b)", "--stages", "8")
    assert chunks["steady_bubble"] <= pipeline["bubble"] + 1e-9
    assert pipeline["steady_bubble"] == pytest.approx(pipeline["bubble"])
    whole = simulated(capsys, "--method", "chunked(chunks=2)", "--stages", "8")
    assert whole["steady_bubble"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chunked(microbatches=4, inside=1f1b(microbatches=4))", "in one place"),
        ("chunked(microbatches=4, inside=pb)", "pb has no option microbatches"),
        ("chunked(inside=greedy)", "heads of its own"),
        ("chunked(inside=1f1b(head=linear))", "heads of its own"),
        ("chunked(inside=pipedream-2bw)", "weights of one update ago"),
        ("chunked(inside=3)", "give a method's name"),
        ("overlapping(delay=1, microbatches=2)", "leave delay out"),
        ("1f1b(head_weight=-1)", "0 or more"),
        ("1f1b(head_at=x)", "give a stage"),
        ("pb(head=linear)", "is for synchronous methods"),
    ],
)
def test_what_does_not_go_together_is_refused(text, said):
    with pytest.raises(UsageError, match=said):
        stretto.method(text)


def test_a_head_behind_the_output_is_refused():
    with pytest.raises(UsageError, match="stages 0 to 2"):
        stretto.method("1f1b(head_at=3)").plan(4)
