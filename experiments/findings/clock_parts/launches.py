"""What is launched for study 5: every way on two and four processes, over every link."""

from harness.launches import Launch, interleaved

from clock_parts.settings import AVERAGED_EVERY, LINKS, PROCESSES, SETTINGS, Chosen, Links, Setting, parameters

THREADS, DDP = "one process", "DistributedDataParallel"
AVERAGED = "local SGD"
MICROBATCHES = 2  # of 1f1b and zb-h1: in a pilot the fastest of 2, 4 and 8, in both settings, on two and four processes
PIPELINES = ("1f1b", "zb-h1")
SYNCHRONOUS = (THREADS, DDP, *PIPELINES)


def letters(methods: Chosen) -> list[str]:
    """The settings that have methods."""
    return [letter for letter in SETTINGS if all(letter in own for own in methods.values())]


def ways(methods: Chosen, letter: str, processes: int) -> dict[str, str]:
    """A setting's ways by name: the method with its options, or the name itself for what is torch's own."""
    torchs = {name: name for name in (THREADS, DDP)}
    pipelines = {name: f"{name}(microbatches={MICROBATCHES})" for name in PIPELINES}
    return {**torchs, **pipelines, **{kind: own[letter][processes] for kind, own in methods.items()}}


def launch(methods: Chosen, letter: str, way: str, processes: int, link: int | None) -> Launch:
    """One way in one place. The single process has as many threads, and no link."""
    method = ways(methods, letter, processes)[way]
    settings = {"letter": letter, "method": method}
    if way == THREADS:
        return Launch(
            f"{letter}, {way}, {processes} threads", "clock_parts.tasks:threads", 1,
            settings={"letter": letter, "threads": processes}, pinned=False,
        )  # fmt: skip
    name = f"{letter}, {way}" if way in SYNCHRONOUS else f"{letter}, {way}, {method}"
    task = "clock_parts.tasks:replicas" if way == DDP else "clock_parts.tasks:pipeline"
    settings = {"letter": letter} if way == DDP else settings
    return Launch(name, task, processes, link, settings, sent=sent(SETTINGS[letter], way, processes))


def sent(setting: Setting, way: str, processes: int) -> float:
    """The most bytes that a process sends a step: gradients in a ring, or a stage's activations and their gradients."""
    around = 4 * 2 * (processes - 1) / processes * parameters(setting)
    if way == DDP:
        return around
    if way == AVERAGED:
        return around / AVERAGED_EVERY
    both = 2 if processes > 2 else 1  # a stage in the middle may send upwards and downwards
    return 4 * both * setting.activations


def launches(methods: Chosen, links: Links = LINKS) -> tuple[Launch, ...]:
    """All of them, in turns."""
    return interleaved(
        [
            launch(methods, letter, way, processes, link)
            for letter in letters(methods)
            for processes in PROCESSES
            for link in links
            for way in ways(methods, letter, processes)
            if way != THREADS or link is None
        ]
    )
