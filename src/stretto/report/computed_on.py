"""Where the runs of a study were computed: on which devices, with how many threads."""

from collections import Counter
from collections.abc import Sequence

from stretto.report.record import Record


def computed_on(records: Sequence[Record]) -> dict[str, int]:
    """The number of runs by device and threads, as {"cpu, 1 thread": 8}; without runs that do not say."""
    told = [record for record in records if record.device is not None]
    return dict(Counter(f"{run.device}, {run.threads} thread{'' if run.threads == 1 else 's'}" for run in told))


def several_devices(records: Sequence[Record]) -> str:
    """A sentence for runs that were not all computed alike; empty for those that were."""
    places = computed_on(records)
    if len(places) < 2:
        return ""
    listed = "; ".join(f"{count} on {place}" for place, count in places.items())
    return f"Runs were not all computed alike: {listed}. Do not compare their seconds."
