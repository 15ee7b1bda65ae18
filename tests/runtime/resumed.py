"""Scripts whose replicas stop half-way and go on, and know nothing of processes."""

import os

import torch
from torch import nn

import stretto
from runtime.scripts import weights_of

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "muon": lambda params, labels: stretto.optim.muon(params, lr=0.01, labels=labels),
}
WIDTH = 16


def stages(number):
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(2 * rank >= size > 1)  # the other replica begins with other weights, which do not count
    hidden = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.1))
        for _ in range(number - 1)
    ]
    return [stage.double() for stage in (*hidden, nn.Linear(WIDTH, 4))]


def batches(number):
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(24, WIDTH, generator=generator).double(), torch.randint(4, (24,), generator=generator))
        for _ in range(number)
    ]


def build(method, sync, *, optimizer="adamw", mesh=None, **options):
    return stretto.Trainer(
        stages(2), nn.functional.cross_entropy, OPTIMIZERS[optimizer], method, example=batches(1)[0][0],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        mesh=mesh or stretto.Mesh(data=2), sync=sync, **options,
    )  # fmt: skip


def own(trainer):
    """What each replica has here, replica by replica and stage by stage."""
    parts = ("module", "optimizer", "scheduler")
    return {
        (replica, index): {
            name: plain(getattr(stage, name).state_dict()) for name in parts if getattr(stage, name) is not None
        }
        for replica, stages in zip(trainer.backend.replicas, trainer._replicas, strict=True)
        for index, stage in stages.items()
    }


def plain(state):
    """Lists and dicts of numbers: shares as this process has them."""
    if isinstance(state, torch.Tensor):
        return (state.to_local() if hasattr(state, "to_local") else state).tolist()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(value) for value in state] if isinstance(state, list | tuple) else state


def train(trainer, data):
    """What comes of further steps: losses, what replicas have before a flush and after it, weights, order."""
    losses = [trainer.step(x, y) for x, y in data]
    apart = own(trainer)
    return losses, apart, trainer.flush(), own(trainer), plain(weights_of(trainer)), trainer.order()


def through(case, before, after):
    """The steps `before`, a flush in place of a checkpoint, the steps `after`."""
    trainer, data = build(**case), batches(before + after)
    for x, y in data[:before]:
        trainer.step(x, y)
    trainer.flush()
    return train(trainer, data[before:])


def half(case, before, folder):
    """The steps `before`, and a checkpoint of them."""
    trainer = build(**case)
    for x, y in batches(before):
        trainer.step(x, y)
    trainer.save(folder)


def rest(case, before, after, folder):
    """The steps `after` that checkpoint."""
    trainer = build(**case)
    trainer.load(folder)
    return train(trainer, batches(before + after)[before:])


def all_of(cases, folder):
    """Each case without interruption, from a checkpoint of the same processes, and from one that stands there."""
    told = {}
    for name, (case, before, after) in cases.items():
        half(case, before, f"{folder}/{name}")
        told[name] = {
            "through": through(case, before, after),
            "own": rest(case, before, after, f"{folder}/{name}"),
            "emulated": rest(case, before, after, f"{folder}/emulated-{name}") if emulated(case) else None,
        }
    return told


def emulated(case):
    """Whether one process comes to the same numbers by itself."""
    return "powersgd" not in case["sync"] and "mesh" not in case


def served(case, before, after, folder, order=None):
    """A run on a parameter server that is saved half-way, and what comes of its rest."""
    trainer, data = build(**case, sync=stretto.ParameterServer(order=order)), batches(before + after)
    for x, y in data[:before]:
        trainer.step(x, y)
    trainer.save(folder)
    return train(trainer, data[before:])


def served_again(case, before, after, folder, order):
    """That rest from the checkpoint, in the order of a run that was not interrupted."""
    return rest({**case, "sync": stretto.ParameterServer(order=order)}, before, after, folder)
