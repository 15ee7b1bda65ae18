"""One channel between two processes."""

from runtime.processes import launch


def test_what_was_sent_arrives_though_its_sender_has_been_given_up():
    assert launch(2, "runtime.posting:given_up", 3, timeout=60)[1] == [(n, 40_000.0 * n) for n in range(3)]


def test_rare_values_leave_no_memory_behind():
    sizes = [40_000, 40_000, 10, 90_000]
    (_, sender), (sums, receiver) = launch(2, "runtime.posting:rare", sizes, timeout=60, own=True)
    assert sums == sizes
    assert max(sender, receiver) < 40_000
