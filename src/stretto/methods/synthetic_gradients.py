"""Synthetic gradients, or decoupled neural interfaces (DNI), Jaderberg et al. 2017, arXiv 1608.05343.

A small module M behind each stage but the last predicts the gradient of the loss with respect to the stage's output
from that output alone, or from the targets, too (the paper's cDNI). The stage goes backward with the prediction at once
and updates. M learns by the squared error from the gradient that the next stage sends later, which that stage has
computed with its own prediction, or, as the last stage, with the loss.
"""

from stretto.errors import UsageError
from stretto.methods.definition import Method
from stretto.methods.gradient_prediction import GradientPrediction
from stretto.methods.planning import Planning
from stretto.options.checks import is_among, shown
from stretto.schedule import Reach
from stretto.schedule.library.backprop_and_local import predicted_gradients


def synthetic_gradients(*, head: str = "auto", labels: bool = False, delay: int = 1, rate: float = 1.0) -> Method:
    """Every stage but the last trains on a predicted gradient.

    head: the module that predicts it (`stretto.heads.gradients`). labels: it also reads the targets, class numbers.
    delay: micro-batches between a prediction and the newest true gradient that was learned from; more than 1 for links
    so slow that a gradient takes more than a turn. rate: the modules' learning rate, times the stage's.
    """
    if not is_among(labels, (True, False)):
        raise UsageError(f"synthetic-gradients(labels={shown(labels)}): choose True or False")
    prediction = GradientPrediction(delay, rate)

    def reach(num_stages: int) -> Reach:
        hops = (*[None] * (num_stages - 1), 0)
        return Reach(hops, frozenset(range(num_stages - 1)), labels and num_stages > 1)

    return Method(
        name="synthetic-gradients",
        summary="every stage trains on a predicted gradient of its output, and the prediction on the true one",
        reach=reach,
        schedule=lambda num_stages, num_workers: predicted_gradients(num_stages, num_workers, delay),
        synchronous=False,
        head=head,
        prediction=prediction,
        planning=Planning(messages="hidden", waits="prediction"),
    )
