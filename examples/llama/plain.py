"""own.py's network, trained on one process by plain PyTorch alone: python plain.py FOLDER."""

import sys
from pathlib import Path

import torch
from own import build, data
from torch import Tensor, nn

STEPS, BATCH, EVERY = 100, 32, 50
CHECKPOINT = Path("plain.pt")


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> str:
    """Loss and accuracy of the tokens, in words."""
    model.eval()
    outputs = torch.cat([model(part).logits for part in x.split(64)]).flatten(0, 1)
    model.train()
    accuracy = (outputs.argmax(1) == y.flatten()).float().mean()
    return f"loss {nn.functional.cross_entropy(outputs, y.flatten()):.3f}, accuracy {accuracy:.3f}"


def main(folder: str) -> None:
    """Train from the start or from the checkpoint."""
    torch.manual_seed(0)
    (x, y), validation, test = data(folder)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0)
    start = 0
    if CHECKPOINT.is_file():
        saved = torch.load(CHECKPOINT)
        start = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(start, STEPS):
        epoch, batch = divmod(step, len(x) // BATCH)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        chosen = order[batch * BATCH : (batch + 1) * BATCH]
        loss = nn.functional.cross_entropy(model(x[chosen]).logits.flatten(0, 1), y[chosen].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            print(f"step {step + 1}: validation {evaluate(model, *validation)}")
            state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, CHECKPOINT.with_suffix(".unfinished"))
            CHECKPOINT.with_suffix(".unfinished").replace(CHECKPOINT)
    print(f"test {evaluate(model, *test)}")


if __name__ == "__main__":
    main(sys.argv[1])
