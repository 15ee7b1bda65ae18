"""What the proof of a split costs, in steps of training, and what is looked at in each step, in shares of it.

That is: what was changed before the step, and whether a loss of the user's own is a mean over four micro-batches.
"""

import json
import logging
import time
import timeit
import warnings
from pathlib import Path
from statistics import median

import torch
from torch import nn

import stretto

RESULT = Path(__file__).with_name("proof.json")
ROUNDS, STEPS = 5, 5


class Residual(nn.Module):
    """Convolutions with skip connections."""

    def __init__(self, channels: int = 32, depth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
            for _ in range(depth)
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of images [N, 3, H, W]."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Encoder(nn.Module):
    """torch's own encoder layers, classes of the mean token; cut by torch.export."""

    def __init__(self, width: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(256, width)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True), depth
        )
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of tokens [N, T]."""
        return self.head(self.layers(self.table(tokens)).mean(1))


def mlp(width: int, depth: int = 8) -> nn.Sequential:
    """Linear layers with tanh."""
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


CASES = {
    "MLP, width 64": lambda: (mlp(64), torch.randn(128, 64)),
    "MLP, width 512": lambda: (mlp(512), torch.randn(128, 512)),
    "residual network": lambda: (Residual(), torch.randn(16, 3, 32, 32)),
    "transformer, exported": lambda: (Encoder(), torch.randint(256, (8, 64))),
}


def main() -> None:
    """Measure each case some times, interleaved, and write the medians."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in CASES}
    for _ in range(ROUNDS):
        for name, make in CASES.items():
            found[name].append(measured(*make()))
    rows = {
        name: {
            "step_seconds": median(step for step, _, _, _ in rounds),
            "proof_steps": median(proof / step for step, proof, _, _ in rounds),
            "check_share": median(check / step for step, _, check, _ in rounds),
            "loss_share": median(loss for _, _, _, loss in rounds),
        }
        for name, rounds in found.items()
    }
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")
    for name, row in rows.items():
        print(
            f"{name:<24} step {1e3 * row['step_seconds']:7.2f} ms, proof {row['proof_steps']:5.1f} steps, "
            f"changes {row['check_share']:.2%}, loss {row['loss_share']:.2%} of a step"
        )


def measured(model: nn.Module, x: torch.Tensor) -> tuple[float, float, float, float]:
    """Seconds of a step, of the proof of a split, and of the look before a step; the share of a loss's check."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("stretto")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    stages = stretto.split(model, 2, example=x)
    logger.removeHandler(handler)
    proof = float(next(line for line in said if line.startswith("the proof took")).split()[3])
    target = torch.randint(10, (len(x),))
    trainer = stretto.Trainer(stages, nn.functional.cross_entropy, lambda params: torch.optim.SGD(params, lr=0.01))
    trainer.step(x, target)
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        trainer.step(x, target)
        seconds.append(time.perf_counter() - began)
    check = timeit.timeit(trainer._settled.check, number=200) / 200
    return median(seconds), proof, check, share_of_loss_check(stages, x, target)


def share_of_loss_check(stages: nn.Sequential | list[nn.Module], x: torch.Tensor, target: torch.Tensor) -> float:
    """The share of a step in which a loss that nobody knows is compared on joined micro-batches."""

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, y)

    trainer = stretto.Trainer(stages, loss, lambda params: torch.optim.SGD(params, lr=0.01), "gpipe(microbatches=4)")
    compare, shares, spent = trainer._splitter._check, [], [0.0]

    def timed(*args: object) -> None:
        began = time.perf_counter()
        compare(*args)
        spent[0] += time.perf_counter() - began

    trainer._splitter._check = timed
    for _ in range(4 * STEPS):  # the first ones are looked at more closely
        spent[0], began = 0.0, time.perf_counter()
        trainer.step(x, target)
        shares.append(spent[0] / (time.perf_counter() - began))
    return median(shares[-STEPS:])


if __name__ == "__main__":
    main()
