"""Scripts that train replicas which share out their weights, and know nothing of processes."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import stretto
from runtime.replicated import batches, build, weights_of


def train_all(runs):
    """What `replicated.train` gives for each of several (method, mesh, options), in the same processes."""
    from runtime import replicated

    return [replicated.train(method, mesh, **options) for method, mesh, options in runs]
