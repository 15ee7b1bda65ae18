"""stretto plan: the best plan for a model and a cluster."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stretto.errors import UsageError
from stretto.settings.planning import FailureSettings, PlanOutput, PlanSettings


def plan(
    config: Path | None = None,
    /,
    *,
    settings: Annotated[PlanSettings, Parameter(name="*")] = PlanSettings(),  # noqa: B008 - frozen
    failures: Annotated[FailureSettings, Parameter(name="*", group="Failures, for goodput")] = FailureSettings(),  # noqa: B008 - frozen
    output: Annotated[PlanOutput, Parameter(name="*", group="Output")] = PlanOutput(),  # noqa: B008 - frozen
) -> None:
    """Find the best plan for a model and a cluster: axes, stages, method, micro-batches, recomputation, sharding.

    stretto train --plan FILE runs it, stretto show --plan FILE draws it. Searches every combination, exactly under the
    closed forms of its prices; the best few are simulated.

    Parameters
    ----------
    config
        TOML file with any of the options below; those on the command line win.
    """
    if output.diff is None and settings.cluster is None:  # known before the seconds that torch's import takes
        from stretto.cost.cluster_file import names

        raise UsageError(
            "cluster is missing: stretto calibrate measures this machine into cluster.toml, then stretto plan "
            f"--cluster cluster.toml; or take one that is known, --cluster {names()[0]} ({', '.join(names()[1:])})"
        )
    from stretto.cli.plan_output import tell_difference
    from stretto.cli.planning import make_plan

    if output.diff is not None:
        tell_difference(output.diff, json=output.json)
    else:
        make_plan(settings, failures, output)
