"""A network whose examples depend on each other is trained whole, or refused where a minibatch is cut into parts."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from stretto import UsageError

IDS, Y = torch.arange(40).view(8, 5) * 7 % 9, torch.arange(8) % 3


class Over(nn.Module):
    """Attention over the batch: nn.MultiheadAttention without batch_first."""

    def __init__(self, batch_first=False):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.attention(x, x, x, need_weights=False)[0]


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) * torch.rand(len(x), *[1] * (x.dim() - 1))


def stages(middle, **embedding):
    torch.manual_seed(0)
    return [nn.Embedding(9, 6, **embedding), nn.Sequential(middle, nn.Flatten(), nn.Linear(30, 3))]


def trainer(given, method="gpipe(microbatches=2)", **options):
    return stretto.Trainer(given, cross_entropy, lambda params: torch.optim.SGD(params, lr=0.1), method, **options)


COUPLED = {
    "attention": (lambda: stages(Over()), "the output"),
    "a mean": (lambda: stages(Centred()), "the output"),
    "frequencies": (lambda: stages(nn.Identity(), scale_grad_by_freq=True), "the gradient"),
}


@pytest.mark.parametrize("case", COUPLED)
@pytest.mark.parametrize(
    "options", [{}, {"method": "backprop", "mesh": stretto.Mesh(data=2)}], ids=["pieces", "replicas"]
)
def test_examples_that_depend_on_each_other_are_refused_in_parts(case, options):
    make, what = COUPLED[case]
    with pytest.raises(UsageError, match=f"{what} of some examples depends on the other.*Cut nothing: microbatches=1"):
        trainer(make(), **options).step(IDS, Y)
    trainer(make(), "1f1b(microbatches=1)").step(IDS, Y)


INDEPENDENT = {
    "attention": lambda: stages(Over(batch_first=True)),
    "noise": lambda: stages(Noisy()),
    "sparse": lambda: stages(nn.Identity(), sparse=True),
    "dropout": lambda: stages(nn.Dropout(0.5)),
}


@pytest.mark.parametrize("case", INDEPENDENT)
def test_others_are_not(case):
    trainer(INDEPENDENT[case]()).step(IDS, Y)


def test_looking_leaves_nothing_behind():
    """Neither counters nor gradients, and hooks are not called."""
    given, seen = stages(Over(batch_first=True)), []
    given[1][0].register_forward_hook(lambda *_: seen.append(1))
    trainer(given).step(IDS, Y)
    assert given[1][0].calls == len(seen) == 2  # micro-batches
    assert given[1].training


def test_a_network_that_takes_one_number_of_rows_is_not_judged():
    class Fixed(nn.Module):
        def forward(self, x):
            return x.view(4, 5, 6) - x.view(4, 5, 6).mean(0)

    trainer(stages(Fixed())).step(IDS, Y)


def test_looking_calls_no_hook_of_a_backward():
    given, seen = stages(Over(batch_first=True)), []
    given[1][0].register_full_backward_hook(lambda *_: seen.append(1))
    trainer(given).step(IDS, Y)
    assert len(seen) == 2  # micro-batches


def test_a_module_that_is_compiled_in_place_is_compiled_as_without_a_look():
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    given, graphs = stages(Doubled()), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    given[1][0].compile(backend=backend)
    trainer(given).step(IDS, Y)
    assert graphs


def test_weights_that_a_look_cannot_put_back_are_named(monkeypatch):
    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.average = nn.Parameter(torch.ones(6), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.average.mul_(0.5)
            return x * self.average

    monkeypatch.setattr("stretto.nn.preserve.COPIED", 8)
    with pytest.raises(UsageError, match=r"changes its parameter 0\.average in place, and the model is too large"):
        trainer(stages(Moving())).step(IDS, Y)


def test_noise_of_numpy_is_no_dependence():
    class Drawn(nn.Module):
        def forward(self, x):
            return x + torch.from_numpy(np.random.randn(*x.shape)).float()

    trainer(stages(nn.Sequential(Drawn(), Drawn()))).step(IDS, Y)


@pytest.mark.slow
def test_what_is_compiled_inside_a_stage_is_compiled_afterwards():
    graphs = []

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice = torch.compile(lambda x: torch.tanh(x) * 2, backend=self.noted)

        @staticmethod
        def noted(graph, _):
            graphs.append(graph)
            return graph.forward

        def forward(self, x):
            return self.twice(x)

    given = trainer(stages(Compiled()))
    for _ in range(2):
        given.step(IDS, Y)
    assert graphs
