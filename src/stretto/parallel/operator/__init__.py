"""Operator (tensor) parallelism: the weights of a layer on several processes.

`chosen_styles.py` asks torch.fx what a cut value meets: only what works on each channel alone may stand between a
column and a row. Linear layers that the axis divides use torch's styles (DTensor). The rest, and everything with
`parameters="local"`, is our own code over plain tensors, which pipelines need: stashing and live weights rebind
`.data`, which DTensors do not survive.

Sequence. Where a cut pair begins, parts of the sequence are gathered, and the graph keeps only the part; where it
ends, the sum is scattered. Parameters of norms and biases of rows are read through `enter`, so their gradients are
sums.
"""

from stretto.parallel.operator.piece import norms
from stretto.parallel.operator.preparation import gather, tensor

__all__ = ["gather", "norms", "tensor"]
