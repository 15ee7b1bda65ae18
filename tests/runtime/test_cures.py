"""Every cure of delay, with every optimizer that it takes: on processes, and from a checkpoint, to the last bit."""

from functools import cache

import pytest

from runtime import scripts
from runtime.processes import launch
from runtime.scripts import same

KNOWN = ("sgd", "adam", "adamw", "nadam", "muon", "soap", "lion")
CURES = [
    *((f"pb(predict={form})", "sgd") for form in ("velocity", "weight")),
    *(("pb(predict=step)", optimizer) for optimizer in KNOWN),
    *(("pb-sc", optimizer) for optimizer in KNOWN),
    *(("pb-lwp-sc", optimizer) for optimizer in KNOWN),
    *(("pb(predict=step, spike=True)", optimizer) for optimizer in KNOWN),
    *(("pb(feedback=2)", optimizer) for optimizer in KNOWN),
    *((f"{name}(feedback=1)", "adamw") for name in ("paci", "pipedream", "pipedream-2bw")),
    *((f"pb(rotate={sides})", optimizer) for sides in (True, "one-sided") for optimizer in ("adam", "adamw")),
    *((f"{name}(rotate=True, refresh=2)", "adamw") for name in ("paci", "pipedream", "pipedream-2bw")),
    ("pb(rotate=True, feedback=delay)", "adamw"), ("pb(rotate=one-sided, spike=True, predict=weight)", "adamw"),
    ("pb(spike=True, stash=True, warmup=2, finish=10)", "adamw"), ("spectrain", "sgd"), ("pipeoptim", "muon"),
    ("pipemare(reschedule=6)", "adamw"), ("nesterov", "nadam"),
]  # fmt: skip
RUNS = [(method, {"optimizer": optimizer}) for method, optimizer in CURES]
RUNS += [("pb-lwp-sc", {"optimizer": name, "precision": "bf16"}) for name in ("nadam", "muon", "soap")]


@cache
def emulated():
    return [scripts.train(method, workers=2, **options) for method, options in RUNS]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_come_to_the_numbers_of_emulation(processes):
    told = launch(processes, "runtime.scripts:train_all", RUNS, timeout=500)
    for run, wanted, *ranks in zip(RUNS, emulated(), *told, strict=True):
        assert all((losses, scores) == (wanted[0], wanted[2]) for losses, _, scores in ranks), run
        assert same(ranks[0][1], wanted[1]), run


@pytest.mark.slow
def test_they_go_on_from_a_checkpoint_on_other_workers(tmp_path):
    """Saved on two processes; gone on with in emulation, and on three."""
    saved = launch(2, "runtime.scripts:save_all", RUNS, str(tmp_path), timeout=500)[0]
    resumed = launch(3, "runtime.scripts:resume_all", RUNS, str(tmp_path), timeout=500)[0]
    for run, *ends in zip(RUNS, saved, resumed, scripts.resume_all(RUNS, str(tmp_path)), strict=True):
        assert same(ends[0], ends[1]), run
        assert same(ends[0], ends[2]), run
