"""A model cut into balanced stages that hold its own modules.

A model is a graph in units (`Traced`): `Blocks` numbers them by blocks, `Exported`, the last resort, by operations
with FLOPs or a weight matrix; pieces meet where the fewest bytes pass. A forward is exported in both modes; where
they differ a `Switch` follows `self.training`. No cut falls inside work in place or across the uses of a buffer that
changes. Where the largest stage has more than 1.3 times its share, finer cuts are tried. A decision between blocks
that shapes make becomes a check in the stage; one that numbers make is refused, unless it is inside a block. Where a
later stage needs a tensor's shape only, a tensor of shape [0, *shape] travels.

The proof (`proof.py`) runs model and cut on the example with the generators of torch, Python and NumPy seeded alike,
each with a backward of fixed random cotangents, and compares outputs, gradients (present or absent, too), buffers,
plain attributes and the states of the generators. The last two find a decision that came out alike, and a counter.
Hooks of modules that no stage calls are refused whatever they do. Gradients, hooks, modes, buffers, attributes and
generators are put back. A forward that leaves a tensor or a list in an attribute is called once more, on its first
example in every row: what then is the same is a cache, which a graph makes anew; anything else follows the batch, and
would be lost.
"""

from stretto.splitting.splitter import Stages, divide, pieces, split

__all__ = ["Stages", "divide", "pieces", "split"]
