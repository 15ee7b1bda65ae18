"""Law 1: synchronous methods, and any method with one stage, equal plain PyTorch training of the uncut model."""

from functools import partial

import pytest
import torch

import stretto
from laws.networks import NETWORKS, assert_equal, train_plainly
from pairwise import each_once, pairwise, thinned

STEPS = 10
ONE_STAGE = [
    "greedy", "overlapping", "overlapping(combine=mean)", "overlapping(delay=1)", "overlapping(combine=mean, delay=1)",
    "chunked", "chunked(chunks=1)",
]  # fmt: skip
OPTIMIZERS = {
    "sgd": (partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2), None),
    "sgd-steplr": (
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2),
        partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5),
    ),
    "adam-onecycle": (
        partial(torch.optim.Adam, lr=1e-2),
        partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=STEPS + 2),
    ),
    "adamw": (partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1), None),
}


def compare(name, method, num_stages, optimizer, scheduler=None, **options):
    network = NETWORKS[name]
    stages, batches = network.stages(num_stages), network.batches(STEPS)
    wanted, losses = train_plainly(stages, network.loss, optimizer, scheduler, batches)
    trainer = stretto.Trainer(
        stages, network.loss, optimizer, method, example=batches[0][0], scheduler=scheduler, **options
    )
    returned = [trainer.step(x, y) for x, y in batches]
    rest = trainer.flush()
    assert_equal(trainer.stages, wanted)
    assert [value for value in returned if value is not None] + rest == losses
    return trainer, wanted


@pytest.mark.parametrize(("name", "num_stages", "optimizer"), each_once(pairwise(NETWORKS, (1, 2, 3, 4), OPTIMIZERS)))
def test_backprop_with_any_number_of_stages_is_plain_training(name, num_stages, optimizer):
    compare(name, "backprop", num_stages, *OPTIMIZERS[optimizer])


@pytest.mark.parametrize(
    ("name", "method", "optimizer"), each_once(pairwise(NETWORKS, ONE_STAGE, ("sgd-steplr", "adam-onecycle")))
)
def test_every_method_with_one_stage_is_plain_training(name, method, optimizer):
    compare(name, method, 1, *OPTIMIZERS[optimizer])


@pytest.mark.parametrize("name", thinned(NETWORKS, 4, first=1))
def test_one_chunk_is_backprop(name):
    compare(name, "chunked(chunks=1)", 4, *OPTIMIZERS["sgd-steplr"])


def test_the_model_that_comes_out_computes_what_the_plain_one_does():
    trainer, wanted = compare("cnn", "backprop", 3, *OPTIMIZERS["sgd"])
    x, _ = NETWORKS["cnn"].batches(1, seed=9)[0]
    wanted.eval()
    expected = x
    for stage in wanted:
        expected = stage(expected)
    assert torch.equal(trainer.model.eval()(x), expected)
    assert isinstance(trainer.model, torch.nn.Sequential)
