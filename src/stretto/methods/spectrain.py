"""SpecTrain (Chen et al. 2018, arXiv 1809.02839): forward and backward of a minibatch aim at the same version."""

from stretto.methods.cure import Cure, Place, Prediction
from stretto.methods.definition import Method
from stretto.methods.pipedream import ASYNCHRONOUS_1F1B
from stretto.schedule.library.pipedream import pipedream


def forward_horizon(place: Place) -> float:
    """floor(s/2) + D, D = S - 1 - s: from the forward on stage s to the backward on stage 0."""
    return place.stage // 2 + place.delay


def backward_horizon(place: Place) -> float:
    """floor(s/2): from the backward on stage s to that on stage 0."""
    return place.stage // 2


def spectrain() -> Method:
    """Asynchronous 1F1B without stashes; both passes see weights predicted along the velocity."""
    return Method(
        name="spectrain",
        summary="asynchronous 1F1B, both passes on predicted weights",
        schedule=pipedream,
        synchronous=False,
        weights="live",
        planning=ASYNCHRONOUS_1F1B,
        cure=Cure(forward=Prediction("velocity", forward_horizon), backward=Prediction("velocity", backward_horizon)),
    )
