"""Which checkpoints replicas can go on from: those that hold what each of them has, or where all have the same."""

from stretto.errors import UsageError
from stretto.replicas.strategies import AllReduce, FullyShard, ParameterServer, Sync

ALIKE = (AllReduce.name, FullyShard.name)  # all replicas have the same optimizer state


def refuse_other(place: str, saved: str | None, had: int, sync: Sync, replicas: int) -> None:
    """Raise UsageError if these replicas cannot go on from a checkpoint of `had` replicas under the sync `saved`.

    Where they are alike any number can go on, also as replicas that will not be. So can one: the others begin as it is.
    """
    mine = sync.kept(replicas)
    if saved is None and mine not in ALIKE:
        raise UsageError(
            f"{place} was written by a version of Stretto that kept the optimizer of one replica for all, and "
            f"sync={mine!r} cannot go on from it as if nothing had been: train anew, or go on with that version"
        )
    if saved is None or (saved in ALIKE and mine != ParameterServer.name):
        return
    before = f"mesh=Mesh(data={had}) (--data-parallel {had})"
    if saved != mine:
        raise UsageError(
            f"{place} was saved with sync={saved!r}, and what its optimizers know of past updates is not what "
            f"sync={mine!r} goes on from: go on with sync={saved!r} and {before}"
        )
    if had != replicas and (had > 1 or mine == ParameterServer.name):
        raise UsageError(
            f"{place} was saved with sync={saved!r} by {had} replicas, each with optimizer state of its own, and this "
            f"trainer has {replicas}: go on with {before}"
        )
