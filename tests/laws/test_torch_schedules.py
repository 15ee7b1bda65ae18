"""Law 8: GPipe, 1F1B, interleaved, looped BFS and DualPipeV are torch.distributed.pipelining's, action for action; the
zero-bubble schedules need no more time and no more memory than torch's.

torch's schedules need live stages. Those that keep a list get a stand-in with the counts they ask for; GPipe and 1F1B
run on a stand-in that notes what it is told to do (their lists are for drawing: 1F1B's names micro-batches 1 to M
instead of 0 to M-1 on the last worker).
"""

from importlib import import_module
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest

from pairwise import in_turn, slow_where
from stretto.errors import UsageError
from stretto.schedule import Action, Reach, Rules, Schedule
from stretto.schedule.library.dualpipe_v import dualpipe_v
from stretto.schedule.library.gpipe import gpipe
from stretto.schedule.library.interleaved import interleaved, looped_bfs
from stretto.schedule.library.one_f_one_b import one_f_one_b
from stretto.schedule.library.zero_bubble import zb_h1, zb_v
from stretto.simulate import simulate


def of_torch(name):
    """A class of schedules; with it comes torch's compiler, which processes that only collect this file can spare."""
    return getattr(import_module("torch.distributed.pipelining"), name)


def ours(schedule):
    return [[str(action) for action in actions if action.kind != "U"] for actions in schedule.body]


def listed(family, workers, chunks, M):
    """The lists torch makes for all ranks, without their gaps."""
    stages = [SimpleNamespace(num_stages=workers * chunks, group_size=workers, group_rank=0, submod=None)] * chunks
    order = family(stages, M).pipeline_order
    return [[str(a) for a in order[rank] if a is not None and a.is_compute_op] for rank in range(workers)]


class Recorder:
    """A stage that notes what a schedule tells it to do and has nobody to send to."""

    def __init__(self, rank, workers):
        self.stage_index, self.num_stages, self.group_size, self.is_last = rank, workers, workers, rank == workers - 1
        self.seen = []

    def forward_one_chunk(self, microbatch, *_, **__):
        self.seen.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch, **_):
        self.seen.append(f"{self.stage_index}B{microbatch}")

    def nothing(self, *_):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = perform_reduce_grad = nothing
    scale_grads = clear_runtime_states = release_fwd_send_outputs = release_bwd_send_outputs = nothing


def executed(family, workers, M, monkeypatch):
    """What torch runs on every rank."""
    monkeypatch.setattr(family, "_get_pipeline_order", lambda self: None)
    monkeypatch.setattr(family, "_initialize_stage", lambda self, *_: None)
    stages = [Recorder(rank, workers) for rank in range(workers)]
    for stage in stages:
        family(stage, M)._step_microbatches()
    return [stage.seen for stage in stages]


@pytest.mark.parametrize("workers", slow_where(lambda workers: workers > 4, range(1, 7)))
def test_gpipe_and_1f1b(workers, monkeypatch):
    for M in range(1, 12):
        assert ours(gpipe(workers, workers, M)) == executed(of_torch("ScheduleGPipe"), workers, M, monkeypatch)
        if workers <= M:  # torch refuses the others
            assert ours(one_f_one_b(workers, workers, M)) == executed(of_torch("Schedule1F1B"), workers, M, monkeypatch)


@pytest.mark.parametrize(("workers", "chunks"), in_turn(range(1, 6), [2, 3, 4], rounds=3, slow=2))
def test_interleaved(workers, chunks):
    """Also where micro-batches are no multiple of the workers; and what torch refuses, we refuse."""
    for M in range(1, 14):
        try:
            theirs = listed(of_torch("ScheduleInterleaved1F1B"), workers, chunks, M)
        except ValueError:
            with pytest.raises(UsageError, match="equally long"):
                interleaved(chunks * workers, workers, M)
        else:
            assert ours(interleaved(chunks * workers, workers, M)) == theirs


@pytest.mark.parametrize(("workers", "chunks"), in_turn(range(1, 6), [2, 3, 4], rounds=3, slow=2))
def test_looped_breadth_first(workers, chunks):
    for M in (1, 2, 3, 5, 8, 9):
        theirs = listed(of_torch("ScheduleLoopedBFS"), workers, chunks, M)
        assert ours(looped_bfs(chunks * workers, workers, M)) == theirs


@pytest.mark.parametrize("workers", slow_where(lambda workers: workers > 4, range(1, 7)))
def test_dualpipe_v(workers):
    """Its overlapped pairs one after the other, forward first; what torch refuses, we refuse."""
    for M in (1, 2 * workers - 1, 2 * workers, 2 * workers + 1, 3 * workers + 2, 6 * workers):
        try:
            theirs = schedule(unpacked(workers, M), M)
        except ValueError:
            with pytest.raises(UsageError, match="at least"):
                dualpipe_v(2 * workers, workers, M)
        else:
            assert ours(dualpipe_v(2 * workers, workers, M)) == ours(theirs)


def unpacked(workers, M):
    """Torch's DualPipeV as lists; pairs that it overlaps are one action of two."""
    stages = [SimpleNamespace(num_stages=2 * workers, group_size=workers, group_rank=0, submod=None)] * 2
    order = of_torch("ScheduleDualPipeV")(stages, M).pipeline_order
    return [[str(part) for a in order[rank] for part in a.sub_actions or [a]] for rank in range(workers)]


# -- zero bubble: no more time, no more memory ------------------------------------------------------------------------


def schedule(lists, M):
    """Torch's lists as a schedule. On stage 0 torch, too, does the whole backward when told to do W, and at once."""
    body = []
    for texts in lists:
        actions = [Action(text[i], int(text[:i]), int(text[i + 1 :])) for text in texts for i in [kind_at(text)]]
        for this, then in pairwise(actions):
            assert this[:2] != ("I", 0) or then == this._replace(kind="W")
        whole = [a._replace(kind="B") if a[:2] == ("I", 0) else a for a in actions if a[:2] != ("W", 0)]
        body.append((*whole, *(Action("U", stage, M - 1) for stage in {a.stage for a in actions})))
    return Schedule(tuple(body), M)


def kind_at(text):
    return next(i for i, character in enumerate(text) if character.isalpha())


def time_and_memory(schedule):
    """Makespan at F = I = W = 1, and the most activations each worker holds."""
    S = schedule.num_stages
    timeline = simulate(schedule, Rules.of(schedule, Reach((*[None] * (S - 1), S - 1))), 1)
    change = {"F": 1, "B": -1, "W": -1, "I": 0, "U": 0}
    steps = [[change[s.action.kind] for s in timeline.spans if s.worker == w] for w in range(schedule.num_workers)]
    return timeline.makespan, [max(accumulate(own)) for own in steps]


def no_worse(mine, theirs):
    time, memory = time_and_memory(mine)
    torch_time, torch_memory = time_and_memory(theirs)
    assert time <= torch_time
    assert all(own <= other for own, other in zip(memory, torch_memory, strict=True))
    return time < torch_time


def sizes(workers):
    """Numbers of micro-batches below, at and above the number of workers; fewer of them where each takes longer."""
    return sorted({workers, *range(1, 21, 1 if workers < 5 else 3)})


@pytest.mark.parametrize("workers", slow_where(lambda workers: workers > 3, range(1, 9)))
def test_zb_h1(workers):
    for M in range(1, 21):
        if M % max(1, M // workers) == 0:  # torch refuses the others
            theirs = schedule(listed(of_torch("ScheduleInterleavedZeroBubble"), workers, 1, M), M)
            no_worse(zb_h1(workers, workers, M), theirs)


@pytest.mark.parametrize("workers", slow_where(lambda workers: workers > 3, range(1, 9)))
def test_zb_v(workers):
    """Ours is faster where there are no more micro-batches than workers, the case torch fills in least well."""
    for M in sizes(workers):
        theirs = schedule(listed(of_torch("ScheduleZBVZeroBubble"), workers, 2, M), M)
        faster = no_worse(zb_v(2 * workers, workers, M), theirs)
        assert faster or not 2 <= M <= workers or workers < 3
