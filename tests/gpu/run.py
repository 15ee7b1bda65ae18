"""Every check and figure that needs an accelerator: `make gpu`. See README.md in this folder.

python tests/gpu/run.py [--out result.json] [--stand-in]
Exit status: 0 if every check passed, 1 if one failed, 2 if this machine has no accelerator and nothing was checked.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from gpu import checks, figures
from stretto.nn import devices


def main() -> int:
    """Run the checks, then the figures."""
    given = arguments()
    if given.stand_in:
        import stand_in

        stand_in.install(link=True)
    kind = devices.accelerator()
    if kind is None:
        print("No accelerator here (torch.accelerator finds none): nothing was checked, nothing measured.")
        return 2
    names = devices.accelerator_names()
    print(f"{len(names)} x {kind}: {', '.join(names)}; torch {torch.__version__}, {platform.platform()}")
    scale = figures.TINY if given.stand_in else figures.FULL
    told = {check.__name__: result(check, given.stand_in) for check in checks.CHECKS}
    measured = {figure.__name__: result(figure, scale) for figure in figures.FIGURES}
    failed = [name for name, (passed, _) in {**told, **measured}.items() if not passed]
    print(f"{len(told) + len(measured) - len(failed)} passed, {len(failed)} failed: {', '.join(failed) or 'none'}")
    if given.out is not None:
        content = {"devices": names, "torch": torch.__version__, "checks": told, "figures": measured}
        given.out.write_text(json.dumps(content, indent=1) + "\n")
    return int(bool(failed))


def arguments() -> argparse.Namespace:
    """What stands on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write checks and figures there as JSON")
    parser.add_argument("--stand-in", action="store_true", help="try the script itself, on the tests' made-up device")
    return parser.parse_args()


def result(function, *args):
    """Whether a check or figure passed, and what it says; printed at once."""
    try:
        passed, said = True, function(*args)
    except Exception as error:  # noqa: BLE001 - whatever is wrong is the result, and the others go on
        passed, said = False, f"{type(error).__name__}: {error}"
    print(f"{'pass' if passed else 'FAIL'}  {function.__name__}: {said if isinstance(said, str) else json.dumps(said)}")
    sys.stdout.flush()
    return passed, said


if __name__ == "__main__":
    sys.exit(main())
