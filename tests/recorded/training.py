"""Does one run of the list, and says in digests what came of it. Public names of Stretto only."""

import contextlib
import functools
import hashlib
import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stretto
import stretto.cli
from recorded import networks
from recorded.pages import variables
from recorded.plans import predict
from recorded.runs import SIZES, STAGES, Command, Run
from stretto.optim import LAMB, LARS, SOAP, Lion, cosine, muon, warmup

Digests = dict[str, str]
CLOCKS = (
    "seconds",
    "seconds_per_step",
    "search_seconds",
    "peak_memory",
    "out",
    "report",
    "plan",
)  # measured, and paths


def groups(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with and without decay, at two rates."""
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() <= 1]
    both = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.001}]
    return torch.optim.AdamW([group for group in both if group["params"]], lr=0.003)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.03, momentum=0.9),
    "sgd-nesterov": functools.partial(torch.optim.SGD, lr=0.03, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": functools.partial(torch.optim.Adam, lr=0.003),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.003, weight_decay=0.1),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.003),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.003, momentum=0.5),
    "lars": functools.partial(LARS, lr=1.0, momentum=0.9, weight_decay=0.01),
    "lamb": functools.partial(LAMB, lr=0.01, weight_decay=0.1),
    "muon": functools.partial(muon, lr=0.003),
    "soap": functools.partial(SOAP, lr=0.003, every=3),
    "lion": functools.partial(Lion, lr=0.001, weight_decay=0.1),
    "groups": groups,
}
rates = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: rates.StepLR(optimizer, 3, 0.5),
    "warmup": warmup(3, start=0.1, then=cosine(9)),
    "cosine": lambda optimizer: rates.CosineAnnealingLR(optimizer, 12),
    "one-cycle": lambda optimizer: rates.OneCycleLR(optimizer, 0.1, total_steps=100, cycle_momentum=False),
}


def batches(network: str) -> list[tuple[Tensor, Tensor]]:
    """The minibatches that a run of a network sees once, or several times."""
    generator = torch.Generator().manual_seed(1)
    return [networks.NETWORKS[network].batch(generator, size) for size in SIZES]


def stages(run: Run, seed: int) -> list[Any]:
    """What the Trainer is given to train."""
    if run.source == "functions":
        return [functools.partial(stage, run.network, index) for index in range(STAGES)]
    modules = networks.make(run.network, seed)
    if run.source == "split":
        return list(stretto.split(torch.nn.Sequential(*modules), STAGES, example=batches(run.network)[0][0]))
    return modules


def stage(network: str, index: int) -> torch.nn.Module:
    """One stage, drawn from the generator that the Trainer has seeded for it."""
    return networks.NETWORKS[network].stages()[index]


def trainer(run: Run, seed: int, order: str | None = None) -> stretto.Trainer:
    """The run's Trainer; `order` is the file in which a parameter server's order of updates stands."""
    sync: Any = run.sync
    if order is not None:
        sync = stretto.ParameterServer(staleness=staleness(run), order=order)
    method = run.method.replace("path=", f"path={Path(__file__).parent}/")
    return stretto.Trainer(
        stages(run, seed),
        networks.NETWORKS[run.network].loss(),
        OPTIMIZERS[run.optimizer],
        method,
        example=batches(run.network)[0][0],
        scheduler=None if run.scheduler is None else SCHEDULERS[run.scheduler],
        mesh=stretto.Mesh(data=run.data, tensor=run.tensor, space=run.space),
        sync=sync,
        device="cpu",
        timeout=60,
        **run.options,
    )


def staleness(run: Run) -> int:
    """The bound in "parameter-server(staleness=3)"."""
    return int(run.sync.partition("staleness=")[2].rstrip(")"))


def train(run: Run, folder: str, order: str | None = None) -> tuple[Digests | None, stretto.Trainer]:
    """Do a run; its digests where `gather` gives the weights, None on other processes."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = trainer(run, 0, order)
        told: list[Any] = []
        entering = batches(run.network) * run.epochs
        for n, (x, y) in enumerate(entering):
            if n == len(entering) // 2:
                told.append(training.flush())
                told.append(training.evaluate(batches(run.network)[:2]))
                if run.stops == "reload":
                    training.save(f"{folder}/checkpoint", {"n": n})
                    training = trainer(run, 17, order)
                    training.load(f"{folder}/checkpoint")
            told.append(training.step(x, y))
        told.append(training.flush())
        told.append(training.evaluate(batches(run.network)[:2]))
        weights = training.gather()
    if weights is None:
        return None, training
    return {"weights": of_tensors(weights), "losses": of_numbers(told), "last": repr(told[-1]["loss"])}, training


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names, dtypes, shapes and every bit."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        value = value.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()


def of_numbers(told: Any) -> str:
    """A digest of numbers, however nested, to the last bit."""

    def exact(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): exact(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [exact(each) for each in value]
        return struct.pack("<d", value).hex() if isinstance(value, float) else value

    return hashlib.sha256(json.dumps(exact(told), sort_keys=True).encode()).hexdigest()


def command(given: Command, folder: str) -> Digests:
    """Do a command line; digests of its JSON without times and paths, and of weights that it leaves."""
    out = Path(folder) / "out"
    words = [word.replace("{out}", str(out)) for word in given.words]
    if given.alone:
        ended = subprocess.run([sys.executable, "-m", "stretto", *words], capture_output=True, text=True, check=False)
        status, said, complained = ended.returncode, ended.stdout, ended.stderr
    else:
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status = predict().main(words[1:]) if "--program" in words else stretto.cli.main(words)
        said, complained = stdout.getvalue(), stderr.getvalue()
    if status != 0:
        raise RuntimeError(f"exit status {status}: {complained.strip()}")
    digests = {"json": of_numbers(timeless(json.loads(said), str(out)))}
    left = sorted(out.rglob("model.safetensors"))
    if left:
        from safetensors.torch import load_file

        found = {f"{file.parent.name}/{name}": t for file in left for name, t in load_file(file).items()}
        digests["weights"] = of_tensors(found)
    return digests


def timeless(content: Any, out: str) -> Any:
    """JSON without what a clock says, and without the folder's name."""
    if isinstance(content, dict):
        return {key: timeless(value, out) for key, value in content.items() if key not in CLOCKS}
    if isinstance(content, list):
        return [timeless(value, out) for value in content]
    return content.replace(out, "{out}") if isinstance(content, str) else content


def emulated(run: Run) -> Digests:
    """A run on this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        digests, _ = train(run, folder)
    assert digests is not None
    return digests


def of_page(name: str) -> Digests:
    """The digest of a page's variables."""
    return {"page": of_numbers(variables(name))}


def on_line(given: Command) -> Digests:
    """A command line in a folder of its own."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return command(given, folder)
        finally:
            os.chdir(before)
