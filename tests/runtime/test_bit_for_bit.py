"""Law 2: real processes come to the numbers of emulation, to the last bit, whatever the timing."""

from functools import cache

import pytest

from runtime import scripts
from runtime.processes import launch
from runtime.scripts import same

SYNCHRONOUS = ["interleaved", "backprop", "zb-v", "gpipe", "looped-bfs", "1f1b(microbatches=6)", "zb-h1", "zb-h2",
               "dualpipe-v"]  # fmt: skip
LOCAL = ["greedy", "overlapping", "overlapping(delay=1)", "chunked", "chunked(chunks=4)", "synthetic-gradients",
         "synthetic-gradients(labels=True, delay=2)", "chunked(microbatches=3)", "greedy(microbatches=2)",
         "overlapping(microbatches=2)", "chunked(inside=pb(spike=True))"]  # fmt: skip
ASYNCHRONOUS = [
    "pipedream", "pipedream-2bw", "paci(every=2)", "pb", "pb-sc", "pb-lwp-sc", "pb(stash=True)", "pb(predict=step)",
    "spectrain", "pipemare", "pipemare(warmup=3)", "pipeoptim", "nesterov",
]  # fmt: skip
OPTIONS = [
    ("1f1b(head_weight=0.3, head_at=0+2)", {"clip": 0.1}), ("zb-h1(head=linear)", {}),
    ("chunked(microbatches=2, inside=zb-h1, recompute=True)", {}),
    ("1f1b", {"clip": 0.1}), ("pb", {"clip": 0.1}), ("gpipe(recompute=True)", {}), ("pipemare(recompute=True)", {}),
    ("pb", {"precision": "bf16"}), ("pb(finish=9)", {}), ("greedy(head=infopro)", {}),
    ("overlapping(head=infopro)", {}), ("chunked(head=auglocal)", {}), ("greedy(head=auglocal)", {}),
    ("zb-h1", {"recompute": "full"}), ("pipedream", {"recompute": "full", "precision": "bf16"}),
    ("pb(predict=weight)", {"optimizer": "muon"}), ("gpipe", {"optimizer": "muon", "precision": "bf16"}),
    ("pipedream", {"optimizer": "soap"}), ("pipeoptim", {"optimizer": "muon"}), ("pb", {"optimizer": "lion"}),
    ("greedy", {"optimizer": "muon"}), ("synthetic-gradients(head=mlp, rate=2)", {"precision": "bf16"}),
    ("pipedream(rotate=one-sided, feedback=delay)", {}), ("pb(feedback=2)", {}), ("paci(feedback=1, warmup=3)", {}),
    ("pipedream-2bw(rotate=True, refresh=2, feedback=1)", {"precision": "bf16"}),
    ("pb(predict=step, spike=True)", {"optimizer": "muon"}), ("pb-lwp-sc", {"optimizer": "nadam"}),
]  # fmt: skip
EVEN = ("interleaved", "looped-bfs")
RUNS = [(method, {}) for method in (*SYNCHRONOUS, *LOCAL, *ASYNCHRONOUS)] + OPTIONS
EVERY = range(len(RUNS))
PLACED = {2: EVERY[::2], 3: EVERY[1::2], 4: EVERY}  # of two and of three processes, some have several stages
FEW = [RUNS.index(run) for run in (
    ("zb-v", {}), ("overlapping(delay=1)", {}), ("synthetic-gradients", {}),
    ("pb(predict=step, spike=True)", {"optimizer": "muon"}), ("pipedream", {"recompute": "full", "precision": "bf16"}),
)]  # fmt: skip


def fits(method, processes):
    # Four stages: zb-v and dualpipe-v want two a worker, interleaved ones as many on every worker.
    return processes == {"zb-v": 2, "dualpipe-v": 2}.get(method, processes) and (
        method not in EVEN or 4 % processes == 0
    )


@cache
def emulated(number):
    """What a run comes to; the number of workers does not change it."""
    method, options = RUNS[number]
    return scripts.train(method, workers=2, **options)


def test_no_run_is_left_out():
    assert {run for each, some in PLACED.items() for run in some if fits(RUNS[run][0], each)} == set(EVERY)


@pytest.mark.parametrize(
    ("processes", "jitter", "some", "fresh"),
    [
        pytest.param(2, None, FEW, 0, id="few"),
        *(
            pytest.param(*run, marks=pytest.mark.slow)
            for run in (
                (2, None, PLACED[2][::2], 1),
                (2, None, PLACED[2][1::2], 1),
                (3, 11, PLACED[3], 0),
                (4, 12, PLACED[4], 0),
            )
        ),
    ],
)
def test_every_method(processes, jitter, some, fresh):
    """Forks have one hash seed: of all runs of two processes, one process is started afresh."""
    numbers = [number for number in some if fits(RUNS[number][0], processes)]
    runs = [RUNS[number] for number in numbers]
    told = launch(processes, "runtime.scripts:train_all", runs, jitter, timeout=400, fresh=fresh)
    for number, (method, _) in enumerate(runs):
        losses, weights, evaluated = emulated(numbers[number])
        for rank in range(processes):
            assert told[rank][number][0] == losses, (method, rank)
            assert told[rank][number][2] == evaluated, (method, rank)
            assert (told[rank][number][1] is None) == (rank > 0)
        assert same(told[0][number][1], weights), method


@pytest.mark.parametrize(
    ("method", "clip"),
    [
        ("1f1b", 0.05),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("pb", None), ("greedy(head=linear)", None), ("synthetic-gradients", 1.0))
        ),
    ],
)
def test_tied_weights_travel(method, clip):
    told = launch(3, "runtime.scripts:tied", method, clip)
    *wanted, weights = scripts.tied(method, clip, workers=3)
    assert all(list(each[:3]) == wanted for each in told)
    assert same(told[0][3], weights)


def test_tied_weights_of_replicas_are_clipped_as_on_one_device():
    told = launch(4, "runtime.scripts:tied", "1f1b(microbatches=3)", 0.05, 2)
    losses, _, _, weights = scripts.tied("backprop", 0.05)
    assert all(each[0] == pytest.approx(losses, abs=1e-12) for each in told)
    assert max((told[0][3][key] - weights[key]).abs().max() for key in weights) < 1e-12


@pytest.mark.parametrize(
    "method", ["greedy(head=solo)", pytest.param("overlapping(head=solo(every=3))", marks=pytest.mark.slow)]
)
def test_a_shared_readout_travels(method):
    told = launch(3, "runtime.scripts:read_only", method)
    *wanted, weights = scripts.read_only(method, workers=3)
    assert all(list(each[:3]) == wanted for each in told)
    assert same(told[0][3], weights)


@pytest.mark.parametrize(
    ("processes", "method"),
    [(2, "greedy(head=man(momentum=0.9, every=2))"),
     pytest.param(3, "overlapping(head=man(momentum=0.9))", marks=pytest.mark.slow),
     pytest.param(3, "chunked(chunks=3, head=man(momentum=0.9, every=3))", marks=pytest.mark.slow)],
)  # fmt: skip
def test_averages_of_the_next_stages_layers_travel(processes, method):
    told = launch(processes, "runtime.scripts:read_only", method, True)
    *wanted, weights = scripts.read_only(method, True, workers=processes)
    assert all(list(each[:3]) == wanted for each in told)
    assert any("average" in name for name in weights)
    assert same(told[0][3], weights)


@pytest.mark.parametrize(
    ("processes", "method"),
    [(2, "overlapping(delay=1, share_top=3)"), pytest.param(3, "greedy(share_top=2)", marks=pytest.mark.slow),
     pytest.param(3, "chunked(chunks=3, share_top=1)", marks=pytest.mark.slow),
     pytest.param(3, "greedy(head=solo)", marks=pytest.mark.slow),
     pytest.param(2, "greedy(head=blocks)", marks=pytest.mark.slow),
     pytest.param(2, "greedy(head=infopro)", marks=pytest.mark.slow)],
)  # fmt: skip
def test_heads_of_tied_models_travel(processes, method):
    """Versions of shared layers go down, their gradients up; the unembedding is the embedding."""
    told = launch(processes, "runtime.scripts:read_only", method, True)
    *wanted, weights = scripts.read_only(method, True, workers=processes)
    assert all(list(each[:3]) == wanted for each in told)
    assert same(told[0][3], weights)


def test_shapes_may_change_and_several_tensors_travel():
    told = launch(2, "runtime.scripts:shapes_that_change", "pb")
    *wanted, weights = scripts.shapes_that_change("pb", workers=2)
    assert all(list(each[:2]) == wanted for each in told)
    assert same(told[0][2], weights)


def test_a_stage_given_as_a_function_is_built_only_where_it_lives():
    told = launch(2, "runtime.scripts:built_where_they_live", "greedy")
    built, weights = scripts.built_where_they_live("greedy")
    assert [each[0] for each in told] == [[0, 1], [2, 3]]
    assert built == [0, 1, 2, 3]
    assert same(told[0][1], weights)


def test_each_process_needs_only_the_data_that_it_reads():
    told = launch(2, "runtime.scripts:parted_data", "1f1b")
    *wanted, weights, pace = scripts.parted_data("1f1b", workers=2)
    assert all(list(each[:2]) == wanted for each in told)
    assert same(told[0][2], weights)
    assert pace == 1.0
    assert [each[3] for each in told] == [2.0, 2.0], "the first process knows that of the slowest"


def test_a_checkpoint_goes_on_with_any_number_of_workers(tmp_path):
    method = "pb-lwp-sc"
    folder = str(tmp_path / "checkpoint")
    whole = scripts.save_in_the_middle(method, str(tmp_path / "emulated"))
    assert same(launch(3, "runtime.scripts:save_in_the_middle", method, folder)[0], whole)
    assert same(scripts.resume(method, folder), whole)
    assert same(launch(2, "runtime.scripts:resume", method, folder)[0], whole)
    assert same(launch(2, "runtime.scripts:resume", method, str(tmp_path / "emulated"))[0], whole)


def test_a_recording_has_every_message_at_both_ends():
    told = [each[0] for each in launch(2, "runtime.scripts:recorded", "pb")]
    sent = {mark[:2] for spans, sends, receipts, counts in told for mark in sends}
    received = {mark[:2] for spans, sends, receipts, counts in told for mark in receipts}
    assert sent == received
    assert any(channel.startswith("activation") for channel, _ in sent)
    for spans, _, _, counts in told:
        assert {span.lane for span in spans} == {"compute", "wait"}
        assert counts
