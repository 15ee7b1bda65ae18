"""PipeDream (Narayanan et al. 2019, SOSP; 1806.03377) and PipeDream-2BW (Narayanan et al. 2021, 2006.09503).

Asynchronous 1F1B: minibatches follow each other without a flush, no worker is ever idle, and gradients are stale. A
backward sees the weights of its forward, stashed by PipeDream for every minibatch in flight; 2BW keeps two versions,
by updating only once as many micro-batches are through as there are stages.

On the same clock, with other weights:

- SpecTrain (Chen et al. 2018, arXiv 1809.02839): forward and backward of a minibatch aim at the same version.
- PipeOptim (Guan et al. 2023, arXiv 2312.00839): forwards look ahead along the optimizer's own step.
- Nesterov-asynchronous training (AsyncPP, 2025, arXiv 2505.01099): look-ahead momentum against delay.
"""

from functools import partial

from stretto.errors import UsageError
from stretto.methods.cure import Cure, Feedback, Place, Prediction, Rotate, cures_in_words, step_cure
from stretto.methods.definition import Method
from stretto.methods.planning import Planning
from stretto.methods.synchronous_pipelines import check_count
from stretto.schedule import Schedule
from stretto.schedule.library.pipedream import pipedream as pipedream_schedule
from stretto.schedule.library.pipedream import pipedream_2bw as pipedream_2bw_schedule

asynchronous_1f1b = partial(
    Method,
    schedule=pipedream_schedule,
    synchronous=False,
    planning=Planning(held=lambda at: at.above + 1, delay=lambda at: at.above),
)


def pipedream(*, feedback: Feedback = 0.0, rotate: Rotate = False, refresh: int | None = None) -> Method:
    """Update after every minibatch; stage s works with gradients S-1-s updates old and keeps S-s versions.

    feedback, rotate, refresh: cures of the optimizer's step, as of `pb`.
    """
    cure = step_cure("pipedream", feedback, rotate, refresh)
    return asynchronous_1f1b(
        name="pipedream",
        summary=f"asynchronous 1F1B with stashed weights{cures_in_words(cure)}",
        weights="stash",
        cure=cure,
    )


def pipedream_2bw(
    *, microbatches: int | None = None, feedback: Feedback = 0.0, rotate: Rotate = False, refresh: int | None = None
) -> Method:
    """Update after `microbatches` micro-batches, S by default: gradients are one update old on every stage.

    Exceptions are the first minibatch and the first after each drain (`flush`, `save`, a change of phase): they see the
    newest weights, since no micro-batch in flight needs the former version.

    feedback, rotate, refresh: cures of the optimizer's step, as of `pb`.
    """
    check_count("pipedream-2bw", "microbatches", microbatches)
    cure = step_cure("pipedream-2bw", feedback, rotate, refresh)

    def schedule(num_stages: int, num_workers: int) -> Schedule:
        count = microbatches or num_stages
        if count < num_stages:
            raise UsageError(
                f"pipedream-2bw(microbatches={count}) on {num_stages} stages: two versions of the weights are enough "
                f"only from {num_stages} micro-batches on; use microbatches={num_stages} or fewer stages"
            )
        return pipedream_2bw_schedule(num_stages, num_workers, count)

    return Method(
        name="pipedream-2bw",
        summary=f"asynchronous 1F1B, two versions of the weights{cures_in_words(cure)}",
        schedule=schedule,
        synchronous=False,
        weights="double-buffered",
        cure=cure,
        planning=Planning(
            cut="microbatches",
            allows=lambda microbatches, workers: microbatches >= workers,
            held=lambda at: at.above + 1,
            delay=lambda at: 1 if at.stages > 1 else 0,
        ),
    )


def forward_horizon(place: Place) -> float:
    """floor(s/2) + D, D = S - 1 - s: from the forward on stage s to the backward on stage 0."""
    return place.stage // 2 + place.delay


def backward_horizon(place: Place) -> float:
    """floor(s/2): from the backward on stage s to that on stage 0."""
    return place.stage // 2


def spectrain() -> Method:
    """Asynchronous 1F1B without stashes; both passes see weights predicted along the velocity."""
    return asynchronous_1f1b(
        name="spectrain",
        summary="asynchronous 1F1B, both passes on predicted weights",
        weights="live",
        cure=Cure(forward=Prediction("velocity", forward_horizon), backward=Prediction("velocity", backward_horizon)),
    )


def pipeoptim() -> Method:
    """Asynchronous 1F1B without stashes, whose forwards see the weights predicted for their backward.

    On stage s that is S-1-s updates later. The backward sees the current weights. XPipe (arXiv 1911.04610) does so for
    Adam.
    """
    return asynchronous_1f1b(
        name="pipeoptim",
        summary="asynchronous 1F1B, forwards on weights predicted along the optimizer's step",
        weights="live",
        cure=Cure(forward=Prediction("step", lambda place: place.delay)),
    )


def nesterov() -> Method:
    """PipeDream with torch.optim.NAdam, whose look-ahead counters stale gradients; the paper's first beta is 0.99."""
    return asynchronous_1f1b(
        name="nesterov",
        summary="asynchronous 1F1B with stashed weights and NAdam",
        weights="stash",
        cure=Cure(optimizer="NAdam"),
    )
