"""Law 9: every schedule is complete and free of deadlock under both kinds of sends; what is not is refused by name."""

import pytest

import stretto
from stretto.errors import ScheduleError
from stretto.schedule import Action, Reach, Rules, Schedule, check
from stretto.schedule.validity import run_dry

BACKPROP = {S: Reach((*[None] * (S - 1), S - 1)) for S in range(1, 5)}
GREEDY = {S: Reach((0,) * S) for S in range(1, 5)}
METHODS = [
    "backprop", "greedy", "overlapping", "overlapping(delay=1)", "overlapping(combine=mean)", "chunked",
    "chunked(chunks=3)", "chunked(chunks=5)",
]  # fmt: skip


def schedule(*workers, per_turn=1):
    return Schedule(
        tuple(tuple(Action(t[1], int(t[0]), int(t[2:])) for t in worker.split()) for worker in workers), per_turn
    )


def refuse(found, reach, message, **options):
    with pytest.raises(ScheduleError, match=message):
        check(found, Rules.of(found, reach, **options))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_passes_on_any_number_of_stages_and_workers(method):
    least = stretto.method(method).options.get("chunks", 1)
    for num_stages in (1, *range(max(2, least), 8)):
        for workers in range(1, num_stages + 1):
            check(*stretto.method(method).plan(num_stages, workers))


def test_complete_and_simple():
    for sound in (schedule("0F0 0B0 0U0"), schedule("0F0 0B-2 0U-2", "1F0 1B-1 1U-1")):
        check(sound, Rules.of(sound, BACKPROP[sound.num_stages]))


@pytest.mark.parametrize(("workers", "message"), [
    (["0F0 0B0 0U0", "1F0 1B0"], "1U0 is missing from worker 1"),
    (["0F0 0U0", "1F0 1B0 1U0"], "0B0 is missing from worker 0"),
    (["0B0 0U0", "1F0 1B0 1U0"], "0F0 is missing from worker 0"),
    (["0F0 0I0 0U0", "1F0 1B0 1U0"], "0W0 is missing from worker 0"),
    (["0F0 0W0 0U0", "1F0 1B0 1U0"], "0B0 is missing from worker 0"),
])  # fmt: skip
def test_a_missing_action_is_named(workers, message):
    refuse(schedule(*workers), BACKPROP[2], message)


def test_the_first_missing_action_is_named():
    """Both updates are missing, and stage 1's backward of the first micro-batch in two."""
    refuse(schedule("0F0 0B0", "1F0 1B0"), BACKPROP[2], "^0U0 is missing")


@pytest.mark.parametrize(("workers", "action"), [
    (["0F0 0B0 0U0 0F-1", "1F0 1B0 1U0"], "0F0"),
    (["0F0 0B0 0U0", "1F0 1B0 1U0 1U-2"], "1U0"),
])  # fmt: skip
def test_an_action_done_twice_is_named_and_not_called_missing(workers, action):
    with pytest.raises(ScheduleError, match=action) as error:
        check(schedule(*workers), Rules.of(schedule(*workers), BACKPROP[2]))
    assert "missing" not in str(error.value)


def test_a_whole_backward_beside_a_split_one_has_no_place():
    refuse(schedule("0F0 0B0 0I0 0W0 0U0"), BACKPROP[1], r"0B0 has no place in this schedule \(worker 0\)")


def test_an_update_before_its_last_micro_batch_has_no_place():
    refuse(schedule("0F0 0F1 0B0 0U0 0B1 0U1", per_turn=2), BACKPROP[1], "0U0 has no place")


def test_the_wrong_number_of_stages():
    refuse(schedule("0F0 0B0 0U0"), BACKPROP[2], "drives 1 stages, the rules know 2")


@pytest.mark.parametrize(("workers", "reach", "message"), [
    (["0F0 0U0 0B0"], BACKPROP[1], "worker 0 waits for 0B0's weight-gradient before 0U0"),
    (["0B0 0F0 0U0"], GREEDY[1], "worker 0 waits for 0F0's graph before 0B0"),
    (["0F0 0W0 0I0 0U0"], GREEDY[1], "worker 0 waits for 0I0's cotangent before 0W0"),
    (["1F0 0F0 1B0 1U0 0B0 0U0"], BACKPROP[2], "worker 0 waits for 0F0's activation before 1F0"),
    (["0F0 0B0 0U0 1F0 1B0 1U0"], BACKPROP[2], "worker 0 waits for 1B0's gradient before 0B0"),
    # a cycle through two workers: each waits for what the other does later
    (["0F0 0B0 0U0 2F0 2B0 2U0", "1F0 1B0 1U0"], BACKPROP[3],
     "worker 0 waits for 1B0's gradient before 0B0; worker 1 waits for 2B0's gradient before 1B0"),
])  # fmt: skip
def test_deadlocks_say_who_waits_for_what(workers, reach, message):
    refuse(schedule(*workers), reach, f"^deadlock with buffered sends: {message}$")


def crossing():
    """Worker 0 sends 0F0 before 0F1, worker 1 wants them the other way round."""
    return schedule("0F0 0F1 0B0 0B1 0U1", "1F1 1F0 1B1 1B0 1U1", per_turn=2)


def test_a_deadlock_under_rendezvous_sends_only():
    found = crossing()
    rules = Rules.of(found, GREEDY[2])
    run_dry(found, rules, 7, "buffered")
    message = "^deadlock with rendezvous sends: worker 1 waits for 0F1's activation before 1F1$"
    with pytest.raises(ScheduleError, match=message):
        run_dry(found, rules, 7, "rendezvous")
    refuse(found, GREEDY[2], message)


def test_the_same_actions_in_the_order_of_their_sends_pass():
    found = schedule("0F0 0F1 0B0 0B1 0U1", "1F0 1F1 1B1 1B0 1U1", per_turn=2)
    check(found, Rules.of(found, GREEDY[2]))


def test_two_channels_between_the_same_workers_do_not_hold_each_other_up():
    """Worker 0 sends 0F(n) before 2F(n-1), worker 1 wants them the other way round: different stages, both pass."""
    found = schedule("0F0 2F-1 2B-1 2U-1 0B-1 0U-1", "3F-1 3B-1 3U-1 1F0 1B-1 1U-1")
    check(found, Rules.of(found, GREEDY[4]))


def test_unknown_sends():
    with pytest.raises(ScheduleError, match="sends='carrier pigeon': choose from buffered, rendezvous"):
        run_dry(schedule("0F0 0B0 0U0"), Rules(GREEDY[1]), 1, "carrier pigeon")


def test_updates_may_take_fewer_micro_batches_than_enter():
    found = schedule("0F0 0F1 0B0 0U0 0B1 0U1", per_turn=2)
    check(found, Rules.of(found, BACKPROP[1], per_update=1))
