"""Nesterov-asynchronous training (AsyncPP, 2025, arXiv 2505.01099): look-ahead momentum against delay."""

from stretto.methods.cure import Cure
from stretto.methods.definition import Method
from stretto.methods.pipedream import ASYNCHRONOUS_1F1B
from stretto.schedule.library.pipedream import pipedream


def nesterov() -> Method:
    """PipeDream with torch.optim.NAdam, whose look-ahead counters old gradients; the paper's first beta is 0.99."""
    return Method(
        name="nesterov",
        summary="asynchronous 1F1B with stashed weights and NAdam",
        schedule=pipedream,
        synchronous=False,
        weights="stash",
        planning=ASYNCHRONOUS_1F1B,
        cure=Cure(optimizer="NAdam"),
    )
