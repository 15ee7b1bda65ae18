"""Training scripts that know nothing of processes."""

import contextlib
import math
import os
import random
import time
from functools import partial
from unittest import mock

import torch
from torch import nn

import stretto

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "muon": partial(stretto.optim.muon, lr=0.01),
    "soap": partial(stretto.optim.SOAP, lr=0.01, every=3),
    "lion": partial(stretto.optim.Lion, lr=0.003),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def stages(number, width=8):
    torch.manual_seed(3)
    made = [
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.1))
        for _ in range(number - 1)
    ]
    return [*made, nn.Linear(width, 4)]


def batches(number, size=14, width=8):
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(size, width, generator=generator), torch.randint(4, (size,), generator=generator))
        for _ in range(number)
    ]


def build(method, number=4, *, optimizer=None, **options):
    optimizer = optimizer or ("nadam" if method.startswith("nesterov") else "adamw" if "rotate" in method else "sgd")
    data = batches(1)
    return stretto.Trainer(
        stages(number), nn.functional.cross_entropy, OPTIMIZERS[optimizer], method, example=data[0][0], **options
    )


def train(method, number=4, steps=12, flush_at=7, **options):
    """Losses, weights and evaluation of a run that flushes in its middle."""
    data = [*batches(steps - 1), *batches(1, size=13)]  # the last one is short
    trainer = build(method, number, **options)
    losses = []
    for n, (x, y) in enumerate(data):
        losses.append(trainer.step(x, y))
        if n == flush_at:
            losses.append(trainer.flush())
    losses.append(trainer.flush())
    return losses, weights_of(trainer), trainer.evaluate(data[:3])


def as_tasks_of_srun(method):
    """What `train` gives where srun tells a process its place in the job."""
    rank = os.environ.pop("RANK")
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    os.environ.update(SLURM_STEP_NUM_TASKS="2", SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_STEP_NODELIST="localhost")
    return train(method)


def predicted(method, precision=None, **options):
    """Outputs after some steps, the last ones under way; then what the trainer says of itself."""
    trainer = build(method, precision=precision, clip=math.inf, **options)
    data = batches(6)
    for x, y in data:
        trainer.step(x, y)
    outputs = trainer.predict(x for x, _ in data)
    trainer.flush()
    norms = trainer.grad_norms()
    try:
        norm = trainer.grad_norm
    except stretto.UsageError as error:
        norm = str(error)
    return outputs, trainer.updates, trainer.lr, repr(trainer), norms, norm


def weights_of(trainer):
    gathered = trainer.gather()
    return None if gathered is None else {key: value.clone() for key, value in gathered.items()}


def same(weights, others):
    return weights.keys() == others.keys() and all(torch.equal(weights[key], others[key]) for key in weights)


def train_all(runs, jitter=None):
    """What `train` gives for each of several (method, options), in the same processes."""
    with slowed(jitter) if jitter is not None else contextlib.nullcontext():
        return [train(method, **options) for method, options in runs]


@contextlib.contextmanager
def slowed(seed):
    """Actions and messages take a random time longer, another one in each process."""
    from stretto.runtime.channel import Inbox, Outbox
    from stretto.stage.stage import Stage

    draw = random.Random(f"{seed} {os.environ.get('RANK')}")
    former = Stage.run, Outbox.send, Inbox.receive

    def late(function):
        def call(*args, **kwargs):
            if draw.random() < 0.3:
                time.sleep(draw.random() * 0.003)  # several times what an action takes
            return function(*args, **kwargs)

        return call

    Stage.run, Outbox.send, Inbox.receive = map(late, former)
    try:
        yield
    finally:
        Stage.run, Outbox.send, Inbox.receive = former


def save_in_the_middle(method, folder, **options):
    return saved_half_way(build(method, **options), batches(12), folder)


def resume(method, folder, **options):
    return gone_on(build(method, **options), batches(12), folder)


def save_all(runs, folder):
    """`save_in_the_middle` of several (method, options), in the same processes."""
    return [save_in_the_middle(method, f"{folder}/{i}", **options) for i, (method, options) in enumerate(runs)]


def resume_all(runs, folder):
    """`resume` of what `save_all` saved."""
    return [resume(method, f"{folder}/{i}", **options) for i, (method, options) in enumerate(runs)]


def saved_half_way(trainer, data, folder):
    """Half of the steps, a checkpoint, the other half."""
    half = len(data) // 2
    for x, y in data[:half]:
        trainer.step(x, y)
    trainer.save(folder, extra={"step": half})
    for x, y in data[half:]:
        trainer.step(x, y)
    trainer.flush()
    return weights_of(trainer)


def gone_on(trainer, data, folder):
    """The other half, from the checkpoint."""
    for x, y in data[trainer.load(folder)["step"] :]:
        trainer.step(x, y)
    trainer.flush()
    return weights_of(trainer)


def tied(method, clip=None, data=1, **options):
    """An embedding on the first stage that is the unembedding on the last, which has no weights of its own; float64."""
    torch.manual_seed(5)
    embedding, out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    out.weight = embedding.weight
    parts = [embedding, nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), out]
    generator = torch.Generator().manual_seed(2)
    words = [torch.randint(11, (6,), generator=generator) for _ in range(10)]
    trainer = stretto.Trainer(
        [part.double() for part in parts], nn.functional.cross_entropy, OPTIMIZERS["sgd"], method, clip=clip,
        mesh=stretto.Mesh(data=data), example=words[0], **options,
    )  # fmt: skip
    losses = [trainer.step(x, x.roll(1)) for x in words[:5]]
    evaluated = trainer.evaluate([(words[0], words[1])])  # while versions are under way
    trainer.flush()
    losses += [trainer.step(x, x.roll(1)) for x in words[5:]]
    return losses, trainer.flush(), evaluated, weights_of(trainer)


def shapes_that_change(method, **options):
    """Sequences of another length in each minibatch, and two tensors between stages."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, skip=None):
            made = torch.tanh(self.linear(x))
            return made.transpose(1, 2).contiguous().transpose(1, 2), (x if skip is None else skip)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x, skip):
            return self.linear(x + skip).flatten(0, 1)

    torch.manual_seed(1)
    parts = [Two(), Two(), Two(), Last()]
    trainer = stretto.Trainer(parts, nn.functional.cross_entropy, OPTIMIZERS["sgd"], method, **options)
    generator = torch.Generator().manual_seed(4)
    losses = []
    for n in range(10):
        length = 3 + n % 4
        x = torch.randn(4, length, 8, generator=generator)
        losses.append(trainer.step(x, torch.randint(4, (4 * length,), generator=generator)))
    return losses, trainer.flush(), weights_of(trainer)


def built_where_they_live(method, **options):
    """Which stages were built here, and what came of the training."""
    built = []

    def maker(index):
        def make():
            built.append(index)
            return nn.Sequential(nn.Linear(8, 8), nn.Tanh()) if index < 3 else nn.Linear(8, 4)

        return make

    data = batches(6)
    trainer = stretto.Trainer(
        [maker(i) for i in range(4)], nn.functional.cross_entropy, OPTIMIZERS["sgd"], method,
        example=data[0][0], **options,
    )  # fmt: skip
    for x, y in data:
        trainer.step(x, y)
    trainer.flush()
    return built, weights_of(trainer)


def parted_data(method, **options):
    """Each process passes only what it reads. The last of what it gives is the pace of the slowest process.

    A process takes a second more than the one before it.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    trainer = build(method, **options)
    losses = [trainer.step(x if rank == 0 else None, y if rank == size - 1 else None) for x, y in batches(6)]
    return losses, trainer.flush(), weights_of(trainer), trainer.backend.all_reduce_max([1.0 + rank])[0]


def recorded(method):
    """The recording of this process's worker, as text."""
    trainer = build(method)
    recordings = trainer.record()
    for x, y in batches(6):
        trainer.step(x, y)
    trainer.flush()
    return [(each.spans, each.sends, each.receipts, each.counts) for each in recordings]


def loaded_in_flight(method, folder, **options):
    """Losses of a run that goes back to its third step while later ones are in flight."""
    trainer, data = build(method, **options), batches(12)
    for x, y in data[:3]:
        trainer.step(x, y)
    trainer.save(folder)
    for x, y in data[3:8]:
        trainer.step(x, y)
    trainer.load(folder)
    losses = [trainer.step(x, y) for x, y in data[3:]]
    return [*losses, trainer.flush()], weights_of(trainer)


def between_devices(function, *args):
    """Call a function here with values that go as between devices, through gloo."""
    from stretto.trainer import distributed

    with mock.patch.object(distributed, "backend_between", return_value="gloo"):
        return globals()[function](*args)


def read_only(method, tied=False, **options):
    """Stages of a language model read weights of others: of the last one's unembedding, or of the one behind them."""
    torch.manual_seed(5)
    parts = [nn.Embedding(11, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5))]
    parts.append(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 11, bias=False)))
    if tied:
        parts[-1][2].weight = parts[0].weight
    generator = torch.Generator().manual_seed(2)
    words = [torch.randint(11, (3, 6), generator=generator) for _ in range(10)]

    loss = stretto.losses.token_cross_entropy
    trainer = stretto.Trainer(parts, loss, OPTIMIZERS["sgd"], method, example=words[0], **options)
    losses = [trainer.step(x, x.roll(1, 1)) for x in words[:5]]
    evaluated = [trainer.evaluate([(words[0], words[1])])]  # while versions are under way
    trainer.flush()
    for x in words[5:]:
        losses.append(trainer.step(x, x.roll(1, 1)))
        evaluated.append(trainer.evaluate([(x, words[1])]))  # in lockstep: what is not needed yet has to wait
    return losses, trainer.flush(), evaluated, weights_of(trainer)


def shared_norm():
    """What three steps end with where stages on two processes have one table, and where they have one batch norm."""
    said = []
    for shared in (Scaled(), nn.BatchNorm1d(8)):
        made = [nn.Sequential(nn.Linear(8, 8), shared), nn.Sequential(shared, nn.Linear(8, 4))]
        trainer = stretto.Trainer(made, nn.functional.cross_entropy, OPTIMIZERS["sgd"])
        try:
            for x, y in batches(3):
                trainer.step(x, y)
            said.append("trained")
        except stretto.UsageError as error:
            said.append(f"{error}")
    return said


class Scaled(nn.Module):
    """Multiplies by a buffer that nothing changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.full((8,), 2.0))

    def forward(self, x):
        return x * self.factor
