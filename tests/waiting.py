"""Waiting for what another thread or process does: as long as it takes, but not for ever."""

import time


def wait_for(condition, *processes, seconds=60):
    """What `condition` returns once that is true; none of the processes may end before it is."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.01)
    return found
