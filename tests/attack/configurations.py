"""Random training configurations against a reference that shares no code with Stretto (`attack.reference`).

`attack(seed)` draws a network, stages, a method with options, an optimizer, a scheduler, clipping, replicas, batches of
uneven sizes, pauses and checkpoints, trains them by a Trainer and by the reference, and compares every loss, weight and
buffer.
"""

import random
import tempfile
import warnings

import torch

import stretto
from attack.protocol import Outcome
from attack.reference import choices, networks, simulator

TOLERANCE = 1e-10
SHARE = 30
LIMIT = 300.0


class Case:
    """What a seed stands for."""

    def __init__(self, seed):
        draw = self.draw = random.Random(f"configuration {seed}")
        self.seed = seed
        self.stages = draw.choice([1, 2, 2, 3, 3, 4, 4, 5, 6])
        self.minibatches = draw.randint(3, 22)
        self.name, self.method, self.definition, self.workers = choices.method(draw, self.stages, self.minibatches)
        self.local = self.name in choices.LOCAL
        self.network = self.draw_network()
        if draw.random() < 0.2:
            networks.freeze(draw, self.network)
        self.told, self.optimizer, self.optimizer_by_hand = choices.optimizer(draw, self.definition, self.name)
        self.scheduler = choices.scheduler(draw)
        self.clip = draw.choice([None, None, 0.05, 0.5, 5.0])
        self.replicas, self.sync, self.sync_by_hand = self.draw_replicas()
        self.events = [draw.random() for _ in range(self.minibatches)]
        self.spread = draw.random()
        if self.workers is None and self.name not in choices.SYNCHRONOUS[1:] and draw.random() < 0.3:
            self.workers = draw.randint(1, self.stages)
            if "recompute" in self.method:
                self.workers = None  # on fewer workers there may be nothing to recompute

    def draw_network(self):
        draw = self.draw
        kind = draw.choice(["mlp", "mlp", "cnn", "transformer"])
        padded = {"padded": draw.random() < 0.5} if kind == "transformer" else {}
        network = getattr(networks, kind)(draw, self.stages, **padded)
        if self.local and network.tied:
            network.tied = {}
        return network

    def draw_replicas(self):
        draw = self.draw
        if draw.random() < 0.7:
            return 1, "all-reduce", ("all-reduce",)
        count = draw.choice([2, 2, 3])
        kinds = ["all-reduce", "fully-shard", "local-sgd", "diloco"]
        if self.network.tied:
            kinds = ["all-reduce"]
        elif self.definition.behind and self.definition.behind[0] == "correction":
            kinds = ["all-reduce"]  # what a running mean of changes makes of a merge is not defined
        elif self.name not in (*choices.SYNCHRONOUS, *choices.LOCAL) or "delay=1" in self.method:
            kinds.remove("fully-shard")
        kind = draw.choice(kinds)
        every = draw.choice([1, 2, 3])
        self.network.shortest[0] = int(kind in ("local-sgd", "diloco"))  # of nothing a replica learns nothing
        if kind == "local-sgd":
            start = draw.choice([None, 0, 3])
            return count, stretto.LocalSGD(every=every, start=start), (kind, every, start)
        if kind == "diloco":
            lr, momentum = draw.choice([(0.7, 0.9), (1.0, 0.0)])
            return count, stretto.DiLoCo(every=every, outer_lr=lr, outer_momentum=momentum), (kind, every, lr, momentum)
        return count, kind, ("all-reduce",)

    def heads(self, modules):
        """Auxiliary heads where the method has them, else None."""
        if not self.local:
            return [None] * self.stages
        ends = {high for _, high in self.definition.segments(self.stages)} - {self.stages - 1}
        x, _ = self.network.batch(torch.Generator().manual_seed(0), 4)
        made, given = [], (x,)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(self.seed + 1)
            for s, ops in enumerate(self.network.stages):
                weights = dict(modules[s].named_parameters())
                buffers = {name: b.clone() for name, b in modules[s].named_buffers()}
                given = networks.run(ops, weights, weights, buffers, given, False)
                made.append(self.network.head(given[0].shape).double() if s in ends else None)
        return made

    def trainer(self, modules, heads):
        options = {} if self.replicas == 1 else {"mesh": stretto.Mesh(data=self.replicas), "sync": self.sync}
        return stretto.Trainer(
            modules, networks.for_stretto(self.network.loss), self.optimizer, self.method,
            heads=heads if self.local else None, scheduler=self.scheduler, clip=self.clip,
            workers=self.workers, device="cpu", **options,
        )  # fmt: skip

    def batches(self):
        pieces = self.definition.pieces(self.stages) * self.replicas
        least = pieces * (3 if self.network.norms else 1)
        spread = 0 if self.spread < 0.3 else 3 if self.spread < 0.6 else 2 * least
        generator, sizes = torch.Generator().manual_seed(self.seed), random.Random(self.seed)
        return [self.network.batch(generator, least + sizes.randint(0, spread)) for _ in range(self.minibatches)]

    def event(self, n):
        """What happens after minibatch n, besides training."""
        at = self.events[n]
        if at < 0.08:
            return "flush"
        if at < 0.14:
            return "reload"
        return "evaluate" if at < 0.18 else None

    def __str__(self):
        parts = [self.network.family, f"{self.stages} stages", self.method, self.told]
        parts += ["scheduler"] * (self.scheduler is not None) + [f"clip={self.clip}"] * (self.clip is not None)
        parts += [f"workers={self.workers}"] * (self.workers is not None)
        parts += [f"{self.replicas} replicas, {self.sync}"] * (self.replicas > 1)
        parts += ["padded"] * (self.network.loss is networks.summed_token_loss)
        parts += ["tied"] * bool(self.network.tied) + ["frozen"] * bool(self.network.frozen)
        return f"seed {self.seed}: " + ", ".join(parts)


def attack(seed):
    """Trains configuration `seed` both ways."""
    here = Case(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compare(here)
        except AssertionError as error:
            return Outcome(str(here), str(error))
        except Exception as error:
            error.add_note(str(here))
            raise
    return Outcome(str(here), passed=here.name)


def compare(here):
    """Raises AssertionError where the two differ by more than rounding does."""
    wanted = by_hand(here)
    assert all(abs(loss) < 1e6 for loss in wanted.losses), f"the reference diverges: {wanted.losses}"
    found = by_stretto(here)
    worst, where = found.differs(wanted)
    if worst > TOLERANCE:
        # How much the network itself makes of a difference in the last bit.
        wobble = max(by_hand(here, jiggle=seed).differs(wanted)[0] for seed in (1, 2, 3))
        assert worst <= 1000 * wobble, f"{where}: {worst:.3g} off, where rounding makes {wobble:.3g}"


class Trace:
    """What a run came to: its losses in order, and all weights and buffers at its pauses and at its end."""

    def __init__(self):
        self.losses, self.pauses = [], []

    def pause(self, when, stages, heads):
        """Keep copies of the state dicts of stages and of heads."""
        kept = {
            f"{kind} {s} {name}": value.detach().double().clone()
            for kind, states in (("stage", stages), ("head", heads))
            for s, state in enumerate(states)
            for name, value in state.items()
        }
        self.pauses.append((when, kept))

    def differs(self, other):
        """The largest difference, and where it is."""
        assert len(self.losses) == len(other.losses), f"{len(self.losses)} losses, not {len(other.losses)}"
        found = [
            (abs(mine - theirs) / max(1, abs(theirs)), f"loss {n}")
            for n, (mine, theirs) in enumerate(zip(self.losses, other.losses, strict=True))
        ]
        for (when, mine), (_, theirs) in zip(self.pauses, other.pauses, strict=True):
            assert set(mine) == set(theirs), f"{when}: {set(mine) ^ set(theirs)}"
            for name, value in theirs.items():
                error = (mine[name] - value).abs() / value.abs().clamp(min=1) if value.numel() else torch.zeros(1)
                found.append((float(error.max()), f"{when}: {name}"))
        assert all(error == error for error, _ in found), f"not a number: {found}"
        return max(found)


def by_hand(here, jiggle=None):
    """The reference's run; `jiggle` changes its first weights in their last bits."""
    modules = here.network.modules(here.seed)
    heads = here.heads(modules)
    if jiggle is not None:
        generator = torch.Generator().manual_seed(jiggle)
        with torch.no_grad():
            for weight in {id(p): p for module in modules for p in module.parameters()}.values():
                weight *= 1 + 1e-15 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    reference = simulator.Simulator(
        here.network, modules, heads, here.definition, here.optimizer_by_hand, scheduler=here.scheduler, clip=here.clip,
        replicas=here.replicas, sync=here.sync_by_hand,
    )  # fmt: skip
    trace = Trace()
    for n, (x, y) in enumerate(here.batches()):
        reference.step(x, y)
        if here.event(n) in ("flush", "reload"):
            reference.flush()
            trace.pause(f"{here.event(n)} after minibatch {n}", *reference.weights())
    reference.flush()
    trace.losses = reference.losses
    trace.pause("at the end", *reference.weights())
    return trace


def by_stretto(here):
    """The Trainer's run."""
    modules = here.network.modules(here.seed)
    trainer = here.trainer(modules, here.heads(modules))
    lag = 0 if here.definition.synchronous else 2 * here.stages
    assert trainer.lag == lag, f"lag {trainer.lag}, not {lag}"
    returned, trace = [], Trace()
    for n, (x, y) in enumerate(here.batches()):
        returned.append(trainer.step(x, y))
        event = here.event(n)
        if event == "evaluate":
            trainer.evaluate([(x, y)])
        elif event is not None:
            if event == "flush":
                trainer.flush()
            else:
                trainer = reloaded(here, trainer)
            trace.pause(f"{event} after minibatch {n}", *states(trainer))
    rest = trainer.flush()
    assert returned[:lag] == [None] * min(lag, len(returned)), "losses came too early"
    trace.losses = [*returned[lag:], *rest]
    trace.pause("at the end", *states(trainer))
    return trace


def states(trainer):
    """State dicts of stages and of heads."""
    return [stage.state_dict() for stage in trainer.stages], [
        {} if head is None else head.state_dict() for head in trainer.heads
    ]


def reloaded(here, trainer):
    """A trainer of other weights that goes on from the checkpoint of this one."""
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(f"{folder}/saved", {"seed": here.seed})
        modules = here.network.modules(here.seed + 17)
        fresh = here.trainer(modules, here.heads(modules))
        if here.events[0] < 0.3:
            fresh.step(*here.network.batch(torch.Generator().manual_seed(1), 60))
        assert fresh.load(f"{folder}/saved") == {"seed": here.seed}
    return fresh
