"""stretto calibrate: measure this machine."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stretto.cli.output import FLAG, aligned, print_json, write
from stretto.cli.progress import progress
from stretto.words import WHOLE, WHOLES

if TYPE_CHECKING:
    from stretto.collectives import Calibration
    from stretto.collectives.comparison import Row

SIZES = tuple(1 << exponent for exponent in range(10, 27, 2))  # 1 KB to 64 MB


def calibrate(
    *,
    collectives: Annotated[bool, FLAG] = False,
    workers: Annotated[int | None, WHOLE] = None,
    sizes: Annotated[tuple[int, ...], WHOLES] = SIZES,
    per_node: Annotated[int | None, WHOLE] = None,
    out: Path | None = None,
    json: Annotated[bool, FLAG] = False,
    quiet: Annotated[bool, FLAG] = False,
) -> None:
    """Measure what messages and all-reduces take between processes, beside what formulas say.

    Starts the processes itself, of one thread each, or measures among those that torchrun or srun has started.

    Parameters
    ----------
    collectives
        Measure all-reduces: every algorithm, torch's own, and a message's latency and time a byte.
    workers
        Number of processes to start.
    sizes
        Bytes of the tensors: 1024,65536. From 1 KB to 64 MB unless said otherwise.
    per_node
        How many consecutive processes the hierarchical algorithm takes for one node.
    out
        TOML file for the result, which all_reduce(..., algorithm="auto", calibration=Calibration.read(FILE)) uses.
    json
        Print one JSON object on stdout, nothing else.
    quiet
        No progress, no table.
    """
    from stretto.collectives.comparison import compared
    from stretto.collectives.measure import steps_of
    from stretto.errors import UsageError
    from stretto.runtime.world import place_in_job

    if not collectives:
        raise UsageError("say what to measure: --collectives")
    rank, launched = place_in_job()
    check(sizes, per_node, workers, launched)
    with progress("all-reduce", steps_of(sizes), silent=quiet or json or rank > 0) as bar:
        result = measured(sizes, per_node, None if launched > 1 else workers, lambda _: bar.advance(1))
    if result is None:
        return  # the first process tells it
    rows = compared(result)
    if out is not None:
        write(out, result.to_toml())
    if json:
        told = result.to_dict() | {"all_reduce": [row.to_json() for row in rows], "fastest": fastest(result)}
        print_json(told | {"out": None if out is None else str(out)})
    elif not quiet:
        print(in_words(result, rows))
        if out is not None:
            print(f"written to {out}")


def check(sizes: Sequence[int], per_node: int | None, workers: int | None, launched: int) -> None:
    """Raise UsageError for what cannot be measured."""
    from stretto.collectives.library.hierarchical import nodes_of
    from stretto.errors import UsageError

    number = launched if launched > 1 else workers
    if launched > 1 and workers not in (None, launched):
        raise UsageError(f"workers={workers}, but {launched} processes have been started: leave workers out")
    if number is None or number < 2:
        raise UsageError(f"workers={number}: messages take two processes or more; give --workers 2")
    if bad := [size for size in sizes if size < 4 or size % 4]:
        raise UsageError(f"sizes={bad[0]}: choose bytes of whole float32 numbers, multiples of 4")
    nodes_of(number, per_node)


def measured(
    sizes: Sequence[int], per_node: int | None, workers: int | None, on_step: Callable[[int], None]
) -> "Calibration | None":
    """Measure on processes of its own, or among those that are there already."""
    from stretto.runtime.launch import Place
    from stretto.study.calibration import calibrate_on_processes, measure_here

    if workers is None:
        return measure_here(sizes, per_node, on_step)
    return calibrate_on_processes(Place(workers=workers), sizes, per_node, on_step)


def fastest(result: "Calibration") -> dict[str, str]:
    """The algorithm for each size, by its bytes."""
    return {str(row.bytes): row.fastest for row in result.measured}


def in_words(result: "Calibration", rows: "Sequence[Row]") -> str:
    """The table, and what was fitted."""
    from stretto.report.units import bytes_held, duration, number

    lines: list[tuple[str, ...]] = [("tensor", "algorithm", "measured", "messages", "sent", "predicted", "ratio", "")]
    for row in rows:
        cells = [bytes_held(row.bytes), row.algorithm, duration(row.seconds)]
        if row.predicted is None:  # torch's own
            cells += [""] * 4
        else:
            cells += [str(row.messages), bytes_held(row.sent or 0), duration(row.predicted), number(row.ratio)]
        lines.append((*cells, "fastest" if row.fastest else ""))
    alpha, beta, gamma = result.link.latency, result.link.seconds_per_byte, result.link.reduction_seconds_per_byte
    return (
        f"{aligned(lines)}\n\n"
        f"{result.workers} workers: alpha {duration(alpha)} a message, beta {duration(1e6 * beta)} a MB of it, "
        f"gamma {duration(1e6 * gamma)} to add a MB.\n"
        "Messages and bytes are those of the process that sends most; predicted is the formula with these three. It\n"
        "takes it that a process sends and receives at the same time: where both share a core, the ratio is above 1."
    )
