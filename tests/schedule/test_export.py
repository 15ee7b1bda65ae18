"""What we export, torch.distributed.pipelining loads and validates, and gets the same actions."""

from types import SimpleNamespace

import pytest

import stretto
from stretto.errors import UsageError
from stretto.schedule import Action, Schedule
from stretto.schedule.csv_file import to_csv
from stretto.schedule.library.gpipe import gpipe
from stretto.schedule.library.interleaved import interleaved, looped_bfs
from stretto.schedule.library.one_f_one_b import one_f_one_b
from stretto.schedule.library.pipedream import paci, pipedream, pipelined_backprop
from stretto.schedule.library.zero_bubble import zb_h1, zb_v


def loaded(schedule, path):
    """A round trip through torch, which checks the actions and adds communication to them."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime  # a second

    path.write_text(to_csv(schedule))
    stage = SimpleNamespace(num_stages=schedule.num_stages, group_size=schedule.num_workers, group_rank=0, submod=None)
    runtime = _PipelineScheduleRuntime([stage], schedule.per_turn)
    runtime._load_csv(str(path))
    assert runtime.stage_index_to_group_rank == schedule.worker_of
    return runtime


@pytest.mark.parametrize("schedule", [
    gpipe(3, 3, 4), gpipe(5, 2, 3), one_f_one_b(4, 4, 8), one_f_one_b(7, 3, 2), interleaved(6, 3, 6),
    looped_bfs(6, 2, 4), zb_h1(4, 4, 6), zb_h1(5, 2, 4), zb_v(6, 3, 7), zb_v(8, 4, 4), zb_v(2, 1, 3), gpipe(1, 1, 1),
    stretto.method("backprop").plan(3)[0],
], ids=lambda schedule: f"{schedule.num_stages}-{schedule.num_workers}-{schedule.per_turn}")  # fmt: skip
def test_torch_loads_the_same_actions(schedule, tmp_path):
    runtime = loaded(schedule, tmp_path / "schedule.csv")
    for worker, actions in enumerate(schedule.body):
        wanted = [str(action) for action in actions if action.kind != "U"]
        assert [str(action) for action in runtime.pipeline_order[worker]] == wanted
        with_messages = [str(a) for a in runtime.pipeline_order_with_comms[worker] if a.is_compute_op]
        assert with_messages == wanted


def test_the_file():
    from torch.distributed.pipelining.schedules import _Action

    text = to_csv(zb_h1(2, 2, 2))
    assert text == "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    assert [str(_Action.from_str(cell)) for cell in text.split()[0].split(",")] == ["0F0", "0F1", "0B0", "0B1"]


@pytest.mark.parametrize(("schedule", "action"), [(pipedream(3, 3), "0B-2"), (pipelined_backprop(4, 2), "0B-6"),
                                                  (paci(3, 3, 2), "0B-2")])  # fmt: skip
def test_asynchronous_schedules_are_refused(schedule, action):
    with pytest.raises(UsageError, match=f"^{action} of worker 0 belongs to an earlier minibatch: .*synchronous"):
        to_csv(schedule)


@pytest.mark.parametrize(("order", "action"), [("F0 F1 B0 U0 B1 U1", "0U0"), ("F0 F1 B0 U1 B1", "0U1"),
                                               ("U1 F0 F1 B0 B1", "0U1")])  # fmt: skip
def test_updates_inside_a_minibatch_are_refused(order, action):
    body = tuple(Action(text[0], 0, int(text[1:])) for text in order.split())
    with pytest.raises(UsageError, match=f"^{action} of worker 0 comes before the minibatch's end"):
        to_csv(Schedule((body,), per_turn=2))
