"""Networks side by side train as they do alone: what makes this study fast, held against plain runs."""

from collections.abc import Sequence

import torch
from network import stages
from runs import Run, examples, loss, optimizer, scales
from torch import Tensor

import stretto
from stretto.data import load

EPS = 1e-30  # an eps of Adam that is nothing at any scale


def check(runs: Sequence[Run], steps: int = 60) -> None:
    """Print how far apart a network's outputs are, first among all and then alone, in float64; fail beyond 1e-8."""
    for run in runs:
        together, alone = outputs(run, run.networks, steps)[-1], outputs(run, run.networks[-1:], steps)[0]
        apart = float((together - alone).abs().max())
        print(f"{run.optimizer} {run.method}: {apart:.1e} of {float(alone.abs().max()):.1f}", flush=True)
        assert apart < 1e-8, run


def outputs(run: Run, networks: list[tuple[float, int]], steps: int) -> Tensor:
    """What the networks answer to the test images after so many steps."""
    data = load("digits")
    rates, seeds = [rate for rate, _ in networks], [seed for _, seed in networks]
    modules = stages(seeds, scales(run.optimizer, rates), torch.float64)
    trainer = stretto.Trainer(modules, loss, optimizer(run.optimizer, rates[0], EPS), run.method, device="cpu")
    for (x, y), _ in zip(examples(data.train, seeds, 0), range(steps), strict=False):
        trainer.step(x.double(), y)
    trainer.flush()
    with torch.no_grad():
        return trainer.model(data.test.x.double().flatten(1).expand(len(seeds), -1, -1))
