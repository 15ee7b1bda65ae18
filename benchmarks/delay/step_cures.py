"""What feedback= and rotate= add to a step and to memory, beside the closed forms: see README.md in this folder.

OMP_NUM_THREADS=1 python benchmarks/delay/step_cures.py [--out step_cures.json]
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

import stretto

HERE = Path(__file__).parent
STAGES, WIDTH, BATCH, STEPS, ROUNDS = 8, 256, 128, 10, 9
CURES = ("feedback=1", "rotate=one-sided", "rotate=True", "rotate=True, feedback=1")
WEIGHT = 4 * WIDTH * (WIDTH + 1)  # bytes of a stage's weight and bias
SIDE = 2 * 4 * WIDTH**2  # of a product and a basis
FORMS = {"feedback=1": WEIGHT, "rotate=one-sided": SIDE, "rotate=True": 2 * SIDE}
FORMS["rotate=True, feedback=1"] = FORMS["rotate=True"] + WEIGHT


def trainer_of(cure: str, batch: int) -> tuple[stretto.Trainer, Callable[[], object]]:
    """A trainer with AdamW that is full of micro-batches, and a step of it."""
    torch.manual_seed(0)
    stages = [nn.Linear(WIDTH, WIDTH) for _ in range(STAGES)]
    method = f"pb({cure})" if cure else "pb"
    trainer = stretto.Trainer(
        stages, mse_loss, lambda params: torch.optim.AdamW(params, lr=1e-4), method, device="cpu", workers=1
    )
    x, y = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)
    for _ in range(20):
        trainer.step(x, y)
    return trainer, lambda: trainer.step(x, y)


def state_bytes(trainer: stretto.Trainer) -> int:
    """Of all tensors in the optimizers' states but counts."""
    states = (state for optimizer in trainer.optimizers if optimizer is not None for state in optimizer.state.values())
    return sum(value.nbytes for state in states for key, value in state.items() if key != "step")


def ratios(batch: int) -> dict[str, float]:
    """The time of a step to that without a cure: the median over interleaved rounds."""
    steps = {cure: trainer_of(cure, batch)[1] for cure in ("", *CURES)}
    times: dict[str, list[float]] = {cure: [] for cure in steps}
    for number in range(ROUNDS):
        for cure, step in list(steps.items())[:: 1 if number % 2 else -1]:  # each comes after another one in turn
            step()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            times[cure].append(time.perf_counter() - start)
    return {
        cure: round(statistics.median(a / b for a, b in zip(times[cure], times[""], strict=True)), 3) for cure in CURES
    }


def main() -> None:
    """Measure, print and write it all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "step_cures.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    times = {f"batch {batch}": ratios(batch) for batch in (BATCH, 8 * BATCH)}
    plain = state_bytes(trainer_of("", BATCH)[0])
    memory = {}
    for cure in CURES:
        more = state_bytes(trainer_of(cure, BATCH)[0]) - plain
        memory[cure] = {"tensors a weight": more / STAGES / WEIGHT, "to the closed form": more / STAGES / FORMS[cure]}
    for cure in CURES:
        print(f"{cure:<26}", *(f"{each[cure]:.2f}" for each in times.values()), memory[cure])
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    found = {"machine": machine, "a step, to that without": times, "state": memory}
    chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
