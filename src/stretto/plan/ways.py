"""The ways in which plans divide the work, and the correction of predictions that whole steps gave for each."""

import math
from collections.abc import Mapping

from stretto.plan.problem import SHARDS
from stretto.plan.search_space import Candidate

ONE_WORKER, REPLICAS, TENSOR, SPACE = "one worker", "replicas", "tensor", "space"
PIPELINE, WITHOUT_DRAIN, LOCAL = "pipeline", "pipeline without a drain", "stages with losses of their own"
PROBED = {PIPELINE: "1f1b", WITHOUT_DRAIN: "pb", LOCAL: "greedy"}  # a probe's method; of other ways plain training
UNPROBED = 0.1  # by so much are other methods' steps mispredicted (benchmarks/prediction/README.md)
WAYS = (ONE_WORKER, REPLICAS, *SHARDS[1:], TENSOR, SPACE, PIPELINE, WITHOUT_DRAIN, LOCAL)


def ways_of(c: Candidate) -> tuple[str, ...]:
    """The ways in which a candidate divides the work, one for each axis that is longer than 1."""
    replicas = REPLICAS if c.shard == "none" else c.shard
    pipeline = LOCAL if c.planned.family == "local" else PIPELINE if c.planned.drains else WITHOUT_DRAIN
    ways = {
        ONE_WORKER: c.workers == 1,
        replicas: c.mesh.data > 1,
        TENSOR: c.mesh.tensor > 1,
        SPACE: c.mesh.space != (1, 1),
        pipeline: c.pipeline > 1,
    }
    return tuple(way for way, divided in ways.items() if divided)


def byte_correction(c: Candidate, ratios: Mapping[str, float]) -> float:
    """What the predicted bytes of a candidate are multiplied by: the most of its ways, 1 where none was measured.

    What operators take while they run is in the ratio of every way, so that a product would count it twice.
    """
    return max((ratios[way] for way in ways_of(c) if way in ratios), default=1.0)


def spread_of(c: Candidate, spreads: Mapping[str, float]) -> float | None:
    """How far measured steps lay apart, as a share, of a candidate's ways: the most of them; None if not measured.

    At least UNPROBED for stages that are trained by another method than the one whose steps were measured.
    """
    most = max((spreads[way] for way in ways_of(c) if way in spreads), default=None)
    if most is None or c.pipeline == 1 or c.method in PROBED.values():
        return most
    return max(most, UNPROBED)


def correction(c: Candidate, ratios: Mapping[str, float]) -> float:
    """What the predicted seconds of a candidate are multiplied by: 1 for ways that were not measured."""
    return math.prod(ratios.get(way, 1.0) for way in ways_of(c))
