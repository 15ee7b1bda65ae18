"""Training on real processes, over torch.distributed."""

from stretto.runtime.failure import WorkerLostError
from stretto.runtime.member import Member, membership
from stretto.runtime.ranks import Ranks
from stretto.runtime.world import World, join

__all__ = ["Member", "Ranks", "WorkerLostError", "World", "join", "membership"]
