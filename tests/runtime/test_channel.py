"""One channel between two processes."""

from runtime.processes import launch


def test_what_was_sent_arrives_though_its_sender_has_been_given_up():
    assert launch(2, "runtime.posting:given_up", 3, timeout=60)[1] == [(n, 40_000.0 * n) for n in range(3)]
