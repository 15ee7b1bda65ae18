"""How much memory the versions of weights take, beside the closed forms: see README.md in this folder.

OMP_NUM_THREADS=1 python benchmarks/delay/memory.py [--out memory.json]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

import stretto

HERE = Path(__file__).parent
STAGES, WIDTH, BATCH, BAR = 8, 2048, 4, 0.05
WEIGHT = 4 * WIDTH * (WIDTH + 1)  # bytes of a stage's weight and bias

S = STAGES
VERSIONS: dict[str, Callable[[int], int]] = {  # of stage s, the current one included
    "pb": lambda s: 1,
    "pipedream-2bw": lambda s: 2,
    "pipedream": lambda s: S - s,
    "pb(stash=True)": lambda s: 2 * (S - 1 - s) + 1,
}
GRADIENTS = {
    "pipedream-2bw": S + 1
}  # summed on every stage until its update, and the one that comes; else one at a time


class Ledger(TorchDispatchMode):
    """Which storages live when: a line for each, from the operation that made it to the first one after its end."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self.clock = 0
        self.open: dict[int, tuple[StorageWeakRef, list[Any]]] = {}
        self.lines: list[list[Any]] = []  # [key, bytes, operation, begin, end]
        for parameter in parameters:
            self.enter(parameter, "parameter")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.clock += 1
        self.leave()
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.enter(tensor, func.overloadpacket.__name__)
        return made

    def enter(self, tensor: Tensor, operation: str) -> None:
        """Open a line for the tensor's storage, unless there is one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.open:
            line = [key, storage.nbytes(), operation, self.clock, None]
            self.open[key] = (StorageWeakRef(storage), line)
            self.lines.append(line)

    def leave(self) -> None:
        """Close the lines of storages that are gone."""
        for key in [key for key, (storage, _) in self.open.items() if storage.expired()]:
            self.open.pop(key)[1][-1] = self.clock

    def peak(self, wanted: Callable[[list[Any]], bool]) -> int:
        """The most bytes that the wanted storages took at once."""
        changes = [0] * (self.clock + 2)
        for line in filter(wanted, self.lines):
            changes[line[3]] += line[1]
            changes[self.clock + 1 if line[4] is None else line[4]] -= line[1]
        held = most = 0
        for change in changes:
            held += change
            most = max(most, held)
        return most


def train(width: int, method: str) -> tuple[int, int]:
    """Train until the pipeline is full of versions, and drain it. Returns peak bytes: of versions, of everything."""
    torch.manual_seed(0)
    optimizers: list[torch.optim.Optimizer] = []

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.SGD(params, lr=1e-4, momentum=0.9))
        return optimizers[-1]

    stages = [nn.Linear(width, width) for _ in range(STAGES)]
    trainer = stretto.Trainer(stages, mse_loss, optimizer, method, device="cpu")
    pieces = trainer.schedule.per_turn
    x, y = torch.randn(BATCH * pieces, width), torch.randn(BATCH * pieces, width)
    with Ledger([p for stage in stages for p in stage.parameters()]) as ledger:
        for _ in range(2 * max(trainer.method.delays(trainer.schedule).steady) + 2):  # then all versions differ
            trainer.step(x, y)
        trainer.flush()
    momentum = {
        state["momentum_buffer"].untyped_storage()._cdata for each in optimizers for state in each.state.values()
    }
    # A copy of weights is a clone; so is the momentum that an optimizer begins with.
    versions = ledger.peak(lambda line: line[2] in ("parameter", "clone") and line[0] not in momentum)
    return versions, ledger.peak(lambda line: True)


def status(key: str) -> int:
    """A line of this process's status, in bytes: VmRSS, resident now; VmHWM, the most so far."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def child(method: str) -> None:
    """Measure one method in this fresh process."""
    torch.set_num_threads(1)
    train(8, method)  # whatever is loaded or cached on the way
    before = status("VmRSS")
    versions, everything = train(WIDTH, method)
    print(json.dumps({"versions": versions, "everything": everything, "resident": status("VmHWM") - before}))


def measure(method: str) -> dict[str, Any]:
    """Each method in a process of its own, in which freed memory goes back to the system at once."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, __file__, "--child", method], capture_output=True, text=True, check=True, env=environment
    )
    found: dict[str, int] = json.loads(done.stdout)
    copies = sum(VERSIONS[method](s) for s in range(STAGES))
    everything = copies + STAGES + GRADIENTS.get(method, 1)  # momentum, gradients
    forms = {"versions": copies, "everything": everything, "resident": everything}
    return {
        "versions of a stage's weights, closed form": copies,
        "MiB": {name: value / 2**20 for name, value in found.items()},
        "ratio to the closed form": {name: value / (forms[name] * WEIGHT) for name, value in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "memory.json")
    parser.add_argument("--child", metavar="METHOD", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child is not None:
        child(chosen.child)
        return
    results = {}
    for method in VERSIONS:
        results[method] = measure(method)
        ratios = results[method]["ratio to the closed form"]
        verdict = "met" if abs(ratios["versions"] - 1) <= BAR else "MISSED"
        print(f"{method:<16} " + "   ".join(f"{name} {ratio:.4f}" for name, ratio in ratios.items()), f"  {verdict}")
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    settings = {"stages": STAGES, "width": WIDTH, "batch": BATCH, "bytes of a stage's weights": WEIGHT}
    chosen.out.write_text(json.dumps({"machine": machine, "settings": settings, "methods": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
