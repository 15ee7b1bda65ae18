"""A recommender whose weights are nearly all embeddings: all-reduce against a parameter server, one worker slow.

OMP_NUM_THREADS=1 python experiments/recommender/main.py
"""

import argparse
import json
import os
import platform
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stretto

HERE = Path(__file__).parent
REPLICAS, USERS, ITEMS, WIDTH = 3, 50_000, 100_000, 16
BATCH, STEPS, ROUNDS, TEST = 1536, 150, 3, 20_000
PAUSE, HOW_OFTEN = 0.05, 0.2  # seconds; of the slow worker's steps
KINDS: dict[str, tuple[str, bool]] = {  # sync, sparse
    "all-reduce, dense": ("all-reduce", False),
    "parameter server, dense": ("parameter-server(staleness=8)", False),
    "parameter server, sparse": ("parameter-server(staleness=8)", True),
    "parameter server, sparse, staleness 2": ("parameter-server(staleness=2)", True),
}


class Recommender(nn.Module):
    """Will this user like this item? x [N, 2] of whole numbers -> logits [N]."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=sparse)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=sparse)
        self.mix = nn.Sequential(nn.Linear(3 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Both towers, their product, and a small network on top."""
        user, item = self.users(x[:, 0]), self.items(x[:, 1])
        logits: Tensor = self.mix(torch.cat([user, item, user * item], dim=1)).squeeze(1)
        return logits


def examples(number: int) -> tuple[Tensor, Tensor]:
    """Pairs and whether they fit, from hidden factors; users and items as popular as Zipf says."""
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(size, 4, generator=generator) for size in (USERS, ITEMS)]
    bias = torch.randn(ITEMS, generator=generator)
    drawn = []
    for size in (USERS, ITEMS):
        share = 1 / torch.arange(1, size + 1, dtype=torch.float64)
        drawn.append(torch.multinomial(share, number, replacement=True, generator=generator))
    users, items = drawn
    logits = (factors[0][users] * factors[1][items]).sum(1) + bias[items]
    return torch.stack(drawn, 1), torch.bernoulli(torch.sigmoid(logits), generator=generator)


class Sent:
    """How many bytes this process hands to torch.distributed's point-to-point messages."""

    def __init__(self) -> None:
        self.bytes = 0
        self._isend: Callable[..., Any] = dist.isend

    def __call__(self, tensor: Tensor, *args: Any, **options: Any) -> Any:
        """As `isend`."""
        self.bytes += tensor.nbytes
        return self._isend(tensor, *args, **options)


def train(kind: str, data: tuple[Tensor, Tensor], steps: int, sent: Sent, *, slow: bool) -> dict[str, Any]:
    """One run in this process, with all others."""
    sync, sparse = KINDS[kind]
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    trainer = stretto.Trainer(
        [Recommender(sparse=sparse)],
        nn.functional.binary_cross_entropy_with_logits,
        lambda params: torch.optim.Adagrad(params, lr=0.05),
        mesh=stretto.Mesh(data=REPLICAS),
        sync=sync,
    )
    draw, before, losses = random.Random(1), sent.bytes, []
    start = time.perf_counter()
    for n in range(steps):
        if slow and rank == REPLICAS - 1 and draw.random() < HOW_OFTEN:
            time.sleep(PAUSE)
        losses.append(trainer.step(*(each[n * BATCH : (n + 1) * BATCH] for each in data)))
    losses += trainer.flush()
    seconds, told = time.perf_counter() - start, sent.bytes - before
    if sync == "all-reduce":  # torch's ring
        told = steps * 2 * (REPLICAS - 1) * sum(4 * p.numel() for p in trainer.model.parameters()) // REPLICAS
    test = trainer.evaluate([tuple(each[-TEST:] for each in data)])["loss"]
    order = trainer.order()
    stale = dict(sorted(Counter(order.staleness[0]).items())) if order is not None else None
    own = [loss for loss in losses if loss is not None]
    return {"seconds": seconds, "bytes": told, "train_loss": sum(own[-20:]) / 20, "test_loss": test, "staleness": stale}


def work(out: Path, steps: int, rounds: int) -> None:
    """All runs in turns; what rank 0 has seen goes to a file."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    sent = Sent()
    dist.isend = sent
    data = examples(BATCH * steps + TEST)
    plan = [(number, slow, kind) for number in range(rounds) for slow in (False, True) for kind in KINDS]
    runs = [
        {"kind": kind, "slow": slow, "round": number, **train(kind, data, steps, sent, slow=slow)}
        for number, slow, kind in plan
    ]
    if int(os.environ["RANK"]) == 0:
        out.write_text(json.dumps(runs))


def main() -> None:
    """Start the processes, print the tables and write result.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, one round, no result.json: does it run?")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    steps, rounds = (12, 1) if chosen.quick else (STEPS, ROUNDS)
    if chosen.work is not None:
        work(chosen.work, steps, rounds)
        return
    told = chosen.out.with_suffix(".runs")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
              "WORLD_SIZE": str(REPLICAS), "LOCAL_WORLD_SIZE": str(REPLICAS)}  # fmt: skip
    command = [sys.executable, __file__, *sys.argv[1:], "--work", str(told)]
    started = [subprocess.Popen(command, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(REPLICAS)]
    assert [process.wait() for process in started] == [0] * REPLICAS
    runs = json.loads(told.read_text())
    told.unlink()
    results = [summary(kind, runs, steps, slow=slow) for slow in (False, True) for kind in KINDS]
    print(table(results))
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    if not chosen.quick:
        chosen.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


def summary(kind: str, runs: list[dict[str, Any]], steps: int, *, slow: bool) -> dict[str, Any]:
    """Medians over rounds."""
    own = [run for run in runs if (run["kind"], run["slow"]) == (kind, slow)]
    return {
        "kind": kind,
        "slow": slow,
        "milliseconds_per_step": 1e3 * median(run["seconds"] for run in own) / steps,
        "bytes_per_step": median(run["bytes"] for run in own) / steps,
        "train_loss": median(run["train_loss"] for run in own),
        "test_loss": median(run["test_loss"] for run in own),
        "staleness": own[-1]["staleness"],
    }


def table(results: list[dict[str, Any]]) -> str:
    """One row a kind, and the staleness of its updates."""
    heads = ["", "one slow", "ms a step", "KB sent a step", "train loss", "test loss", "updates by staleness 0, 1, ..."]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for each in results:
        stale = {int(key): count for key, count in (each["staleness"] or {}).items()}
        histogram = " ".join(str(stale.get(key, 0)) for key in range(max(stale) + 1)) if stale else ""
        cells = [each["kind"], "yes" if each["slow"] else "no", f"{each['milliseconds_per_step']:.1f}",
                 f"{each['bytes_per_step'] / 1e3:.0f}", f"{each['train_loss']:.4f}", f"{each['test_loss']:.4f}",
                 histogram]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
