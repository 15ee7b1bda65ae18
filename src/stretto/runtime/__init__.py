"""Training on real processes, over torch.distributed."""

from stretto.runtime.failure import WorkerLostError
from stretto.runtime.job_member import Member, membership
from stretto.runtime.world import World, join

__all__ = ["Member", "WorkerLostError", "World", "join", "membership"]
