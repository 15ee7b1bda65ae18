"""`--accounting paper` gives the closed forms of Laskin, Metz et al. for every network; and counting changes nothing.

f_l, a_l: forward FLOPs per example of block and head, worked out here from shapes alone; a backward is two forwards.
"""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from pairwise import in_turn, slow_where
from stretto import UsageError, data, models
from stretto.measure import measure
from stretto.models.transformer import CausalAttention
from stretto.trainer.trainer import Trainer

NETWORKS = {
    "mlp": ("digits", {}, {"depth": 5, "width": 24}),
    "cnn": ("digits", {}, {"depth": 4, "width": 6}),
    "transformer": ("pydoc", {"context": 16}, {"depth": 3, "width": 8, "heads": 2}),
}


@pytest.fixture(scope="module")
def network(request):
    name, options, size = NETWORKS[request.param]
    dataset = data.load(name, **options)
    return dataset, lambda: models.build(request.param, dataset, **size)


def trainer_of(network, method):
    dataset, build = network
    model = build()
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    example = dataset.train.x[:4]
    return Trainer(model.layers, model.loss, optimizer, method, example=example, device="cpu")


def forward_flops(module, inputs):
    """Per example, from shapes: 2 k m n for each product of matrices."""
    counted = 0

    def hook(layer, given, output):
        nonlocal counted
        if isinstance(layer, nn.Linear):
            counted += 2 * layer.in_features * output.numel()
        elif isinstance(layer, nn.Conv2d):
            counted += 2 * layer.in_channels * layer.kernel_size[0] * layer.kernel_size[1] * output.numel()
        elif isinstance(layer, CausalAttention):  # queries with keys, then weights with values
            counted += 2 * 2 * given[0].shape[1] ** 2 * given[0].shape[2] * given[0].shape[0]

    handles = [layer.register_forward_hook(hook) for layer in module.modules()]
    with torch.no_grad():
        output = module(inputs)
    for handle in handles:
        handle.remove()
    return counted / len(inputs), output


def blocks_and_heads(trainer, x):
    blocks, heads = [], []
    for stage, head in zip(trainer.stages, trainer.heads, strict=True):
        flops, output = forward_flops(stage, x)
        blocks.append(flops)
        heads.append(0 if head is None else forward_flops(head, output)[0])
        x = output
    return blocks, heads


def chunk_sums(values, chunks):
    return [sum(part) for part in torch.tensor(values, dtype=torch.float64).tensor_split(chunks)]


def overlapping_waits(each):
    """A stage alone, or a stage and the hop it waits for: F below, F and I above, W below."""
    return max([3 * c for c in each] + [2 * (a + b) for a, b in itertools.pairwise(each)])


SERIAL = {
    "backprop": lambda each: 3 * sum(each),
    "greedy": lambda each: 3 * max(each),
    "chunked(chunks=2)": lambda each: 3 * max(chunk_sums(each, 2)),
    "chunked(chunks=3)": lambda each: 3 * max(chunk_sums(each, 3)),
    "overlapping(delay=0)": overlapping_waits,
    "overlapping(delay=1)": lambda each: 3 * max(each),
}


def each_on_a_network(methods):
    """Methods and networks, each method once in a quick test."""
    return pytest.mark.parametrize(
        ("method", "network"), in_turn(methods, list(NETWORKS), rounds=3, slow=2), indirect=["network"]
    )


@each_on_a_network(list(SERIAL))
def test_paper_accounting_gives_the_closed_forms(network, method):
    trainer = trainer_of(network, method)
    dataset = network[0]
    x, y = dataset.train.x[:4], dataset.train.y[:4]
    blocks, heads = blocks_and_heads(trainer, x)
    costs = measure(trainer, x, y, "paper")
    each = [f + a for f, a in zip(blocks, heads, strict=True)]
    assert costs.total == pytest.approx(3 * sum(each), rel=1e-12)
    assert costs.serial == pytest.approx(float(SERIAL[method](each)), rel=1e-12)


def test_equal_stages_wait_a_third_of_the_time_without_delay():
    stages = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)]
    costs = {}
    for delay in (0, 1):
        trainer = Trainer(
            stages, cross_entropy, partial(torch.optim.SGD, lr=0.1), f"overlapping(delay={delay})",
            heads=[None, *(nn.Identity() for _ in range(2)), None], device="cpu",
        )  # fmt: skip
        costs[delay] = measure(trainer, torch.randn(4, 8), torch.arange(4), "paper")
    assert costs[0].serial == pytest.approx(4 / 3 * costs[1].serial)
    assert costs[0].total == costs[1].total


@each_on_a_network(["backprop", "greedy", "overlapping", "chunked(chunks=2)"])
def test_batch_size_moves_neither_total_per_example_nor_serial(network, method):
    dataset = network[0]
    small, large = (
        measure(trainer_of(network, method), dataset.train.x[:size], dataset.train.y[:size]) for size in (3, 12)
    )
    assert small.total == pytest.approx(large.total, rel=1e-12)
    assert small.serial == pytest.approx(large.serial, rel=1e-12)


def test_overlapping_costs_backprop_and_its_heads_where_blocks_have_one_layer():
    dataset = data.load("digits")
    x, y = dataset.train.x[:4], dataset.train.y[:4]
    network = dataset, lambda: models.build("mlp", dataset, depth=8, width=64)
    overlapping = trainer_of(network, "overlapping")
    _, heads = blocks_and_heads(overlapping, x)
    expected = measure(trainer_of(network, "backprop"), x, y).total + 3 * sum(heads)
    assert measure(overlapping, x, y).total == pytest.approx(expected, rel=0.01)


def test_a_detached_input_needs_no_gradient_and_costs_none():
    dataset = data.load("digits")
    x, y = dataset.train.x[:4], dataset.train.y[:4]
    network = dataset, lambda: models.build("mlp", dataset, depth=4, width=64)
    greedy = trainer_of(network, "greedy")
    blocks, heads = blocks_and_heads(greedy, x)
    # every block but the last is one layer without an input gradient; the last holds the output layer, which has one
    output_layer = 2 * 64 * 10
    assert measure(greedy, x, y).total == 2 * sum(blocks) + output_layer + 3 * sum(heads)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x):
        query, key, value = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, dim=2))
        return scaled_dot_product_attention(query, key, value).squeeze(1)


def test_attention_on_the_cpu_counts_as_torch_says():
    T, d = 6, 8
    trainer = Trainer([Attention(d)], nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1), device="cpu")
    x = torch.randn(5, T, d)
    flops = measure(trainer, x, torch.zeros(5, T, d)).flops
    layer, product = 2 * T * d * 3 * d, 2 * T * T * d
    assert flops["F", 0] == layer + 2 * product
    # the backward knows neither scores nor input gradient: scores again, then gradients of q, k, v and the scores
    assert flops["B", 0] == layer + 5 * product


@pytest.mark.parametrize(
    "method",
    slow_where(
        lambda method: method != "overlapping(delay=1)",
        ["backprop", "greedy", "overlapping(delay=1)", "chunked(chunks=2)"],
    ),
)
def test_counting_leaves_no_trace(method):
    dataset = data.load("digits")
    x, y = dataset.train.x[:16], dataset.train.y[:16]

    def states(count):
        model = models.build("cnn", dataset, depth=4, width=4)
        layers = [*model.layers[:-1], nn.Sequential(nn.Dropout(0.5), model.layers[-1])]
        trainer = Trainer(
            layers, model.loss, partial(torch.optim.SGD, lr=0.1, momentum=0.9), method, example=x, device="cpu"
        )
        before = {key: value.clone() for key, value in trainer.gather().items()}
        torch.manual_seed(7)
        if count:
            measure(trainer, x, y)
            assert all(torch.equal(before[key], value) for key, value in trainer.gather().items())
            modules = [part for part in (*trainer.stages, *trainer.heads) if part is not None]
            assert all(parameter.grad is None for module in modules for parameter in module.parameters())
            assert all(module.training for module in modules)
        random = torch.rand(())
        for _ in range(3):
            trainer.step(x, y)
        if count:
            measure(trainer, x, y)  # in the middle, with minibatches in flight
        for _ in range(3):
            trainer.step(x, y)
        trainer.flush()
        return {**trainer.gather(), "random": random}

    counted, plain = states(True), states(False)
    assert counted.keys() == plain.keys()
    assert all(torch.equal(counted[key], plain[key]) for key in plain)


def test_unknown_accounting_names_the_nearest():
    trainer = Trainer([nn.Linear(2, 2)], cross_entropy, partial(torch.optim.SGD, lr=0.1), device="cpu")
    with pytest.raises(UsageError, match=r"'papr': did you mean 'paper'"):
        measure(trainer, torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), "papr")


def test_steps_of_a_synchronous_phase_take_the_whole_network():
    """No other micro-batch is under way then: 3 x the forward, against the slowest stage's share in between."""
    model = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)]
    trainer = Trainer(model, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, 0.1), "pb(warmup=3, finish=10)")
    x, y = torch.randn(2, 8), torch.tensor([1, 2])
    costs = measure(trainer, x, y, "paper")
    whole, stage = 4 * 3 * 2 * 8 * 8, 3 * 2 * 8 * 8
    assert costs.serial_after(2) == 2 * whole
    assert costs.serial_after(7) == 3 * whole + 4 * stage
    assert costs.serial_after(12) == 5 * whole + 7 * stage
    assert trainer.method.phases.synchronous_among(12) == sum(trainer.method.phases.synchronous(n) for n in range(12))
