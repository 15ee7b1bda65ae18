"""Which checkpoints replicas can resume from: those with each replica's state, or with one that all share."""

from stretto.errors import UsageError
from stretto.replicas.sync_options import AllReduce, FullyShard, ParameterServer, ShardOptimizer, Sync

ALIKE = (AllReduce.name, ShardOptimizer.name, FullyShard.name)  # a checkpoint has one optimizer state for all replicas


def refuse_other(place: str, saved: str | None, had: int, sync: Sync, replicas: int) -> None:
    """Raise UsageError if `replicas` replicas under `sync` cannot resume from the checkpoint at `place`.

    `had` and `saved` are its number of replicas and its sync (None: it is of format 2). Where all its replicas have the
    same optimizer state, any number of replicas can resume, also under another sync. The state of a single replica also
    serves any number: each starts with it. A parameter server needs its own sync and number of replicas.
    """
    name = sync.checkpoint_name(replicas)
    if saved is None and name not in ALIKE:
        raise UsageError(
            f"{place} was written by a version of Stretto that kept the optimizer of one replica for all, and "
            f"sync={name!r} needs each replica's: train anew, or go on with that version"
        )
    if saved is None or (saved in ALIKE and name != ParameterServer.name):
        return
    saved_mesh = f"mesh=Mesh(data={had}) (--data-parallel {had})"
    if saved != name:
        raise UsageError(
            f"{place} was saved with sync={saved!r}, whose optimizer states sync={name!r} cannot go on from: "
            f"go on with sync={saved!r} and {saved_mesh}"
        )
    if had != replicas and (had > 1 or name == ParameterServer.name):
        raise UsageError(
            f"{place} was saved with sync={saved!r} by {had} replicas, each with optimizer state of its own, and this "
            f"trainer has {replicas}: go on with {saved_mesh}"
        )
