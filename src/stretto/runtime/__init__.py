"""Training on real processes, over torch.distributed."""

from stretto.runtime.ranks import Ranks
from stretto.runtime.world import World, join

__all__ = ["Ranks", "World", "join"]
