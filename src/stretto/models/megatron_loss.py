"""The cross entropy of tokens as Megatron computes it: on processes that share the vocabulary, and on one as well.

Each step over the logits in float32 is an operator: the largest of a token, the difference to it, its exponential, the
sum, the quotient; backward a product (megatron/mpu/cross_entropy.py at 8aa4619). torch's own has fewer.
"""

from typing import Any

import torch
from torch import Tensor


class ParallelCrossEntropy(torch.autograd.Function):
    """Logits [N, V], float32, which are overwritten, and targets [N] -> their mean cross entropy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        """Keep the softmax, where the logits were."""
        logits.sub_(logits.amax(-1, keepdim=True))
        scores = logits.gather(1, target[:, None])
        total = logits.exp_().sum(-1, keepdim=True)
        loss = (total.log() - scores).mean()
        ctx.save_for_backward(logits.div_(total), target)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The softmax less one at the target, by the mean's share of the gradient."""
        softmax, target = ctx.saved_tensors
        softmax.scatter_add_(1, target[:, None], torch.full_like(target[:, None], -1, dtype=softmax.dtype))
        return softmax.mul_(gradient / len(target)), None


def megatron_token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy of tokens, from logits in float32."""
    logits = output.flatten(0, 1).to(torch.float32, copy=True)
    loss: Tensor = ParallelCrossEntropy.apply(logits, target.flatten())  # type: ignore[no-untyped-call]
    return loss
