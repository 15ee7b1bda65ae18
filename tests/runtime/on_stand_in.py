"""What runs in a process whose accelerator is the stand-in. What is returned has its tensors on the CPU."""

import torch
from torch import nn

import stand_in
import stretto
from runtime import replicated, scripts
from stretto.doctor import environment
from stretto.nn import devices
from stretto.nn.preserve import undisturbed
from stretto.parallel.operator.randomness import OwnStream
from stretto.runtime.process_memory import forget_most_held, most_held

DEVICE = torch.device("privateuseone")  # its name before `install`


def each(calls, link=False):
    """What functions of this file, given as (name, *args), return one after the other, and what each asked."""
    stand_in.install(link)
    results = []
    for name, *args in calls:
        stand_in.counts.clear()
        result = on_cpu(globals()[name](*args))
        results.append((result, dict(stand_in.counts)))
    return results


def on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: on_cpu(part) for key, part in value.items()}
    return type(value)(map(on_cpu, value)) if isinstance(value, tuple | list) else value


def script(name, *args, **options):
    return getattr(scripts, name)(*args, **options)


def train_all(runs):
    return scripts.train_all(runs)


def train_replicas(runs):
    return replicated.train_all(runs)


def placement():
    trainer = scripts.build("pb")
    held = [tensor for stage in trainer.stages for tensor in (*stage.parameters(), *stage.buffers())]
    return trainer.device.type, {tensor.device.type for tensor in held}, environment.accelerator()


def peak_memory():
    """Of an accelerator whose allocator does not count: unknown, and no reason to end a run."""
    forget_most_held()
    return most_held(torch.device(stand_in.NAME))


def mixtures():
    """What is said where a tensor of the host meets one of the device, or is asked for its memory."""
    here, there = torch.ones(2, device=DEVICE), torch.ones(2)
    return [refusal(lambda: here + there), refusal(lambda: torch.add(there, here)), refusal(here.numpy)]


def refusal(function):
    try:
        function()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return None


def global_generators():
    """Whether steps, an evaluation and a look at a model leave the global generators where they were."""
    trainer = scripts.build("pb")
    before = states()
    data = scripts.batches(3)
    for x, y in data:
        trainer.step(x, y)
    trainer.flush()
    kept = [same(before)]
    with undisturbed([nn.Dropout(0.5)], DEVICE):
        torch.rand(3)
        torch.rand(3, device=DEVICE)
        kept += [not same(before)]
    return [*kept, same(before)]


def states():
    return [generator.get_state() for generator in devices.generators(DEVICE)]


def same(others):
    return all(map(torch.equal, states(), others))


def streams_apart():
    """A layer for parts of a tensor draws other numbers, and leaves the common generators one number further."""
    layer, x = nn.Dropout(0.5), torch.ones(4, 8, device=DEVICE)
    apart = OwnStream(Axis(rank=1))
    torch.manual_seed(1)
    common = layer(x)
    torch.manual_seed(1)
    apart.begin(layer, (x,), {})
    own = layer(x)
    apart.end()
    after = states()
    torch.manual_seed(1)
    torch.randint(2**62, ())
    return common, own, same(after)


class Axis:
    def __init__(self, rank):
        self.rank = rank


def single_generator():
    """Of a module of torch that has functions instead of generators, as that of MPS."""
    module = torch.get_device_module(DEVICE)
    generators, module.default_generators = module.default_generators, None
    del module.default_generators
    try:
        one = devices.generator_of(DEVICE)
        one.manual_seed(3)
        state = one.get_state()
        first = torch.rand(3, device=DEVICE)
        one.set_state(state)
        return type(one).__name__, first, torch.rand(3, device=DEVICE)
    finally:
        module.default_generators = generators


def recorded():
    """How many actions a recording of two minibatches has, all waited for."""
    trainer = scripts.build("gpipe", workers=2)
    recordings = trainer.record()
    for x, y in scripts.batches(2):
        trainer.step(x, y)
    trainer.flush()
    return sum(len(recording.spans) for recording in recordings)


def split_by_time():
    stages = nn.Sequential(*scripts.stages(4)).to(DEVICE)
    parts = stretto.split(stages, 2, example=scripts.batches(1)[0][0].to(DEVICE), by="time")
    return [len(list(part.parameters())) for part in parts]


def early_reuse():
    """Pinned memory that is used again before its copy was waited for; and after that, as it should be."""
    found = []
    for wait in (lambda: None, lambda: devices.synchronize(DEVICE), devices.own_stream(DEVICE).synchronize):
        memory = devices.host_memory(4, DEVICE)
        memory.fill_(1)
        copy = torch.empty(4, dtype=torch.uint8, device=DEVICE)
        copy.copy_(memory, non_blocking=True)
        wait()
        memory.fill_(2)
        found.append(copy.tolist())
    return found


def on_a_stream():
    stream = devices.own_stream(DEVICE)
    with devices.running_on(stream):
        inside = torch.accelerator.current_stream() == stream
    return inside, devices.own_stream(devices.CPU)


def bf16():
    return scripts.train("pb", precision="bf16")


def saved(folder):
    return scripts.save_in_the_middle("pb-lwp-sc", folder)


def resumed(folder):
    return scripts.resume("pb-lwp-sc", folder)
