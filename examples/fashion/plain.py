"""own.py's network, trained on one process by plain PyTorch alone: python plain.py FOLDER."""

import gzip
import sys
from pathlib import Path

import numpy as np
import torch
from own import build
from torch import Tensor, nn

STEPS, BATCH, EVERY = 300, 32, 50
CHECKPOINT = Path("plain.pt")


def read(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """The images [N, 1, 28, 28] and classes [N] of two idx files."""
    parts = [(folder / f"{name}-{part}-ubyte.gz").read_bytes() for part in ("images-idx3", "labels-idx1")]
    images, labels = (np.frombuffer(gzip.decompress(part), np.uint8) for part in parts)
    return torch.tensor(images[16:]).view(-1, 1, 28, 28) / 255, torch.tensor(labels[8:]).long()


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> str:
    """Loss and accuracy, in words."""
    model.eval()
    outputs = torch.cat([model(part) for part in x.split(500)])
    model.train()
    accuracy = (outputs.argmax(1) == y).float().mean()
    return f"loss {nn.functional.cross_entropy(outputs, y):.3f}, accuracy {accuracy:.3f}"


def main(folder: Path) -> None:
    """Train from the start or from the checkpoint."""
    torch.manual_seed(0)
    (x, y), (test_x, test_y) = read(folder, "train"), read(folder, "t10k")
    rows = torch.randperm(len(y))
    train, validation = rows[6000:], rows[:6000]
    mean, std = x[train].mean(), x[train].std()
    x, test_x = (x - mean) / std, (test_x - mean) / std
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    start = 0
    if CHECKPOINT.is_file():
        saved = torch.load(CHECKPOINT)
        start = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(start, STEPS):
        epoch, batch = divmod(step, len(train) // BATCH)
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        chosen = train[order[batch * BATCH : (batch + 1) * BATCH]]
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            print(f"step {step + 1}: validation {evaluate(model, x[validation], y[validation])}")
            state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, CHECKPOINT.with_suffix(".unfinished"))
            CHECKPOINT.with_suffix(".unfinished").replace(CHECKPOINT)
    print(f"test {evaluate(model, test_x, test_y)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
