"""PipeOptim (Guan et al. 2023, arXiv 2312.00839): forwards look ahead along the optimizer's own step."""

from stretto.methods.cure import Cure, Prediction
from stretto.methods.definition import Method
from stretto.methods.pipedream import ASYNCHRONOUS_1F1B
from stretto.schedule.library.pipedream import pipedream


def pipeoptim() -> Method:
    """Asynchronous 1F1B without stashes, whose forwards see the weights predicted for their backward.

    On stage s that is S-1-s updates later. The backward sees the current weights. XPipe (arXiv 1911.04610) does so for
    Adam.
    """
    return Method(
        name="pipeoptim",
        summary="asynchronous 1F1B, forwards on weights predicted along the optimizer's step",
        schedule=pipedream,
        synchronous=False,
        weights="live",
        planning=ASYNCHRONOUS_1F1B,
        cure=Cure(forward=Prediction("step", lambda place: place.delay)),
    )
