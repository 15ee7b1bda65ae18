"""What has to hold on an accelerator. Each check returns what it has seen, or raises."""

import math
import tempfile
from pathlib import Path

import torch
from torch import nn

import stretto
from runtime import scripts
from runtime.processes import launch
from stretto.nn import devices
from stretto.nn.preserve import undisturbed

# What accelerators and the CPU may differ by in float64, where sums are added up in another order.
TOLERANCE = 1e-9
METHODS = [
    "backprop", "greedy", "overlapping", "chunked", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream",
    "pipedream-2bw", "paci(every=2)", "pb", "pb-lwp-sc", "spectrain", "pipemare", "pipeoptim", "gpipe(recompute=True)",
]  # fmt: skip
PROCESSES = ["1f1b", "overlapping", "pb-lwp-sc", "pipedream-2bw"]


def train(method, device, steps=10, dtype=torch.float64, dropout=0.0, width=16, **options):
    """Losses and weights [on the CPU] of a run; four stages."""
    torch.manual_seed(3)
    parts = [
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3)
    ]
    stages = [part.to(dtype) for part in (*parts, nn.Linear(width, 4))]
    data = [(x.repeat(1, 2)[:, :width].to(dtype), y) for x, y in scripts.batches(steps)]
    trainer = stretto.Trainer(
        stages, nn.functional.cross_entropy, scripts.OPTIMIZERS["sgd"], method, example=data[0][0], device=device,
        **options,
    )  # fmt: skip
    losses = [trainer.step(x, y) for x, y in data] + list(trainer.flush())
    weights = trainer.gather()
    return losses, None if weights is None else {name: value.cpu() for name, value in weights.items()}


def differ(one, other):
    """The largest difference between two runs, relative to 1."""
    pairs = [(a, b) for a, b in zip(one[0], other[0], strict=True) if a is not None]
    losses = max(abs(a - b) for a, b in pairs)
    floating = [name for name, value in one[1].items() if value.is_floating_point()]
    return max(losses, *(float((one[1][name] - other[1][name]).abs().max()) for name in floating))


def placement(tiny):
    trainer = scripts.build("pb")
    kinds = {tensor.device.type for stage in trainer.stages for tensor in (*stage.parameters(), *stage.buffers())}
    assert kinds == {trainer.device.type} == {devices.accelerator()}, kinds
    return f"'auto' is {trainer.device}"


def numbers_of_the_cpu(tiny):
    """Every method, in float64."""
    differences = {}
    for method in METHODS[::6] if tiny else METHODS:
        differences[method] = differ(train(method, "auto"), train(method, "cpu"))
    worst = max(differences, key=differences.__getitem__)
    assert differences[worst] < TOLERANCE, differences
    return f"{len(differences)} methods, at most {differences[worst]:.1e} off ({worst})"


def same_numbers_twice(tiny):
    """With dropout: the device's generator is seeded for each micro-batch."""
    first, second = (train("pb", "auto", dropout=0.3) for _ in range(2))
    assert differ(first, second) == 0
    return "to the last bit"


def global_generators(tiny):
    """A step and a look at a model leave them where they were."""
    trainer = scripts.build("pb")
    generators = devices.generators(trainer.device)
    before = [generator.get_state() for generator in generators]
    for x, y in scripts.batches(2):
        trainer.step(x, y)
    with undisturbed(trainer.stages, trainer.device):
        torch.rand(3, device=trainer.device)
    assert all(torch.equal(state, g.get_state()) for state, g in zip(before, generators, strict=True))
    return f"{len(generators)} generators as they were"


def pinned_copies(tiny):
    """There and back, unchanged, without a wait of the host's in between."""
    device = devices.pick_device("auto")
    memory = devices.host_memory(1 << 20, device)
    assert tiny or memory.is_pinned()
    memory.copy_(torch.arange(1 << 20).remainder(251))
    back = memory.to(device, non_blocking=True).cpu()
    assert torch.equal(back, memory)
    return "pinned"


def streams(tiny):
    """What runs on a stream of its own is there once that has been waited for."""
    device = devices.pick_device("auto")
    stream = devices.own_stream(device)
    with devices.running_on(stream):
        made = torch.ones(1000, device=device) * 3
    stream.synchronize()
    assert made.sum().item() == 3000
    return str(stream)


def checkpoints(tiny):
    """From the device to the CPU and back, in the middle of a run with predicted weights."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = scripts.save_in_the_middle("pb-lwp-sc", Path(folder) / "device")
        there = scripts.resume("pb-lwp-sc", Path(folder) / "device", device="auto")
        assert all(torch.equal(wanted[name].cpu(), there[name].cpu()) for name in wanted)
        scripts.save_in_the_middle("pb-lwp-sc", Path(folder) / "cpu", device="cpu")
        onwards = scripts.resume("pb-lwp-sc", Path(folder) / "cpu", device="auto")
    assert all(value.device.type == devices.accelerator() for value in onwards.values())
    return "device to device to the last bit, CPU to device"


def recordings(tiny):
    trainer = scripts.build("gpipe", workers=2)
    recorded = trainer.record()
    for x, y in scripts.batches(2):
        trainer.step(x, y)
    trainer.flush()
    spans = [span for recording in recorded for span in recording.spans]
    assert spans
    assert all(span.end > span.start for span in spans)
    return f"{len(spans)} actions, each waited for"


def split_by_time(tiny):
    device = devices.pick_device("auto")
    model = nn.Sequential(*scripts.stages(4)).to(device)
    parts = stretto.split(model, 2, example=scripts.batches(1)[0][0].to(device), by="time")
    return f"{len(parts)} stages"


def low_precision(tiny):
    """bf16, and autocast where torch has it for this kind of device."""
    kinds = {}
    for precision, method in (("bf16", "pb"), ("bf16-autocast", "1f1b")):
        if precision == "bf16-autocast" and tiny:
            continue  # torch knows no casts for the stand-in
        losses, _ = train(method, "auto", dtype=torch.float32, precision=precision)
        assert all(math.isfinite(loss) for loss in losses if loss is not None)
        kinds[precision] = [loss for loss in losses if loss is not None][-1]
    return kinds


def processes_of_one_machine(tiny):
    """Two processes: through the host where they share a device, else from device to device; as emulated."""
    methods = PROCESSES[-1:] if tiny else PROCESSES
    told = launch(2, "gpu.checks:in_a_process", methods, tiny, timeout=600, fresh=0 if tiny else 2)
    for number, method in enumerate(methods):
        emulated = train(method, "auto", workers=2)
        difference = differ(told[0][0][number], emulated)
        assert difference < TOLERANCE, (method, difference)
    return f"{len(methods)} methods, {told[0][1]} and {told[1][1]}, values by {told[0][2] or 'the host'}"


def in_a_process(methods, tiny):
    if tiny:
        import stand_in

        stand_in.install(link=True)
    runs = [train(method, "auto") for method in methods]
    device = scripts.build("pb").device
    direct = torch.accelerator.device_count() > 1 or tiny
    return runs, str(device), devices.direct_backend(device) if direct else None


CHECKS = [
    placement, numbers_of_the_cpu, same_numbers_twice, global_generators, pinned_copies, streams, checkpoints,
    recordings, split_by_time, low_precision, processes_of_one_machine,
]  # fmt: skip
