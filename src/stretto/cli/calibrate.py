"""stretto calibrate: measure this machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stretto.cli.output import aligned, print_json, write, writing_to
from stretto.errors import UsageError
from stretto.settings.command_line import FLAG, WHOLE, WHOLES
from stretto.system.destinations import check_file, check_folder

if TYPE_CHECKING:
    from stretto.collectives import Calibration
    from stretto.collectives.pricing import ComparedTime
    from stretto.cost import Cluster, Link
    from stretto.cost.collective import Collective
    from stretto.measure.machine_calibration import Findings
    from stretto.measure.overhead import Overhead

OUT = Path("cluster.toml")
HOMELESS = "it cannot be kept, as this user has no home folder"
NAMED = "give --out FILE, and name it in all-reduce(algorithm=auto, calibration='FILE')"
SIZES = tuple(1 << exponent for exponent in range(10, 27, 2))  # 1 KB to 64 MB


def calibrate(
    *,
    collectives: Annotated[bool, FLAG] = False,
    quick: Annotated[bool, FLAG] = False,
    workers: Annotated[int | None, WHOLE] = None,
    sizes: Annotated[tuple[int, ...], WHOLES] = SIZES,
    per_node: Annotated[int | None, WHOLE] = None,
    out: Path | None = None,
    json: Annotated[bool, FLAG] = False,
    quiet: Annotated[bool, FLAG] = False,
) -> None:
    """Measure this machine, and write it down as a cluster that stretto plan takes.

    What layers of every sort take, forward and backward, alone and while others compute; steps of optimizers; copies;
    messages and additions. Starts the processes itself, of one thread each, or measures among those that torchrun or
    srun has started.

    Parameters
    ----------
    collectives
        Measure all-reduces instead: every algorithm, torch's own, and a message's latency and time a byte.
    quick
        Fewer and smaller layers, fewer repeats: some seconds instead of two to three minutes.
    workers
        Number of processes to start; 2 unless said otherwise, but with --collectives.
    sizes
        With --collectives, bytes of the tensors: 1024,65536. From 1 KB to 64 MB unless said otherwise.
    per_node
        With --collectives, how many consecutive processes the hierarchical algorithm takes for one node.
    out
        TOML file for the result, cluster.toml unless said otherwise. With --collectives the result is kept in the
        user's cache folder, where all-reduce(algorithm=auto) finds it, and written to this file if it is given.
    json
        Print one JSON object on stdout, nothing else.
    quiet
        No progress, no table.
    """
    from stretto.runtime.world import place_in_job

    rank, launched = place_in_job()
    silent = quiet or json or rank > 0
    if collectives:
        if out is None:
            check_kept()
        result = all_reduces(sizes, per_node, workers, launched=launched, silent=silent)
        if result is not None:
            tell_collectives(result, out, json=json, quiet=quiet)
        return
    only_with_collectives(sizes, per_node)
    check_file(out or OUT)
    findings = machine(workers if workers is not None or launched > 1 else 2, launched, quick=quick, silent=silent)
    if findings is not None:  # those of all processes, on the first one
        tell_machine(findings, out or OUT, json=json, quiet=quiet)


def check_kept() -> None:
    """Raise UsageError where measurements of all-reduces can be kept nowhere but in a file that is named."""
    from stretto.collectives.stored_calibration import folder

    kept = folder()
    if kept is None:
        raise UsageError(f"{HOMELESS}: {NAMED}")
    check_folder(kept, f"place: {NAMED}")


def only_with_collectives(sizes: Sequence[int], per_node: int | None) -> None:
    """Raise UsageError for options that count for all-reduces only."""
    for name, chosen in (("sizes", sizes != SIZES), ("per_node", per_node is not None)):
        if chosen:
            raise UsageError(f"{name} is for --collectives: add it, or leave {name} out")


def machine(workers: int | None, launched: int, *, quick: bool, silent: bool) -> "Findings | None":
    """Measure layers and messages, on `workers` new processes or among those `launched`; None but on the first one."""
    check((), None, workers, launched)
    from stretto.measure.busy_cores import busy_cores
    from stretto.measure.machine_calibration import Findings, steps_of
    from stretto.trainer.progress import progress

    options = {"quick": quick, "load": busy_cores() or 0.0}
    with progress("calibrate", steps_of(quick), silent=silent) as bar:
        try:
            content = measured("machine", options, None if launched > 1 else workers, lambda _: bar.advance(1))
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; nothing has been written") from None
    if content is None or launched > 1:
        return None if content is None else Findings.of(content)
    return replace(Findings.of(content), alone=overhead_alone())


def overhead_alone() -> "Overhead":
    """What training in one process of one thread takes besides computing, measured in this one."""
    import torch

    from stretto.measure.overhead import measure_overhead_alone

    torch.set_num_threads(1)
    return measure_overhead_alone()


def tell_machine(findings: "Findings", out: Path, *, json: bool, quiet: bool) -> None:
    """Write the cluster's file and print its rates and links."""
    from stretto.cost.cluster_file import to_dict, write_cluster
    from stretto.measure.machine_calibration import cluster_of

    cluster = cluster_of(findings)
    with writing_to(out):
        write_cluster(cluster, out)
    if json:
        print_json({"out": str(out), "noise": findings.noise, "load": findings.load, "cluster": to_dict(cluster)})
    elif not quiet:
        doubts = [f"doubtful: {doubt}; measure again while nothing else runs" for doubt in cluster.doubts]
        speeds = [cluster.sources["groups.speeds"]] if "groups.speeds" in cluster.sources else []
        how = [cluster.sources["devices.cpu"], *speeds, *doubts]
        print("\n".join([cluster_in_words(cluster), "", *how, f"written to {out}"]))


def cluster_in_words(cluster: "Cluster") -> str:
    """A table of the first device's rates, one line for each kind of layer and pass, and the links below it."""
    from stretto.report.units import bytes_held, duration, flops, number, percent

    device = cluster.device(0)
    lines: list[tuple[str, ...]] = [("layers", "pass", "t0 a call", "FLOP/s", "bytes/s", "beside others", "residual")]
    for operator, passes in device.rates.items():
        for direction, rate in passes.items():
            speed = flops(1 / rate.per_flop) if rate.per_flop else ""
            moved = bytes_held(1 / rate.per_byte) if rate.per_byte else ""
            others = f"{number(rate.contention)}x"
            cells = (duration(rate.per_call), speed, moved, others, percent(rate.residual))
            lines.append((operator, direction, *cells))
    links = [
        f"messages {name} nodes: alpha {duration(link.latency)}, beta {duration(1e6 * link.seconds_per_byte)} a MB, "
        f"residual {percent(link.residual)}"
        for name, link in cluster.links.items()
    ]
    links += [busy_in_words(name, link) for name, link in cluster.links.items() if link.travel is not None]
    links += [
        collective_in_words(kind, collective)
        for link in cluster.links.values()
        for kind, collective in link.collectives.items()
    ]
    gamma = f"additions: gamma {duration(1e6 * device.reduction_seconds_per_byte)} a MB"
    peak = f"fastest layer: {flops(device.peak_of('float32'))}/s, copies {bytes_held(device.memory_bandwidth)}/s"
    runtime = f"the runtime: {duration(device.per_action)} an action, {duration(device.per_step)} a step"
    if device.alone_per_action is not None and device.alone_per_step is not None:
        alone = f"{duration(device.alone_per_action)} an action, {duration(device.alone_per_step)} a step"
        runtime = f"{runtime}; in one process {alone}"
    return "\n".join([aligned(lines), "", peak, *links, gamma, runtime])


def collective_in_words(kind: str, collective: "Collective") -> str:
    """The seconds of a collective between work, for a call, a tensor and a megabyte."""
    from stretto.report.units import duration, percent

    tensor = f" + {duration(collective.per_tensor)} a tensor" if collective.per_tensor else ""
    return (
        f"{kind} among {collective.processes} at work: {duration(collective.per_call)}{tensor} + "
        f"{duration(1e6 * collective.per_byte)} a MB, residual {percent(collective.residual)}"
    )


def busy_in_words(name: str, link: "Link") -> str:
    """The seconds that a message takes of its sender, of its receiver and on its way, while both compute."""
    from stretto.report.units import duration

    lines = {
        "its sender": (link.send, link.send_per_byte),
        "its receiver": (link.receive, link.receive_per_byte),
        "its way": link.transit,
    }
    parts = (f"{where} {duration(t0)} + {duration(1e6 * t1)} a MB" for where, (t0, t1) in lines.items())
    return f"messages {name} nodes while both compute: {', '.join(parts)}"


def all_reduces(
    sizes: Sequence[int], per_node: int | None, workers: int | None, *, launched: int, silent: bool
) -> "Calibration | None":
    """Measure all-reduces; None but on the first process."""
    from stretto.collectives.calibration import Calibration
    from stretto.measure.all_reduce import steps_of
    from stretto.trainer.progress import progress

    check(sizes, per_node, workers, launched)
    options = {"sizes": list(sizes), "per_node": per_node}
    with progress("all-reduce", steps_of(sizes), silent=silent) as bar:
        content = measured("collectives", options, None if launched > 1 else workers, lambda _: bar.advance(1))
    return None if content is None else Calibration.of(content)


def tell_collectives(result: "Calibration", out: Path | None, *, json: bool, quiet: bool) -> None:
    """Write, store and print what was measured. Raises UsageError if it can be neither written nor stored."""
    from stretto.collectives.pricing import compared

    rows = compared(result)
    if out is not None:
        write(out, result.to_toml())
    file, trouble = keep(result)
    if file is None and out is None:
        raise UsageError(f"{trouble}: {NAMED}")
    if json:
        measurements = result.to_dict() | {"all_reduce": [row.to_json() for row in rows], "fastest": fastest(result)}
        print_json(measurements | {"out": out and str(out), "kept": file and str(file)})
    elif not quiet:
        print(in_words(result, rows))
        if out is not None:
            print(f"written to {out}")
        print(f"kept in {file}, where all-reduce(algorithm=auto) finds it" if file else trouble)


def keep(result: "Calibration") -> tuple[Path | None, str]:
    """Store the measurements in the user's cache folder: the file; or None, and why they cannot be stored."""
    from stretto.collectives.stored_calibration import keep as write_down

    try:
        file = write_down(result)
    except OSError as error:
        return None, f"cannot keep it in {error.filename}: {error.strerror}"
    return file, HOMELESS if file is None else ""


def check(sizes: Sequence[int], per_node: int | None, workers: int | None, launched: int) -> None:
    """Raise UsageError for what cannot be measured."""
    from stretto.collectives.library.ring import nodes_of

    number = launched if launched > 1 else workers
    if launched > 1 and workers not in (None, launched):
        raise UsageError(f"workers={workers}, but {launched} processes have been started: leave workers out")
    if number is None or number < 2:
        raise UsageError(f"workers={number}: messages take two processes or more; give --workers 2")
    if bad := [size for size in sizes if size < 4 or size % 4]:
        raise UsageError(f"sizes={bad[0]}: choose bytes of whole float32 numbers, multiples of 4")
    nodes_of(number, per_node)


def measured(
    what: str, options: Mapping[str, Any], workers: int | None, on_step: Callable[[int], None]
) -> dict[str, Any] | None:
    """Measure on `workers` new processes; if None, among those of a launcher.

    `what` is machine or collectives. None but on the first process.
    """
    from stretto.runtime.launch import LaunchSettings
    from stretto.study import calibration_processes

    function = calibration_processes.machine if what == "machine" else calibration_processes.collectives
    if workers is None:
        return calibration_processes.measure_here(function, options, on_step)
    return calibration_processes.measure_on_processes(function, options, LaunchSettings(workers=workers), on_step)


def fastest(result: "Calibration") -> dict[str, str]:
    """The fastest algorithm for each size of a tensor, in bytes."""
    return {str(row.bytes): row.fastest for row in result.measured}


def in_words(result: "Calibration", rows: "Sequence[ComparedTime]") -> str:
    """The table of measured and predicted times, and the three constants that were fitted."""
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
