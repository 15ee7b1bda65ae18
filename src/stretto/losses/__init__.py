"""Losses: a mean over examples, or a sum and a count, and the check that a mean is one over examples."""

from stretto.losses.batch_means import BatchMeans
from stretto.losses.cross_entropy import CrossEntropy, Sum, next_token_cross_entropy, token_cross_entropy
from stretto.losses.mean_check import MeanCheck
from stretto.losses.value import Loss, MeanOverExamples, call, mean, mean_and_weight, understand

__all__ = [
    "BatchMeans",
    "CrossEntropy",
    "Loss",
    "MeanCheck",
    "MeanOverExamples",
    "Sum",
    "call",
    "mean",
    "mean_and_weight",
    "next_token_cross_entropy",
    "token_cross_entropy",
    "understand",
]
