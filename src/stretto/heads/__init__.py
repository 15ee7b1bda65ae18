"""Auxiliary heads: modules that map a stage's output to an output like the model's, so that the loss applies to it.

The layers of the heads of Laskin, Metz et al. 2020 could not be retrieved; the plain ones are ours.

    linear      [N, d]            Linear                               -> [N, K]
    pooled      [N, C, ...]       mean over all positions, Linear      -> [N, K]
    sequence    [N, T, d]         mean over T, LayerNorm, Linear       -> [N, K]
    language    [N, T, d]         LayerNorm, Linear without bias       -> [N, T, V]
    two-layer   any of these      the same with a hidden layer
    auglocal    any               copies of later stages (Ma et al. 2024)
    infopro     no tokens         two-layer, and a decoder of the model's input (Wang et al. 2021)
    blocks      [N, T, d]         copies of the model's last blocks, and of its readout                 -> [N, T, V]
    man         as two-layer      an average of the next stage's first layers (Su et al. 2024)
    segprop     any               the network's own last layers, which it trains, too (SegProp, TMLR 7218)
    solo        [N, T, d]         a read-only copy of the model's norm and unembedding    -> [N, T, V]

"auto" chooses among the first four by the numbers of dimensions of the stage's and the model's output.

A head may have more than the task's loss (InfoPro's reconstruction): then its process reads x, too. A readout that
others only read (`solo`) is a tie without gradients: stage s reads the version of S - s minibatches ago, a distance
in stages and not in workers, so placement changes no number. `man` reads the next stage, two minibatches ago. A kind
of head says whose weights it reads (`WeightReading`); each version arrives once, in order. Read weights have numbers
below 0 in messages, tied ones the others.

Shared last layers (`segprop`). One owner holds a shared layer and steps it; all others compute with a version that
travels down, one update older for each stage in between. Copies with an all-reduce would need a chain through all
stages in every step, the lock that local learning removes, and S optimizer states. Gradients travel up beside the
activations, so the owner waits for nothing. They are added, not averaged (the paper trains one segment at a time). It
is a tie whose owner stands above its users (`Delays.reading(trains=True)`), so interpreters, checkpoints and proofs
have no case for it.
"""

from stretto.heads.head import LocalLoss, Site
from stretto.heads.table import HEADS, build, register

__all__ = ["HEADS", "LocalLoss", "Site", "build", "register"]
