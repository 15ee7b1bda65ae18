"""Helpers over torch.nn.Module and tensors: batches, shapes, devices, random generators, tied weights, FLOPs.

Placeholders (`deferred.py`) are on the CPU and not on the meta device, because ids of tokens are real, and buffers
and small parameters are as well: models that look at their masks while they are cut see true ones. Each module's
drawn weights have a seed of their own, derived from its name, so they depend on no order. What computes with a model
only to inspect it exchanges parameters for torch's fake tensors.

Batches (`batch.py`). A batch given as a dict becomes a tuple of tensors that remembers their names: only what calls
stage 0 looks at them. A stage or a loss that fails on a batch of a kind that it has not trained with is told with the
shapes; on a kind that has come through before, the error stays what it is.

Tied weights. A parameter that several stages use belongs to the first of them (under local methods to the last, so
the network's loss trains the output layer). The others get the version that the owner's forward of the same
micro-batch saw, as if it were an activation: each forward runs on a leaf of its own. So both uses of a micro-batch
are of one version, and no refresh rate has to be chosen. The price is one copy a version while it travels, and the
gradient waits at the owner for its micro-batch.

Recomputation layer by layer (`layer_recompute.py`): a forward runs under saved-tensor hooks that drop what the graph
saves, but inputs and weights; the first that a backward asks for runs the module again, on the tensors, buffers and
generator states of its forward. `torch.utils.checkpoint` would see the parameters as they are in the backward, not
those of a stash.

Devices (`devices.py`) alone know kinds of devices. "auto" leaves out MPS, which has no float64.
"""
