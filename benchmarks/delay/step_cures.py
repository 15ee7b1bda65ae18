"""What feedback=, rotate= and spike= add to a step and to memory, beside the closed forms: README.md in this folder.

OMP_NUM_THREADS=1 python benchmarks/delay/step_cures.py [--out step_cures.json]
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

import stretto

HERE = Path(__file__).parent
STAGES, WIDTH, BATCH, STEPS, ROUNDS = 8, 256, 128, 10, 9
CURES = (
    "feedback=1", "rotate=one-sided", "rotate=True", "rotate=True, feedback=1", "spike=True", "rotate=True, spike=True",
)  # fmt: skip
WEIGHT = 4 * WIDTH * (WIDTH + 1)  # bytes of a stage's weight and bias
SIDE = 2 * 4 * WIDTH**2  # of a product and a basis
FORMS = {"feedback=1": WEIGHT, "rotate=one-sided": SIDE, "rotate=True": 2 * SIDE}
FORMS["rotate=True, feedback=1"] = FORMS["rotate=True"] + WEIGHT
FORMS["rotate=True, spike=True"] = FORMS["rotate=True"]
RATE = 1e-4
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=RATE, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=RATE),
    "NAdam": partial(torch.optim.NAdam, lr=RATE),
    "muon": partial(stretto.optim.muon, lr=RATE),
    "SOAP": partial(stretto.optim.SOAP, lr=RATE),
    "Lion": partial(stretto.optim.Lion, lr=RATE),
}


def trainer_of(cure: str, batch: int, optimizer: str = "AdamW") -> tuple[stretto.Trainer, Callable[[], object]]:
    """A trainer that is full of micro-batches, and a step of it."""
    torch.manual_seed(0)
    stages = [nn.Linear(WIDTH, WIDTH) for _ in range(STAGES)]
    method = f"pb({cure})" if cure else "pb"
    trainer = stretto.Trainer(stages, mse_loss, OPTIMIZERS[optimizer], method, device="cpu", workers=1)
    x, y = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)
    for _ in range(2 * STAGES):
        trainer.step(x, y)
    return trainer, lambda: trainer.step(x, y)


def state_bytes(trainer: stretto.Trainer) -> int:
    """Of all tensors in the optimizers' states but counts."""
    states = (state for optimizer in trainer.optimizers if optimizer is not None for state in optimizer.state.values())
    return sum(value.nbytes for state in states for key, value in state.items() if key != "step")


def ratios(batch: int, cures: Sequence[str] = CURES, optimizer: str = "AdamW") -> dict[str, float]:
    """The time of a step to that without a cure: the median over interleaved rounds."""
    steps = {cure: trainer_of(cure, batch, optimizer)[1] for cure in ("", *cures)}
    times: dict[str, list[float]] = {cure: [] for cure in steps}
    for number in range(ROUNDS):
        for cure, step in list(steps.items())[:: 1 if number % 2 else -1]:  # each comes after another one in turn
            step()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            times[cure].append(time.perf_counter() - start)
    return {
        cure: round(statistics.median(a / b for a, b in zip(times[cure], times[""], strict=True)), 3) for cure in cures
    }


def state() -> dict[str, dict[str, float]]:
    """What each cure keeps beside AdamW's own state: in tensors of the weights' size, and to its closed form."""
    plain, memory = state_bytes(trainer_of("", BATCH)[0]), {}
    for cure in CURES:
        more = (state_bytes(trainer_of(cure, BATCH)[0]) - plain) / STAGES
        assert cure in FORMS or more == 0, f"{cure} keeps {more} bytes a stage"
        memory[cure] = {"tensors a weight": more / WEIGHT}
        if cure in FORMS:
            memory[cure]["to the closed form"] = more / FORMS[cure]
    return memory


PARTS: dict[str, Callable[[], object]] = {
    f"batch {BATCH}": lambda: ratios(BATCH),
    f"batch {8 * BATCH}": lambda: ratios(8 * BATCH),
    "state": state,
    "spike=True by optimizer": lambda: {
        name: ratios(BATCH, ("spike=True",), name)["spike=True"] for name in OPTIMIZERS
    },
}


def main() -> None:
    """Measure, print and write it all, or some parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "step_cures.json")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=tuple(PARTS), help="parts; the file keeps others")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.exists() else {}
    found["machine"] = {
        "python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()
    }  # fmt: skip
    for part in chosen.only:
        found[part] = PARTS[part]()
        print(part, json.dumps(found[part], indent=1))
    chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
