"""What it costs to predict the gradient of a stage's output, and to learn to: part of B, and L.

The predicting module runs forward in B. L has its backward, whose input needs no gradient, and its update; where other
learning steps came between, it runs forward once more.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from stretto.cost.cluster import Cluster
from stretto.cost.layer_sums import LayerTimes, Seconds
from stretto.cost.layer_table import LayerCost, ModelCosts
from stretto.cost.stage_prediction import StageTimes, speeds_of
from stretto.methods import Method
from stretto.optimizers import Stepping, optimizer_of, stepping_of

Heads = Sequence[LayerCost | None]


def without(heads: Heads | None, predicted: Collection[int]) -> Heads | None:
    """The heads without those that predict gradients."""
    return heads and [None if stage in predicted else head for stage, head in enumerate(heads)]


def with_predictions(
    stages: Sequence[StageTimes],
    heads: Heads | None,
    method: Method,
    cluster: Cluster,
    examples: float,
    *,
    workers: Sequence[Sequence[int]],
    dtype: str,
    optimizer: str | Stepping = "sgd",
) -> tuple[StageTimes, ...]:
    """Stages, priced without heads, with what predicts their gradients; `heads` has the rows of those modules.

    Other arguments are those of `stage_times`.
    """
    predicted = method.reach(len(stages)).predicted
    if heads is None or method.prediction is None:
        return tuple(stages)
    chosen, kept = optimizer_of(stepping_of(optimizer).name), method.prediction.keeps_graph
    priced = []
    for index, (stage, head, places) in enumerate(zip(stages, heads, workers, strict=True)):
        if head is None or index not in predicted:
            priced.append(stage)
            continue
        speeds = speeds_of(ModelCosts((head,), dtype), cluster, [places], examples / len(places), dtype, optimizer)
        times = LayerTimes(*map(max, zip(*(speeds[worker][0].alone for worker in places), strict=True)))
        compute = stage.compute._replace(backward=stage.compute.backward + times.forward)
        priced.append(
            replace(
                stage,
                compute=compute,
                learn=learn_seconds(times, keeps_graph=kept),
                parameters=stage.parameters + head.parameter_bytes,
                state=stage.state + head.state_bytes(chosen),
            )
        )
    return tuple(priced)


def learn_seconds(times: LayerTimes[Seconds], *, keeps_graph: bool) -> Seconds:
    """Seconds of L, by those of the module: a forward if it does not keep the prediction's graph, W, and an update."""
    again = times.forward * (not keeps_graph)
    return times.weight_gradient + times.update + again
