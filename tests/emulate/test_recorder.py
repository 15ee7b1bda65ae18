"""An emulation's recordings: what ran, in which order, what travelled, and how late gradients were."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

import stretto

S = 4
STEPS = 9


def trained(method, *, workers=None, record=True):
    torch.manual_seed(0)
    stages = [torch.nn.Linear(6, 6) for _ in range(S)]
    trainer = stretto.Trainer(
        stages,
        torch.nn.functional.mse_loss,
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        method=method,
        workers=workers,
    )
    recordings = trainer.record() if record else []
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        trainer.step(torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator))
    trainer.flush()
    return trainer, recordings


@pytest.mark.parametrize(
    ("method", "workers"),
    [("pb", None), ("pb", 2), ("1f1b", None), ("zb-v", 2), ("overlapping", None), ("pipemare(warmup=3)", None)],
)
def test_each_worker_ran_its_list_in_order(method, workers):
    trainer, recordings = trained(method, workers=workers)
    schedule = trainer.schedule
    assert len(recordings) == schedule.num_workers
    if "warmup" not in method:
        for worker, recording in enumerate(recordings):
            assert [span.name for span in recording.spans] == list(map(str, schedule.unroll(worker, STEPS)))
    spans = [span for recording in recordings for span in recording.spans]
    assert {span.lane for span in spans} == {"compute"}
    assert Counter(span.name for span in spans).most_common(1)[0][1] == 1
    in_time = sorted(spans, key=lambda span: span.start)
    assert all(a.end <= b.start for a, b in pairwise(in_time)), "there is one device"


@pytest.mark.parametrize(("method", "workers"), [("pb", None), ("pb", 2), ("1f1b", 3), ("zb-v", 2)])
def test_values_travel_between_workers_and_nowhere_else(method, workers):
    trainer, recordings = trained(method, workers=workers)
    schedule = trainer.schedule
    expected = {
        (f"{edge.value} {edge.source.stage}>{edge.stage}", action.microbatch, home, schedule.worker_of[edge.stage])
        for home in range(schedule.num_workers)
        for action in schedule.unroll(home, STEPS)
        for edge in trainer.rules.makes(action)
        if edge.value in ("activation", "gradient") and schedule.worker_of[edge.stage] != home
    }
    senders = {mark[:2]: each.worker for each in recordings for mark in each.sends}
    receivers = {mark[:2]: each.worker for each in recordings for mark in each.receipts}
    assert {(*message, senders[message], receivers[message]) for message in senders} == expected
    assert senders.keys() == receivers.keys()
    ends = {span.name: span.end for each in recordings for span in each.spans}
    assert all(mark.time in ends.values() for each in recordings for mark in each.sends)


def test_counters_give_the_delay_and_what_is_held():
    trainer, recordings = trained("pb")
    for stage, recording in enumerate(recordings):
        delays = [each.value for each in recording.counts if each.name == f"delay of stage {stage}"]
        steady = trainer.method.delays(trainer.schedule).steady[stage]
        assert delays == [min(n, steady) for n in range(STEPS)]
        held = [each.value for each in recording.counts if each.name == f"forwards held by stage {stage}"]
        order = trainer.schedule.unroll(stage, STEPS)
        counted = [(action.kind == "F") - (action.kind == "B") for action in order if action.kind in "FB"]
        assert held == [sum(counted[: n + 1]) for n in range(len(counted))]
        assert held[-1] == 0
        assert max(held) == 2 * (S - 1 - stage) + 1


def test_training_comes_to_the_same_weights():
    with_record, without = trained("pb-lwp-sc")[0], trained("pb-lwp-sc", record=False)[0]
    for one, other in zip(with_record.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(one, other)
