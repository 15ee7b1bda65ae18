"""Checks of this machine: each part that Stretto needs is tried, not just looked up."""

import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

OLDEST_TORCH = (2, 11)  # as in pyproject.toml and tox.toml


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. Stretto works without what is "missing", not with what is "broken"."""

    name: str
    state: Literal["good", "missing", "broken"]
    detail: str

    def to_json(self) -> dict[str, Any]:
        """The object that `stretto doctor --json` prints for a check."""
        return asdict(self)


class AbsentError(Exception):
    """Raised by a check of something optional that is not installed."""


def examine() -> list[CheckResult]:
    """Run every check; none of them can stop the others."""
    return [try_check(name, check) for name, check in CHECKS.items()]


def try_check(name: str, check: Callable[[], str]) -> CheckResult:
    """Run a check and turn its text, or the error it raises, into a result."""
    try:
        return CheckResult(name, "good", check())
    except AbsentError as error:
        return CheckResult(name, "missing", str(error))
    except Exception as error:  # noqa: BLE001 - whatever is wrong is the result
        return CheckResult(name, "broken", f"{type(error).__name__}: {error}")


def python() -> str:
    """The interpreter, its version and the machine."""
    return f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"


def torch_works() -> str:
    """PyTorch's version; raises RuntimeError if it is too old or a gradient is wrong."""
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        raise RuntimeError(f"torch {torch.__version__}; at least {'.'.join(map(str, OLDEST_TORCH))} is needed")
    weight = torch.ones(2, requires_grad=True)
    torch.autograd.backward((weight * 3).sum())
    if weight.grad is None or weight.grad.tolist() != [3.0, 3.0]:
        raise RuntimeError(f"torch {torch.__version__} computes a wrong gradient: {weight.grad}")
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


def accelerator() -> str:
    """The names of the accelerators."""
    from stretto.nn.devices import accelerator_names

    names = accelerator_names()
    if not names:
        raise AbsentError("no accelerator: training runs on the CPU")
    return f"{len(names)} x {names[0]}" if len(set(names)) == 1 else ", ".join(names)


def distributed() -> str:
    """The backends of torch.distributed that this build has."""
    import torch.distributed

    if not torch.distributed.is_available():
        raise AbsentError("torch.distributed is not in this build of torch; emulation does not need it")
    backends = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
    return ", ".join(name for name, available in backends.items() if available) or "no backend"


def emulation() -> str:
    """Train three steps with a local method, emulated."""
    import torch

    from stretto.trainer.trainer import Trainer

    stages = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]
    loss = torch.nn.functional.cross_entropy
    trainer = Trainer(stages, loss, lambda params: torch.optim.SGD(params, lr=0.1), "greedy", device="cpu")
    for _ in range(3):
        trainer.step(torch.zeros(2, 4), torch.tensor([0, 1]))
    trainer.flush()
    return "trains"


def digits() -> str:
    """Load the data set of scikit-learn's digits."""
    from stretto import data

    return data.load("digits").description


def pydoc() -> str:
    """Load the data set of CPython's own documentation."""
    from stretto import data
    from stretto.errors import UsageError

    try:
        return data.load("pydoc").description
    except UsageError as error:
        raise AbsentError(str(error)) from error


def report() -> str:
    """The versions of the packages that draw the report's charts."""
    from stretto.errors import UsageError
    from stretto.options.extras import require

    try:
        require("report", "a page with charts")
    except UsageError as error:
        raise AbsentError(str(error)) from error
    import altair
    import vl_convert

    if not vl_convert.get_vegalite_versions():
        raise RuntimeError("vl-convert holds no Vega-Lite")
    return f"altair {altair.__version__}, vl-convert {version('vl-convert-python')}"


def all_reduce() -> str:
    """The stored measurements from which replicas' all-reduces choose their algorithm."""
    from stretto.collectives.stored_calibration import kept, missing, read_kept

    if not kept():
        raise AbsentError(f"all-reduce(algorithm=auto) goes by built-in constants: {missing()}, N replicas")
    for file in kept().values():
        read_kept(file)
    files = ", ".join(f"{file} ({processes} processes)" for (processes, _), file in kept().items())
    return f"all-reduce(algorithm=auto) goes by {files}"


def disk() -> str:
    """Write a file into the working directory; returns the free space there."""
    with tempfile.TemporaryFile(dir=Path.cwd()) as file:
        file.write(b"stretto")
    return f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB free in {Path.cwd()}"


CHECKS: dict[str, Callable[[], str]] = {
    "python": python,
    "torch": torch_works,
    "accelerator": accelerator,
    "distributed": distributed,
    "emulation": emulation,
    "data: digits": digits,
    "data: pydoc": pydoc,
    "all-reduce": all_reduce,
    "report": report,
    "disk": disk,
}
