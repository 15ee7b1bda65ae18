"""own.py's network, trained on one process by plain PyTorch alone: python plain.py."""

from pathlib import Path

import torch
from own import build, data, mae, quantile
from torch import Tensor, nn

STEPS, BATCH, EVERY = 200, 32, 50
CHECKPOINT = Path("plain.pt")


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> str:
    """Loss and mean absolute error, in words."""
    model.eval()
    outputs = torch.cat([model(part) for part in x.split(500)])
    model.train()
    return f"loss {quantile(outputs, y):.4f}, mae {mae(outputs, y):.3f}"


def main() -> None:
    """Train from the start or from the checkpoint."""
    torch.manual_seed(0)
    (x, y), validation, test = data()
    model = nn.Sequential(*build())
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
        loss = quantile(model(x[chosen]), y[chosen])
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
    main()
