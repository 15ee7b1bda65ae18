"""What the studies in experiments/ rest on."""

import sys
from pathlib import Path

DELAY = Path(__file__).parent.parent / "experiments" / "delay"


def test_networks_side_by_side_train_as_they_do_alone(monkeypatch, capsys):
    """Of the study of delay: one method for SGD, one for Adam; `main.py --check` does all."""
    monkeypatch.syspath_prepend(DELAY)
    import check
    import runs

    try:
        chosen = [run for run in runs.all_runs() if run.method in ("spectrain", "pipeoptim")]
        check.check(chosen, steps=8)
        assert len(capsys.readouterr().out.splitlines()) == 2
    finally:
        for name in ("check", "runs", "network"):
            del sys.modules[name]
