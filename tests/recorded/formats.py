"""What a version of Stretto leaves on the disk, and how it goes on: made once by each version, read by all later ones.

    python tests/recorded/formats.py format-4.tar.xz                       made by this checkout
    python tests/recorded/formats.py --source ../before format-2.tar.xz    made by another one

It holds checkpoints/NAME of `CHECKPOINTS` after half of the minibatches, and interrupted/ of a `stretto train`
that was ended by SIGTERM, each with NAME.safetensors, the weights to which that version itself went on from there; what
`stretto train` and `compare` leave (without report.html), a plan, the order of a parameter server's updates.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from recorded import compare
from recorded.runs import SIZES, Run

CHECKPOINTS = {
    "pipeline": Run("pb-lwp-sc(warmup=2)", network="short", scheduler="step"),
    "precision": Run("pipedream", network="short", optimizer="adam", options={"precision": "bf16"}),
    "replicas": Run("1f1b", network="short", data=2),
    "merging": Run("1f1b", network="short", data=2, sync="local-sgd(every=3)"),  # replicas have states of their own
}
HALF = len(SIZES) // 2
SMALL = ("--batch-size", "16", "--model-options.width", "8", "--model-options.depth", "3", "--quiet")
TRAIN = ("train", "--method", "pb", "--steps", "60", "--checkpoint-every", "10", *SMALL)
SERVED = Run("pipedream", data=2, sync="parameter-server(staleness=3)")


def half(run, second, trainer):
    """Train the first or the second half of the minibatches."""
    from recorded.training import batches

    for n, (x, y) in enumerate(batches(run.network)):
        if (n >= HALF) == second:
            trainer.step(x, y)
    trainer.flush()


def gone_on(run, checkpoint):
    """The weights at the end of a run that goes on from a checkpoint."""
    from recorded.training import trainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = trainer(run, 17)
        assert training.load(checkpoint) == {"n": HALF}
        half(run, True, training)
        return {name: value.clone() for name, value in training.gather().items()}


def resumed(source, folder):
    """The weights at the end of a `stretto train --resume`, in `folder`, of what was interrupted in `source`."""
    from safetensors.torch import load_file

    import stretto.cli

    for part in ("partial", "checkpoints"):
        shutil.copytree(source / part, folder / f".run.{part}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert stretto.cli.main([*TRAIN, "--resume", "--out", str(folder / "run")]) == 0
    return load_file(folder / "run" / "model.safetensors")


def make(out, without):
    """Write all of it, but the checkpoints called `without`."""
    from safetensors.torch import save_file

    from recorded.training import train, trainer

    for name, run in CHECKPOINTS.items():
        if name in without:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training = trainer(run, 0)
            half(run, False, training)
            training.save(out / "checkpoints" / name, {"n": HALF})
        save_file(gone_on(run, out / "checkpoints" / name), out / "checkpoints" / f"{name}.safetensors")
    with tempfile.TemporaryDirectory() as folder:
        interrupt(Path(folder))
        for part in ("partial", "checkpoints"):
            shutil.copytree(Path(folder) / f".run.{part}", out / "interrupted" / part)
        *others, _ = sorted((out / "interrupted" / "checkpoints").iterdir(), key=lambda path: int(path.name[5:]))
        for path in others:
            shutil.rmtree(path)
    with tempfile.TemporaryDirectory() as folder:
        save_file(resumed(out / "interrupted", Path(folder)), out / "interrupted.safetensors")
    measured = ("--measure", "cosine,probes", "--lr", "0.01", "--seeds", "1", "--steps", "12")
    command("compare", "--methods", "backprop,pb-lwp-sc", *measured, *SMALL, "--out", str(out / "compare"))
    (out / "compare" / "report.html").unlink()
    (out / "compare" / ".lock").unlink()
    with tempfile.TemporaryDirectory() as folder:
        traced = ("--steps", "12", *SMALL, "--trace", f"{folder}/trace.pftrace", "--out", str(out / "train"))
        command("train", "--method", "greedy", *traced)
        train(SERVED, folder)[1].order().write(out / "order.json")
    command("plan", "--workers", "4", "--cluster", "8-a100", "--quiet", "--out", str(out / "plan.toml"))


def command(*words):
    """Run a command line in a process of its own."""
    subprocess.run([sys.executable, "-m", "stretto", *words], check=True)


def interrupt(folder):
    """Ask a `stretto train` to stop once it has saved a checkpoint."""
    process = subprocess.Popen([sys.executable, "-m", "stretto", *TRAIN, "--out", str(folder / "run")])
    while not list(folder.glob(".run.checkpoints/step-*")):
        assert process.poll() is None, "ended before it had saved a checkpoint"
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60), "it was not interrupted: it had ended"


def main():
    """Make what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=compare.ROOT, help="root of the checkout whose src is run")
    parser.add_argument(
        "--without", choices=list(CHECKPOINTS), action="append", default=[], help="what it cannot write"
    )
    parser.add_argument("archive", type=Path, help="file to write, *.tar.xz")
    given = parser.parse_args()
    compare.on_path((given.source / "src").resolve())
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), given.without)
        about = {"commit": compare.commit(given.source), "machine": compare.machine()}
        (Path(folder) / "made-by.json").write_text(json.dumps(about, indent=1) + "\n")
        with tarfile.open(given.archive, "w:xz") as archive:
            archive.add(folder, ".")


if __name__ == "__main__":
    main()
