"""How old the weights are that heads read of other stages: what a schedule says of them without a network."""

from collections.abc import Callable, Mapping

from stretto.methods.definition import Method
from stretto.options.parse import parse
from stretto.schedule import Schedule

OWNERS: Mapping[str, Callable[[int, int], int]] = {  # (stage, number of stages) -> the stage that its head reads
    "solo": lambda stage, num_stages: num_stages - 1,
    "segprop": lambda stage, num_stages: num_stages - 1,
    "man": lambda stage, num_stages: stage + 1,
}


def minibatches_behind(method: Method, schedule: Schedule) -> tuple[int, ...]:
    """For the head of each stage that has one: the newest update in the weights that it reads for minibatch m is that
    of the minibatch so many before m. Empty for heads that read none.

    With an option `every` they are the youngest. Layers that `segprop` shares of stages below the last one are younger.
    """
    owner = OWNERS.get(parse(method.head, "head")[0])
    if owner is None or method.synchronous:
        return ()
    delays, count = method.delays(schedule), schedule.num_stages
    return tuple(delays.reading(owner(s, count), s).behind[0] for s in method.reach(count).heads[:-1])
