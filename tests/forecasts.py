"""A step of any method on the first workers of a cluster, and its memory: by the functions that plans and runs use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.cost import Cluster, LayerCost, ModelCosts, stage_times
from stretto.cost.head_costs import HeadCosts, borrow, laid_out, uses_in
from stretto.cost.step_prediction import Pricer, Work, Workers, predictions, silent, turn_seconds
from stretto.cost.worker_memory import peak_bytes
from stretto.methods import Method
from stretto.methods import method as find_method


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Seconds of a step in the long run, seconds of each action, and the peak bytes of tensors on each worker."""

    seconds: float
    actions: Mapping[Work, float]
    bytes: tuple[float, ...]


def forecast(
    costs: ModelCosts,
    bounds: Sequence[int],
    cluster: Cluster,
    method: str | Method,
    batch: float,
    *,
    workers: int | None = None,
    heads: Sequence[LayerCost | None] | HeadCosts | None = None,
    optimizer: str = "sgd",
) -> Forecast:
    """The forecast of training by a method on the first workers of a cluster, for minibatches of `batch` examples.

    Stage s holds the layers from bounds[s] up to bounds[s + 1]; `workers` is the length of the pipeline, `heads`
    has the rows of the heads that the method puts behind stages, or of what predicts gradients there, or is what such
    heads cost wherever stages end. Other arguments and errors are as in `stage_times`.
    """
    chosen = find_method(method)
    behind = laid_out(heads, chosen.reach(len(bounds) - 1), costs, bounds)
    schedule, rules = chosen.plan(len(bounds) - 1, workers, ties=behind.ties, reads=behind.reads)
    costs = borrow(costs, uses_in(costs, bounds, rules))
    places = [[schedule.worker_of[s]] for s in range(schedule.num_stages)]
    share = batch / schedule.per_turn
    stages = stage_times(
        costs,
        bounds,
        cluster,
        share,
        workers=places,
        heads=behind.rows,
        optimizer=optimizer,
        silent=silent(rules, schedule.num_stages),
        cures=chosen.step_cures(schedule),
        predictions=predictions(chosen, rules),
    )
    pricer = Pricer(chosen, schedule, rules, Workers.alone(cluster, schedule.num_workers), stages, behind.weights)
    return Forecast(
        seconds=turn_seconds(pricer),
        actions=pricer.actions,
        bytes=peak_bytes(chosen, schedule, rules, costs, bounds, share, optimizer=optimizer, behind=behind),
    )
