"""What emulation costs beside hand-written loops: see README.md in this folder.

OMP_NUM_THREADS=1 python benchmarks/emulation/main.py [--widths 64 256 512 1024] [--out result.json]
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import stretto

STAGES, BATCH, CLASSES, ROUNDS = 8, 128, 10, 9
Step = Callable[[], object]


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def blocks(width: int) -> list[nn.Sequential]:
    """Eight one-layer blocks; the last also holds the output layer."""
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(STAGES)]
    made[-1].append(nn.Linear(width, CLASSES))
    return made


def heads(width: int, first: int) -> list[nn.Module | None]:
    """A linear head after each block from `first` on, but the last."""
    return [nn.Linear(width, CLASSES) if first <= s < STAGES - 1 else None for s in range(STAGES)]


def uncut(width: int, x: Tensor, y: Tensor) -> Step:
    """One module, one optimizer."""
    model = nn.Sequential(*blocks(width))
    made = optimizer(list(model.parameters()))

    def step() -> float:
        loss = cross_entropy(model(x), y)
        loss.backward()
        made.step()
        made.zero_grad()
        return loss.item()

    return step


def hand_cut(width: int, x: Tensor, y: Tensor) -> Step:
    """Backprop cut in eight stages with eight optimizers."""
    stages = blocks(width)
    optimizers = [optimizer(list(stage.parameters())) for stage in stages]

    def step() -> float:
        inputs, outputs, h = [], [], x
        for index, stage in enumerate(stages):
            h = h.detach()
            if index:
                h.requires_grad_()
            inputs.append(h)
            h = stage(h)
            outputs.append(h)
        loss = cross_entropy(h, y)
        loss.backward()
        optimizers[-1].step()
        optimizers[-1].zero_grad()
        for index in range(STAGES - 2, -1, -1):
            outputs[index].backward(inputs[index + 1].grad)
            optimizers[index].step()
            optimizers[index].zero_grad()
        return loss.item()

    return step


def hand_greedy(width: int, x: Tensor, y: Tensor) -> Step:
    """The loop that trains the same blocks and heads, each by its own loss."""
    stages, aux = blocks(width), heads(width, 0)
    optimizers = [
        optimizer([*stage.parameters(), *(head.parameters() if head else ())])
        for stage, head in zip(stages, aux, strict=True)
    ]

    def step() -> float:
        h, loss = x, torch.zeros(())
        for stage, head, made in zip(stages, aux, optimizers, strict=True):
            h = stage(h.detach())
            loss = cross_entropy(head(h) if head else h, y)
            loss.backward()
            made.step()
            made.zero_grad()
        return loss.item()

    return step


def duplicated_overlapping(width: int, x: Tensor, y: Tensor) -> Step:
    """Overlapping as the paper draws it: every shared block runs forward twice, in two graphs."""
    stages, aux = blocks(width), heads(width, 1)
    optimizers = [
        optimizer([*stage.parameters(), *(head.parameters() if head else ())])
        for stage, head in zip(stages, aux, strict=True)
    ]

    def step() -> float:
        h, loss = x, torch.zeros(())
        for lower in range(STAGES - 1):
            h = stages[lower](h.detach())
            top = stages[lower + 1](h)
            head = aux[lower + 1]
            loss = cross_entropy(head(top) if head else top, y)
            loss.backward()
        for made in optimizers:
            made.step()
            made.zero_grad()
        return loss.item()

    return step


def emulated(method: str, width: int, x: Tensor, y: Tensor) -> Step:
    trainer = stretto.Trainer(blocks(width), cross_entropy, optimizer, method, device="cpu")
    return lambda: trainer.step(x, y)


RATIOS = {
    "backprop / hand-cut loop": ("backprop", "hand-cut", 1.06),
    "greedy / hand-written greedy": ("greedy", "hand-greedy", 1.06),
    "overlapping / duplicated form": ("overlapping", "duplicated", 0.85),
    "hand-cut loop / uncut loop": ("hand-cut", "uncut", None),
    "backprop / uncut loop": ("backprop", "uncut", None),
}


def measure(width: int) -> dict[str, dict[str, float]]:
    """Interleave all loops, so that a slow moment of the machine hits them all; medians of nine rounds."""
    torch.manual_seed(1)
    x, y = torch.randn(BATCH, width), torch.randint(0, CLASSES, (BATCH,))
    loops: dict[str, Step] = {
        "uncut": uncut(width, x, y),
        "hand-cut": hand_cut(width, x, y),
        "backprop": emulated("backprop", width, x, y),
        "hand-greedy": hand_greedy(width, x, y),
        "greedy": emulated("greedy", width, x, y),
        "duplicated": duplicated_overlapping(width, x, y),
        "overlapping": emulated("overlapping", width, x, y),
        "overlapping(delay=1)": emulated("overlapping(delay=1)", width, x, y),
    }
    steps = max(5, 5000 // width)
    for step in loops.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, step in loops.items():
            start = time.perf_counter()
            for _ in range(steps):
                step()
            times[name].append((time.perf_counter() - start) / steps)
    seconds = {name: statistics.median(each) for name, each in times.items()}
    # The ratio of each round, then the median: neighbours in time share the machine's mood.
    ratios = {
        name: statistics.median(a / b for a, b in zip(times[over], times[under], strict=True))
        for name, (over, under, _) in RATIOS.items()
    }
    return {"milliseconds": {name: 1e3 * each for name, each in seconds.items()}, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 512, 1024])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "result.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for width in chosen.widths:
        results[str(width)] = measure(width)
        print(f"{width} units, batch {BATCH}, one thread")
        for name, value in results[str(width)]["ratios"].items():
            bar = RATIOS[name][2]
            verdict = "" if bar is None or width != 512 else f"   bar {bar}: {'met' if value <= bar else 'MISSED'}"
            print(f"  {name:<32} {value:.3f}{verdict}")
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    chosen.out.write_text(json.dumps({"machine": machine, "widths": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
