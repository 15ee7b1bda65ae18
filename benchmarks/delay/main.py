"""What emulating delay costs beside a hand-written synchronous loop: see README.md in this folder.

OMP_NUM_THREADS=1 python benchmarks/delay/main.py [--out result.json]
"""

import argparse
import json
import platform
import runpy
import statistics
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
loops = runpy.run_path(str(HERE.parent / "emulation" / "main.py"))
BARS = {"pb": 1.08, "pb-lwp-sc": 1.5, "pb(predict=velocity, spike=True)": 1.5, "pipedream": 1.3}
OTHERS = ("pb-sc", "pb-lwp", "pb-lwpw", "spectrain", "pipemare", "pb(stash=True)")
WIDTH, STEPS, ROUNDS = 512, 10, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x, y = torch.randn(loops["BATCH"], WIDTH), torch.randint(0, loops["CLASSES"], (loops["BATCH"],))
    steps = {"hand-cut": loops["hand_cut"](WIDTH, x, y)}
    for method in (*BARS, *OTHERS):
        steps[method] = loops["emulated"](method, WIDTH, x, y)
    for step in steps.values():
        for _ in range(20):  # until the pipelines are full
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            times[name].append((time.perf_counter() - start) / STEPS)
    ratios = {
        name: statistics.median(a / b for a, b in zip(each, times["hand-cut"], strict=True))
        for name, each in times.items()
        if name != "hand-cut"
    }
    for name, ratio in ratios.items():
        bar = BARS.get(name)
        verdict = "" if bar is None else f"   bar {bar}: {'met' if ratio <= bar else 'MISSED'}"
        print(f"{name:<36} {ratio:.3f}{verdict}")
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    chosen.out.write_text(json.dumps({"machine": machine, "ratios to the hand-cut loop": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
