"""Which combination trains a model best on a cluster: every axis, method and cut, searched exactly. No torch here.

A plan's step is a sum of fills plus the largest load (or the largest load alone, without a drain). Stages that wait
(chunks, overlapping without delay) need another program: under a limit, the cut that keeps the stage below waiting
least is as good as any. Bounds are the larger one of even shares and of what the worker that has most to do has at
least. Candidates on the same axes with the same micro-batches have a bound together first. Where limits leave no
candidate, they are lifted one by one, those first that a user would blame last.

Hosts. Eager torch issues kernels from Python and runs ahead of the device. With e the host's seconds less the
device's, summed up layer by layer, a device is behind by the highest e of the action: a range maximum, added last,
where communication that keeps the device waiting anyway hides it.

Steps on whole matrices (Muon, SOAP): each layer's row has sums of powers of its matrices' sides, of which every FLOP
and byte of such a step is a multiple; so a stage's cost stays a sum over layers.

The slowest device: computing is longer by the expected largest of N numbers (`Device.variation`).

Several stages a worker: the mean of a worker's stages counts, and the slowest worker (`worker_partition.py`,
`worker_search.py`; exact for two or three stages a worker). Their memory is a sum: what each keeps, and the most that
one of them computes again.

Tied weights in plans (`cost/head_costs.py`): a borrower has the weight and nothing of its step. Whether layers
[i, j) borrow follows from i alone (the first stage owns) or from j alone (the last one does).

Unequal workers: a placement is an injection from processes into a cluster's workers; placements with the same devices
and links cost the same. Money and energy: a goal's value follows from seconds by a rate for each second of a step and
one for each busy second. Failures are outside the search, by Daly's complete model.

Whole steps and trials: one plan for each way to divide the work is measured, and a factor corrects all plans of that
way. Trials correct nothing, as those plans would win that were tried. All of them live at once and take turns, since
a machine's speed drifts.
"""

from stretto.plan.branch_and_bound import Found, Plan, search
from stretto.plan.objective import GOALS, Objective, Penalty
from stretto.plan.problem import Problem
from stretto.plan.search_space import Candidate, candidates

__all__ = ["GOALS", "Candidate", "Found", "Objective", "Penalty", "Plan", "Problem", "candidates", "search"]
