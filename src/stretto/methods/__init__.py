"""Methods: one file a family of papers, and the table of names.

Predicted gradients (`local_updates.py`). Where gradients are predicted is topology, so `Reach` says it. Learning to
predict is an action of its own, L, with an edge `prediction` from B: overlapping's W would delay the stage's update
or take it from another minibatch. L stands after the next forward, F(n) L(n-1) B(n) U(n): the gradient of n-1 has
arrived there, and nobody waits. The unit of a prediction is the gradient of the mean loss times the number of rows,
so neither batch nor width changes how fast a predictor learns. Weights tied to the last stage are read and not
trained; replicas are refused, as L would be a collective.

Phases (`warmup=`, `finish=`). Between two phases the pipeline drains and every stage adopts other weights and another
step; micro-batches keep their numbers, and a minibatch is cut alike in all phases. Cures see the updates of
synchronous phases, too.

Schedules from files (`user_method.py`). torch's file lists one minibatch, so it can describe a synchronous method and
nothing else. `csv(path=)` is backpropagation in the order of the file, and its name holds the file's digest:
processes with different files, and a checkpoint of a file that was edited since, are refused by the comparison of
methods' names.

Overlapping is F I W U on every stage. Stage 0 has no gradient to send and the top stage none to wait for, and still
both have I and W: the top sends its gradient down before it computes its weights', which makes the period 4 for work
3.
"""

from stretto.methods.definition import Method
from stretto.methods.planning import Planning, StageAt
from stretto.methods.synchronous_pipelines import BASELINE
from stretto.methods.table import METHODS, method, register, with_microbatches

__all__ = ["BASELINE", "METHODS", "Method", "Planning", "StageAt", "method", "register", "with_microbatches"]
