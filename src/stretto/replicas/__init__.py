"""How the replicas of a pipeline keep their weights together: strategies, by name. No torch.

A and M are actions (`agreement.py`): A before a stage's update, M after it. M is not a second update: it changes
weights in place, unseen by graphs and rules, as no forward lies between U and M. Losses carry shares of the whole
minibatch and gradients are summed, so uneven sizes are exact. Gradients of 1 MB and more are summed where they are,
the others joined.

`shard-optimizer` (ZeRO-1) is ours: torch's `ZeroRedundancyOptimizer` deals out whole tensors, broadcasts weights,
pickles states, and could not be emulated. The user's function is called with whole parameters; then the groups are
given this replica's flat pieces. Shares are added in the order of replicas and cut at multiples of 64 elements, so
processes, emulated replicas and one device come to the same bits. A checkpoint has the state of a whole optimizer.

`fully-shard` is torch's FSDP2; A has nothing left to do there. Only methods that see the current weights can use it:
a stash of a gathered weight would keep it whole.

A parameter server's order is dynamic: each stage's sequence of replicas is logged, and the numbers depend on nothing
else, so the emulator replays a run. A ticket is given only if all others, oldest first, can still follow within the
bound.
"""

from stretto.replicas.parameter_server.tickets import Order
from stretto.replicas.sync_options import (
    AllReduce,
    DiLoCo,
    FullyShard,
    LocalSGD,
    ParameterServer,
    ShardOptimizer,
    Sync,
    find,
)

__all__ = [
    "AllReduce",
    "DiLoCo",
    "FullyShard",
    "LocalSGD",
    "Order",
    "ParameterServer",
    "ShardOptimizer",
    "Sync",
    "find",
]
