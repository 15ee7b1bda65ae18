"""One channel between two processes."""

import pytest

from runtime.posting import LENGTHS
from runtime.processes import launch


def test_what_was_sent_arrives_though_its_sender_has_been_given_up():
    assert launch(2, "runtime.posting:given_up", 3, timeout=60)[1] == [(n, 40_000.0 * n) for n in range(3)]


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_values_of_changing_lengths(ahead):
    sent = [(n, [float(n)] * length) for n, length in enumerate(LENGTHS)]
    assert launch(2, "runtime.posting:changing", ahead, timeout=60)[1] == [*sent, *sent[:4], *sent]
