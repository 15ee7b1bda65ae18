"""What it takes to make a Trainer and to step grows as the stages and their actions do, for every method and head.

Calls are counted, not seconds: a loop over all stages for each stage shows in them, on any machine.
"""

import gc
import sys

import pytest
import torch
from torch import nn

import stretto
from stretto.heads.table import HEADS
from stretto.methods.table import METHODS

FEW = 20
SPARE = 1.1
MOMENTUM, ADAMW, NADAM = (
    lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=1e-3),
    lambda p: torch.optim.NAdam(p, lr=1e-3),
)
OPTIMIZERS = {"nesterov": NADAM, "pb(rotate=True)": ADAMW}
OPTIONS = ["pb(rotate=True)", "pb(spike=True)", "pb(warmup=2)", "pb(recompute=True)"]
LAST = {"pooled": "image", "sequence": "flattened", "linear": "rows"}  # what heads want of a network, else tokens
QUICK = {"pb", "synthetic-gradients", "greedy(head=segprop)"}


def network(kind, stages):
    if kind == "image":
        last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 4))
        return [*(nn.Conv2d(2, 2, 1) for _ in range(stages - 1)), last], (2, 2, 2), ()
    if kind == "flattened":
        last = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
        return [*(nn.Linear(4, 4) for _ in range(stages - 1)), last], (3, 4), ()
    return [nn.Linear(4, 4) for _ in range(stages)], *(((4,), ()) if kind == "rows" else ((3, 4), (3,)))


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def counted(work):
    """What it returns, and how many calls it made."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        result = work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return result, calls


def cost(method, kind, stages, options):
    """Calls that making a Trainer takes, those of a step, and the actions of a turn."""
    torch.manual_seed(0)
    layers, inputs, targets = network(kind, stages)
    x, y = torch.zeros(2 * stages, *inputs), torch.zeros(2 * stages, *targets, dtype=torch.long)
    optimizer = OPTIMIZERS.get(method, MOMENTUM)
    trainer, making = counted(
        lambda: stretto.Trainer(
            layers, stretto.mean(loss), optimizer, method, example=x, device="cpu", workers=None, **options
        )
    )
    _, stepping = counted(lambda: trainer.step(x, y))
    return making, stepping, sum(map(len, trainer.schedule.body))


def cases():
    kinds = dict.fromkeys([*METHODS, *OPTIONS], "rows")
    kinds |= {f"greedy(head={head})": LAST.get(head, "tokens") for head in HEADS}
    for name, kind in kinds.items():
        yield pytest.param(name, kind, {}, id=name, marks=() if name in QUICK else pytest.mark.slow)
    for options in (
        {"clip": 1.0},
        {"precision": "bf16"},
        {"mesh": stretto.Mesh(data=2)},
        {"mesh": stretto.Mesh(data=2), "sync": "local-sgd(every=2)"},
    ):
        yield pytest.param("pb", "rows", options, id="pb " + " ".join(map(str, options)), marks=pytest.mark.slow)


@pytest.mark.filterwarnings("ignore:.*it will overshoot:UserWarning")
@pytest.mark.parametrize(("method", "kind", "options"), [*cases()])
def test_work_grows_as_stages_or_actions_do(method, kind, options):
    """The synchronous pipelines have as many micro-batches as stages: their schedules grow with the square."""
    cost(method, kind, 4, options)  # what is done once in a process
    few, many = (cost(method, kind, stages, options) for stages in (FEW, 2 * FEW))
    growth = max(2.0, many[2] / few[2])
    assert many[0] <= SPARE * growth * few[0], f"making: {few[0]} calls for {FEW} stages, {many[0]} for {2 * FEW}"
    assert many[1] <= SPARE * growth * few[1], f"a step: {few[1]} calls for {FEW} stages, {many[1]} for {2 * FEW}"
