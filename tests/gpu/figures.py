"""What things cost on an accelerator. Ratios are medians of rounds that take turns, in one process."""

import statistics
import time
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from stretto.nn import devices


class Scale(NamedTuple):
    """How much is measured."""

    widths: tuple[int, ...]
    batch: int
    rounds: int
    steps: int
    message: int  # bytes


FULL = Scale(widths=(512, 2048, 8192), batch=512, rounds=9, steps=10, message=1 << 28)
TINY = Scale(widths=(8,), batch=8, rounds=1, steps=1, message=1 << 10)
BLOCKS, CLASSES = 8, 10


def blocks(width):
    torch.manual_seed(0)
    return [*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(BLOCKS - 1)), nn.Linear(width, CLASSES)]


def batch(width, scale, device):
    return torch.randn(scale.batch, width, device=device), torch.randint(CLASSES, (scale.batch,)).to(device)


def optimizer(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def plain_step(width, x, y):
    model = nn.Sequential(*blocks(width)).to(x.device)
    made = optimizer(model.parameters())

    def step():
        loss = cross_entropy(model(x), y)
        loss.backward()
        made.step()
        made.zero_grad()
        return loss.item()

    return step


def stretto_step(method, width, x, y, **options):
    trainer = stretto.Trainer(blocks(width), cross_entropy, optimizer, method, example=x, **options)
    return lambda: trainer.step(x, y)


def seconds(step, steps, device):
    devices.synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    devices.synchronize(device)
    return (time.perf_counter() - begin) / steps


def emulation_over_a_plain_loop(scale):
    """Eight stages emulated on one device, over the uncut loop; by method and width."""
    device, ratios = devices.pick_device("auto"), {}
    for width in scale.widths:
        x, y = batch(width, scale, device)
        variants = {name: stretto_step(name, width, x, y) for name in ("backprop", "pb", "greedy", "1f1b")}
        variants["plain"] = plain_step(width, x, y)
        samples = {name: [] for name in variants}
        for number in range(1 + scale.rounds):
            for name, step in variants.items():
                taken = seconds(step, scale.steps, device)
                samples[name] += [taken] if number else []  # the first round warms up
        ratios[width] = {
            name: round(statistics.median(a / b for a, b in zip(samples[name], samples["plain"], strict=True)), 3)
            for name in variants
        }
        ratios[width]["plain, ms"] = round(1000 * statistics.median(samples["plain"]), 3)
    return ratios


def copies(scale):
    """GB/s between the host and a device, pinned as messages are, and pageable."""
    device = devices.pick_device("auto")
    there = torch.zeros(scale.message, dtype=torch.uint8, device=device)
    memory = {
        "pinned": devices.host_memory(scale.message, device),
        "pageable": torch.zeros(scale.message, dtype=torch.uint8),
    }
    rates = {}
    for name, here in memory.items():
        for way, copy in (("to", lambda here=here: there.copy_(here)), ("from", lambda here=here: here.copy_(there))):
            copy()
            taken = statistics.median(seconds(copy, 1, device) for _ in range(scale.rounds))
            rates[f"{name}, {way} the device"] = round(scale.message / taken / 1e9, 2)
    return rates


def peak_memory(scale):
    """Bytes allocated at most in a step; what torch does not know of a kind of device is left out."""
    device, width, peaks = devices.pick_device("auto"), scale.widths[-1], {}
    x, y = batch(width, scale, device)
    for name in ("backprop", "gpipe", "gpipe(recompute=True)", "pipedream", "pb"):
        step = stretto_step(name, width, x, y)
        try:
            torch.accelerator.reset_peak_memory_stats(device)
        except RuntimeError:
            return "unknown to torch here"
        step()
        devices.synchronize(device)
        peaks[name] = torch.accelerator.max_memory_allocated(device)
        del step
        torch.accelerator.empty_cache()
    return peaks


FIGURES = [emulation_over_a_plain_loop, copies, peak_memory]
