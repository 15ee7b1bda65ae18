"""Random configurations on two to four real processes, against emulation of the same on one: equal to the last bit.

Processes are started once and train one case after the other (`runtime.worlds`). What processes may add up in
another order than one process (`Mesh(tensor=2)`, three replicas, torch's FSDP2) is compared to 1e-9.
"""

import math
import random
import tempfile
import warnings
from functools import partial

import torch

import stretto
from attack.protocol import Outcome
from attack.reference import choices, networks
from runtime import worlds

SHARE = 4
LIMIT = 300.0
STEPS = 9


class Case:
    """What a seed stands for."""

    def __init__(self, seed):
        draw = self.draw = random.Random(f"processes {seed}")
        self.seed = seed
        self.processes = draw.choice([2, 2, 2, 2, 3, 4, 4])
        self.data, self.tensor = draw.choice(
            {
                2: [(1, 1), (1, 1), (2, 1), (1, 2)],
                3: [(1, 1), (1, 1), (3, 1)],
                4: [(1, 1), (2, 1), (2, 1), (1, 2), (4, 1)],
            }[self.processes]
        )
        self.workers = self.processes // (self.data * self.tensor)
        self.stages = draw.randint(self.workers, self.workers + 2)
        while True:
            self.name, self.method, self.definition, wanted = choices.method(draw, self.stages, STEPS)
            if wanted not in (None, self.workers):
                continue
            try:
                stretto.method(self.method).plan(self.stages, self.workers)
            except stretto.UsageError:
                continue
            break
        self.local = self.name in choices.LOCAL
        kind = draw.choice(["mlp", "cnn", "transformer"])
        padded = {"padded": draw.random() < 0.5} if kind == "transformer" else {}
        self.network = getattr(networks, kind)(draw, self.stages, **padded)
        self.network.shortest[0] = 1
        if self.local:
            self.network.tied = {}
        if draw.random() < 0.2:
            networks.freeze(draw, self.network)
        if draw.random() < 0.4 and self.tensor == 1:
            networks.drop_out(draw, self.network)
        self.told, self.optimizer, _ = choices.optimizer(draw, self.definition, self.name)
        self.scheduler = choices.scheduler(draw)
        if self.tensor > 1 and self.told.startswith("LA"):  # these need the norms of whole layers
            self.told, self.optimizer = "SGD", partial(torch.optim.SGD, lr=0.01, momentum=0.9)
        self.clip = draw.choice([None, None, 0.05, 0.5])
        self.sync = self.draw_sync()
        self.precision = draw.choice([None, None, None, "bf16"]) if self.tensor == 1 else None
        if self.precision and (self.sync == "fully-shard" or not bare(self.told)):
            self.precision = None
        self.dtype = torch.float64 if self.precision is None and draw.random() < 0.7 else torch.float32
        self.batch_seed = draw.randrange(1 << 30)
        self.events = [draw.random() for _ in range(STEPS)]
        least = self.pieces() * self.data * (2 if self.network.norms else 1)
        self.sizes = [least + draw.randint(0, 3) for _ in range(STEPS)]

    def pieces(self):
        return stretto.method(self.method).plan(self.stages, self.workers)[0].per_turn

    def draw_sync(self):
        if self.data == 1:
            return "all-reduce"
        kinds = ["all-reduce"]
        if not self.network.tied:
            kinds += [stretto.LocalSGD(every=2), stretto.LocalSGD(every=3, start=2), stretto.DiLoCo(every=2)]
            if self.name in choices.SYNCHRONOUS or (self.name in choices.LOCAL and "delay=1" not in self.method):
                kinds.append("fully-shard")
            if self.name in ("backprop", "pipedream", "1f1b", "gpipe") and "warmup" not in self.method:
                kinds.append(stretto.ParameterServer(staleness=self.draw.choice([self.data, self.data + 2])))
        return self.draw.choice(kinds)

    def exact(self):
        """Whether every sum is made in one order."""
        return self.tensor == 1 and self.data <= 2 and self.sync != "fully-shard"

    def batches(self):
        generator = torch.Generator().manual_seed(self.batch_seed)
        made = [self.network.batch(generator, size) for size in self.sizes]
        return [tuple(part.to(self.dtype) if part.is_floating_point() else part for part in pair) for pair in made]

    def __str__(self):
        axes = f"{self.processes} processes, data={self.data}, tensor={self.tensor}, {self.sync}"
        parts = [self.network.family, f"{self.stages} stages", self.method, axes, self.told, str(self.dtype)]
        parts += [f"clip={self.clip}"] * (self.clip is not None) + [str(self.precision)] * (self.precision is not None)
        parts += ["padded"] * (self.network.loss is networks.summed_token_loss)
        parts += ["scheduler"] * (self.scheduler is not None) + ["tied"] * bool(self.network.tied)
        parts += ["frozen"] * bool(self.network.frozen) + ["dropout"] * self.network.dropout
        return f"seed {self.seed}: " + ", ".join(parts)


def bare(told):
    return " in two groups" not in told


def make(here, seed, alone, order):
    modules = here.network.modules(seed, here.dtype)
    sync = here.sync
    if order is not None:
        sync = stretto.ParameterServer(staleness=sync.staleness, order=order)
    mesh = stretto.Mesh(data=here.data, tensor=1 if alone else here.tensor)
    heads = None
    if here.local:
        x, _ = here.batches()[0]
        ends = {high for _, high in here.definition.segments(here.stages)} - {here.stages - 1}
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed + 1)
            heads, given = [], (x,)
            for s, module in enumerate(here.network.modules(seed, here.dtype)):
                output = module(*given)
                given = output if isinstance(output, tuple) else (output,)
                heads.append(here.network.head(given[0].shape).to(here.dtype) if s in ends else None)
    loss = networks.for_stretto(here.network.loss)
    return stretto.Trainer(
        modules, loss, here.optimizer, here.method, heads=heads, scheduler=here.scheduler, clip=here.clip,
        workers=here.workers if alone else None, mesh=mesh, sync=sync, precision=here.precision, device="cpu",
        timeout=40,
    )  # fmt: skip


def train(seed, folder, order=None):
    """What a case comes to, in this process: losses, weights, what evaluation says, and the servers' order."""
    here = Case(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = folder is None or folder.endswith("alone")
        trainer = make(here, seed, alone, order)
        served = isinstance(here.sync, stretto.ParameterServer) and here.data > 1
        told = []
        for n, (x, y) in enumerate(here.batches()):
            told.append(trainer.step(x, y))
            if here.events[n] < 0.08:
                told.append(trainer.flush())
            elif here.events[n] < 0.13:
                told.append(trainer.evaluate([(x, y)])["loss"])
            elif here.events[n] < 0.2 and not served and here.sync in ("all-reduce", "fully-shard"):
                trainer.save(f"{folder}/{n}")
                trainer = make(here, seed + 1, alone, order)
                trainer.load(f"{folder}/{n}")
        told.append(trainer.flush())
        told.append(trainer.evaluate(here.batches()[:1]))
        order = trainer.order() if served and order is None else None
        weights = trainer.gather()
        return told, None if weights is None else {key: value.clone() for key, value in weights.items()}, order


def attack(seed):
    """Trains configuration `seed` on processes and on one."""
    here = Case(seed)
    passed = f"{here.processes} processes"
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = worlds.do(here.processes, "attack.processes:train", seed, f"{folder}/many", seconds=200)
            order = found[0][2]
            wanted = train(seed, f"{folder}/alone", order)
        failure = difference(here, found, wanted)
    except worlds.WorldError as error:
        failure = str(error)
    return Outcome(str(here), failure, passed)


def difference(here, found, wanted):
    """What differs between the processes and the one, or None."""
    for rank, (told, weights, _) in enumerate(found):
        if (weights is None) != (rank > 0):
            return f"process {rank}: gather gave {type(weights).__name__}"
        if not alike(flat(told), flat(wanted[0]), here):
            return f"process {rank} was told {told}\nalone {wanted[0]}"
    for key, value in wanted[1].items():
        mine = found[0][1][key]
        equal = torch.equal(mine, value) if here.exact() else torch.allclose(mine, value, rtol=0, atol=near(here))
        if not equal:
            return f"{key} is {(mine.double() - value.double()).abs().max():.3g} off"
    return None


def near(here):
    return 1e-9 if here.dtype == torch.float64 else 1e-3


def flat(told):
    for each in told:
        if isinstance(each, dict):
            yield from each.values()
        elif isinstance(each, list):
            yield from each
        else:
            yield each


def alike(mine, theirs, here):
    mine, theirs = list(mine), list(theirs)
    if len(mine) != len(theirs):
        return False
    if here.exact():
        return mine == theirs
    close = near(here)
    return all(
        a is b if a is None or b is None else math.isclose(a, b, rel_tol=close, abs_tol=close)
        for a, b in zip(mine, theirs, strict=True)
    )
