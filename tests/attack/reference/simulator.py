"""Training by the definitions of the methods, with every version of every weight kept: the reference of this folder.

Nothing is taken from Stretto. A micro-batch is run once, when its minibatch enters; which version of a stage's weights
its forward saw, and which its backward read, are numbers of updates that follow from the method's clock:

    q          the micro-batch, counted from the last time that the pipeline was empty; N make an update
    forward    floor(max(0, q - D) / N) updates after that time, D the delay in micro-batches
    backward   the same version (stash), or q // N (live)
"""

import copy
import math
from dataclasses import dataclass, field

import torch
from torch.func import functional_call

from attack.reference import networks

DECAY = math.exp(-2)  # PipeMare's C


@dataclass(frozen=True)
class Definition:
    """What a method is. `delay(s, S)` in micro-batches, `pieces(S)` make an update; the rest are cures, as data.

    ahead: (form, horizon(stage, S, delay, momentum)) of a forward; behind: the same of a backward, form "velocity" or
    "correction". segments(S): for each loss the first and the last stage that it trains.
    """

    pieces: object = lambda stages: 1
    delay: object = lambda s, stages: 0
    live: bool = False
    buffered: bool = False
    ahead: tuple | None = None
    behind: tuple | None = None
    spike: bool = False
    reschedule: int | None = None
    segments: object = lambda stages: [(0, stages - 1)]
    mean: bool = False
    synchronous: bool = False
    whole_norm: bool = False  # clip by the norm of all stages' gradients
    warmup: int = 0
    finish: int | None = None
    segment: object = None  # recompute under live weights: S -> how many stages a segment has


@dataclass
class Version:
    """A stage's weights after so many updates, and what is known of them."""

    weights: dict
    rates: dict  # by name, of the next update
    velocity: dict
    direction: dict
    delta: dict = field(default_factory=dict)
    former: dict | None = None


class Copy:
    """One stage of one replica: its module's parameters and its head's ("head."), its optimizer, all its versions."""

    def __init__(self, index, stages, module, head, borrowed, definition, optimizer, scheduler):
        self.index, self.stages, self.definition = index, stages, definition
        self.head = copy.deepcopy(head)
        self.own = {
            name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
            for prefix, part in (("", module), ("head.", head))
            if part is not None
            for name, parameter in ((prefix + each, p) for each, p in part.named_parameters())
            if name not in borrowed
        }
        self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        trained = [p for p in self.own.values() if p.requires_grad]
        self.optimizer = optimizer(trained) if trained else None
        self.scheduler = scheduler(self.optimizer) if scheduler is not None and trained else None
        self.coming = coming(optimizer, scheduler, [tuple(p.shape) for p in trained]) if trained else None
        pieces = definition.pieces(stages)
        self.delay = definition.delay(index, stages)
        self.updates_late = self.delay / pieces
        self.momentum = 0.0
        if trained:
            group = self.optimizer.param_groups[0]
            self.momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
        self.made = 0
        self.versions = [self.look(None, {})]

    def names(self):
        return {id(p): name for name, p in self.own.items()}

    def look(self, former, delta):
        """The version that stands."""
        weights = {name: p.detach().clone() for name, p in self.own.items()}
        rates, velocity, direction = {}, {}, {}
        names = self.names()
        for number, group in enumerate(self.optimizer.param_groups if self.optimizer else ()):
            for p in group["params"]:
                name, state = names[id(p)], self.optimizer.state.get(p, {})
                rates[name] = (number, float(group["lr"]))
                velocity[name] = clone(state.get("momentum_buffer"))
                direction[name] = step_direction(state, group)
        return Version(weights, rates, velocity, direction, delta, former)

    def version(self, updates):
        return self.versions[updates]

    def predicted(self, updates, form, horizon):
        """The weights after `updates` updates, looked at `horizon` updates ahead."""
        at = self.versions[updates]
        if horizon == 0 or self.optimizer is None:
            return at.weights
        out = dict(at.weights)
        for name, (group, rate) in at.rates.items():
            weight = at.weights[name]
            if form == "velocity" and at.velocity[name] is not None:
                out[name] = weight - rate * horizon * at.velocity[name]
            if form == "weight" and at.former is not None:
                out[name] = weight + horizon * (weight - at.former[name])
            if form == "step" and at.direction[name] is not None:
                step, decay = at.direction[name]
                out[name] = weight - self.distance(group, updates, horizon) * (step + decay * weight)
            if form == "correction" and name in at.delta:
                out[name] = weight - horizon * at.delta[name]
        return out

    def distance(self, group, updates, horizon):
        """The rates of the next updates, as many as the horizon says, added up; of a fraction the fraction."""
        whole = int(horizon)
        rates = [self.coming(updates + j)[group] for j in range(whole + 1)]
        return sum(rates[:whole]) + (horizon - whole) * rates[whole]

    def update(self, gradients, limit, plain):
        """One update with gradients by name; `limit` is (norm allowed, norm found) or None."""
        former = {name: p.detach().clone() for name, p in self.own.items()}
        if self.optimizer is not None:
            for name, p in self.own.items():
                p.grad = gradients.get(name)
                if p.grad is not None and limit is not None:
                    p.grad = p.grad * min(1.0, limit[0] / (limit[1] + 1e-6))
            self.step(plain)
            if self.scheduler is not None:
                self.scheduler.step()
            for p in self.own.values():
                p.grad = None
        self.made += 1
        span = self.updates_late
        gamma = DECAY ** (1 / span) if span else 0.0
        past = self.versions[-1].delta
        delta = {
            name: gamma * past.get(name, torch.zeros_like(p)) + (1 - gamma) * (p.detach() - former[name])
            for name, p in self.own.items()
        }
        self.versions.append(self.look(former, delta))

    def step(self, plain):
        definition, groups = self.definition, self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if definition.reschedule is not None and not plain:
            power = 1 - min(self.made / definition.reschedule, 1)
            for group in groups:
                group["lr"] = group["lr"] / max(self.updates_late, 1) ** power
        if definition.spike and not plain:
            self.spiked()
        else:
            self.optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def spiked(self):
        """v <- m v + g; w <- w - lr (a v + b g)."""
        wanted = []
        for group in self.optimizer.param_groups:
            m = group["momentum"]
            a = m**self.updates_late
            b = (1 - a) / (1 - m)
            for p in group["params"]:
                if p.grad is not None:
                    g = (-p.grad if group["maximize"] else p.grad) + group["weight_decay"] * p.detach()
                    old = self.optimizer.state.get(p, {}).get("momentum_buffer")
                    v = g if old is None else m * old + g
                    wanted.append((p, p.detach() - group["lr"] * (a * v + b * g)))
        self.optimizer.step()  # for its state
        with torch.no_grad():
            for p, value in wanted:
                p.copy_(value)

    def replace(self, weights):
        """The standing weights are others from here on: those that replicas have agreed on."""
        with torch.no_grad():
            for name, value in weights.items():
                self.own[name].copy_(value)
        self.versions[-1].weights.update({name: value.clone() for name, value in weights.items()})


def clone(tensor):
    return None if tensor is None else tensor.detach().clone()


def step_direction(state, group):
    """What the optimizer's next step would follow, at rate 1, and the decay beside it: SGD's velocity, Adam's
    m_hat / (sqrt(v_hat) + eps). None before the first step."""
    if "exp_avg_sq" in state and "betas" in group:
        t, (b1, b2) = float(state["step"]), group["betas"]
        second = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
        direction = (state["exp_avg"] / (1 - b1**t)) / ((second / (1 - b2**t)).sqrt() + group["eps"])
        return direction, group["weight_decay"] * bool(group.get("decoupled_weight_decay"))
    velocity = clone(state.get("momentum_buffer"))
    return None if velocity is None else (velocity, 0.0)


def coming(optimizer, scheduler, shapes):
    """A function of a number of updates: the rate of each group for the next one, by going through the schedule."""
    twin = optimizer([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes])
    schedule = None if scheduler is None else scheduler(twin)
    found = []

    def rates(updates):
        while len(found) <= updates:
            found.append([float(group["lr"]) for group in twin.param_groups])
            twin.step()
            if schedule is not None:
                schedule.step()
        return found[updates]

    return rates


class Simulator:
    """Trains `network` (`networks`) by a definition. `replicas` of it; `sync` is ("all-reduce",), or ("local-sgd",
    every, start), or ("diloco", every, lr, momentum)."""

    def __init__(
        self,
        network,
        modules,
        heads,
        definition,
        optimizer,
        *,
        scheduler=None,
        clip=None,
        replicas=1,
        sync=("all-reduce",),
    ):
        self.network, self.definition, self.clip, self.sync = network, definition, clip, sync
        self.size = len(modules)
        self.pieces = definition.pieces(self.size)
        borrowed = [{name for user, name in network.tied if user == s} for s in range(self.size)]
        self.replicas = [
            [
                Copy(s, self.size, modules[s], heads[s], borrowed[s], definition, optimizer, scheduler)
                for s in range(self.size)
            ]
            for _ in range(replicas)
        ]
        self.entered = 0
        self.base = 0  # updates when the pipeline was last empty
        self.begun = 0  # minibatches then
        self.losses = []
        self.mode = None
        self.updates = 0
        self.met = 0
        self.outer = None

    # -- which weights a micro-batch sees -----------------------------------------------------------------------------

    def is_plain(self, n):
        d = self.definition
        return n < d.warmup or (d.finish is not None and n >= d.finish)

    def horizon(self, wanted, own):
        return wanted[1](own.index, self.size, own.updates_late, own.momentum)

    def seen_at(self, own, q, delay):
        """How many updates the stage had made before a pass that comes `delay` micro-batches before its backward."""
        if self.definition.buffered and self.size > 1:
            return self.base + max(0, q // self.pieces - 1)
        return self.base + max(0, q - delay) // self.pieces

    def forward_version(self, own, q, plain):
        return self.updates if plain else self.seen_at(own, q, own.delay)

    def forward_weights(self, own, q, plain):
        k, ahead = self.forward_version(own, q, plain), self.definition.ahead
        if plain or ahead is None:
            return own.version(k).weights
        return own.predicted(k, ahead[0], self.horizon(ahead, own))

    def backward_weights(self, own, forward, plain):
        d = self.definition
        if plain or not d.live:
            return forward
        if d.behind is None:
            return own.version(self.updates).weights
        return own.predicted(self.updates, d.behind[0], self.horizon(d.behind, own))

    # -- training -----------------------------------------------------------------------------------------------------

    def step(self, x, y):
        plain = self.is_plain(self.entered)
        if self.mode is not None and plain != self.mode:
            self.drain()
        self.mode = plain
        total = [[{} for _ in range(self.size)] for _ in self.replicas]
        told = [0.0] * len(self.replicas)
        merges = self.sync[0] != "all-reduce"
        parts = [self.deal(piece) for piece in cut((x, y), self.pieces)]
        sizes = [sum(len(first(part[r][1])) for part in parts) for r in range(len(self.replicas))]
        counts = self.counts(parts)
        for i, part in enumerate(parts):
            q = (self.entered - self.begun) * self.pieces + i
            for r, (own_x, own_y) in enumerate(part):
                whole = sizes[r] if merges else sum(sizes)
                share = len(first(own_y)) / whole
                told[r] += self.micro(r, q, plain, own_x, own_y, share, total[r], counts, merges)
        if counts is not None:
            told = [each * count / counts[1] for each, count in zip(told, counts[0], strict=True)] if merges else told
        elif merges:
            told = [each / len(told) for each in told]
        self.losses.append(sum(told))
        self.apply(total, plain)
        self.entered += 1
        self.updates += 1
        self.meet(False)
        return self.losses[-1]

    def deal(self, piece):
        return cut(piece, len(self.replicas))

    def counts(self, parts):
        """Where the loss returns (sum, count): the counts of each replica and of all."""
        if self.network.loss is not networks.summed_token_loss:
            return None
        own = [sum(int((part[r][1] != -100).sum()) for part in parts) for r in range(len(self.replicas))]
        return own, sum(own)

    def micro(self, r, q, plain, x, y, share, total, counts, merges):
        """Adds one micro-batch's gradients to `total`, by stage and name; returns its part of the loss."""
        replica, network = self.replicas[r], self.network
        seen = [self.forward_weights(own, q, plain) for own in replica]
        read = [self.backward_weights(own, f, plain) for own, f in zip(replica, seen, strict=True)]
        for (user, name), (owner, owned) in network.tied.items():
            # The owner's version, as it stood: what the owner predicts of it is its own.
            lent = replica[owner].version(self.forward_version(replica[owner], q, plain)).weights[owned]
            seen[user] = {**seen[user], name: lent}
            read[user] = {**read[user], name: lent}
        inputs, given = [], x if isinstance(x, tuple) else (x,)
        with torch.no_grad():
            for s, own in enumerate(replica):
                inputs.append(given)
                given = networks.run(network.stages[s], seen[s], seen[s], own.buffers, given, True)
        told = None
        segments = self.definition.segments(self.size) if not plain else [(0, self.size - 1)]
        seams = [] if plain else self.seams()
        for low, high in segments:
            again = [self.second_weights(own, q, seams, f) for own, f in zip(replica, seen, strict=True)]
            for user, name in network.tied:
                again[user] = {**again[user], name: seen[user][name]}
            value, loss = self.loss_of(replica, low, high, inputs, again, read, y, total, segments, seams)
            weight = share
            if counts is not None:
                value, _ = value
                weight = 1 / max(1, counts[0][r] if merges else counts[1])
            loss(value, weight)
            if high == self.size - 1:
                told = float(value.detach()) * weight
        return told

    # -- recomputation under live weights: segments of stages run a forward again, before the backward -----------------

    def seams(self):
        """(first, last) of each segment of stages that recompute; the last stage's backward follows its forward."""
        d = self.definition
        if d.segment is None or not d.live:
            return []
        size = d.segment(self.size)
        found = [(a, min(a + size, self.size) - 1) for a in range(0, self.size, size)]
        return [(a, e) for a, e in found if d.delay(e, self.size) > 0]

    def second_weights(self, own, q, seams, seen):
        """What the forward sees that the graph comes from: the only one, or a later one."""
        ends = [e for a, e in seams if a <= own.index <= e]
        if not ends:
            return seen
        rest = self.definition.delay(ends[0], self.size)
        k = self.seen_at(own, q, own.delay - rest)
        late = (own.delay - rest) / self.pieces
        if self.definition.behind is not None and self.definition.behind[0] == "correction":
            return own.predicted(k, "correction", own.updates_late - late)
        if self.definition.ahead is not None:
            form, horizon = self.definition.ahead
            return own.predicted(k, form, horizon(own.index, self.size, late, own.momentum))
        return own.version(k).weights

    def loss_of(self, replica, low, high, inputs, seen, read, y, total, segments, seams):
        leaves, given, cuts = {}, None, []
        starts = {low} | {a for a, _ in seams} | {e + 1 for _, e in seams}
        for s in range(low, high + 1):
            own = replica[s]
            if s in starts:  # what the first forward gave
                fresh = [each.detach() for each in inputs[s]]
                fresh = [each.requires_grad_() if s > low and each.is_floating_point() else each for each in fresh]
                cuts.append((given, fresh))
                given = tuple(fresh)
            trained = {name for name, p in own.own.items() if p.requires_grad} | {
                name for (user, name) in self.network.tied if user == s
            }
            values = {name: value.detach().requires_grad_(name in trained) for name, value in seen[s].items()}
            leaves[s] = {name: value for name, value in values.items() if name in trained}
            behind = {name: values[name] if read[s][name] is seen[s][name] else read[s][name] for name in values}
            given = networks.run(self.network.stages[s], values, behind, dict(own.buffers), given, False)
        output = given[0]
        head = replica[high].head
        if head is not None:
            weights = {name.removeprefix("head."): value for name, value in values.items() if name.startswith("head.")}
            output = functional_call(head, weights, given)
        value = self.network.loss(output, y)

        def loss(found, weight):
            if not found.requires_grad:
                return
            self.backward(found * weight, cuts, leaves, total, segments)

        return value, loss

    def backward(self, found, cuts, leaves, total, segments):
        """Through all parts of the graph, from the last to the first."""
        roots, arrived = [found], [torch.ones_like(found)]
        flat = [(s, name, leaf) for s, own in leaves.items() for name, leaf in own.items()]
        for outputs, inputs in reversed(cuts):
            wanted = [each for each in inputs if each.requires_grad]
            every = [*(leaf for *_, leaf in flat), *wanted]
            grads = torch.autograd.grad(roots, every, arrived, allow_unused=True) if roots and every else []
            for (s, name, _), gradient in zip(flat, grads, strict=False):
                if gradient is None:
                    continue
                if self.definition.mean and not name.startswith("head."):
                    gradient = gradient / sum(a <= s <= b for a, b in segments)
                at, name = self.network.tied.get((s, name), (s, name))
                total[at][name] = total[at][name] + gradient if name in total[at] else gradient
            if outputs is None:
                return
            below = dict(zip(map(id, wanted), grads[len(flat) :], strict=False))
            pairs = [(o, below.get(id(i))) for o, i in zip(outputs, inputs, strict=True)]
            pairs = [(o, g) for o, g in pairs if g is not None and o.requires_grad]
            roots, arrived = [o for o, _ in pairs], [g for _, g in pairs]

    def apply(self, total, plain):
        together = self.sync[0] == "all-reduce" or (self.sync[0] == "local-sgd" and self.updates < (self.sync[2] or 0))
        if together and len(self.replicas) > 1:
            by = 1 if self.sync[0] == "all-reduce" else len(self.replicas)
            for s in range(self.size):
                names = {name for own in total for name in own[s]}
                summed = {name: sum(own[s][name] for own in total if name in own[s]) / by for name in names}
                for own in total:
                    own[s] = summed
        for replica, gradients in zip(self.replicas, total, strict=True):
            norms = [norm(each) for each in gradients]
            for own, each in zip(replica, gradients, strict=True):
                own.update(each, self.limit(norms, own.index, plain), plain)

    def limit(self, norms, index, plain):
        if self.clip is None:
            return None
        if self.definition.whole_norm or plain:
            return self.clip, math.sqrt(sum(each**2 for each in norms))
        return self.clip / math.sqrt(self.size), norms[index]

    # -- replicas that merge ------------------------------------------------------------------------------------------

    def meet(self, pause):
        kind, *options = self.sync
        if kind == "all-reduce":
            return
        since = (options[1] or 0) if kind == "local-sgd" else 0
        due = self.updates > since and (pause or (self.updates - since) % options[0] == 0)
        if not due or self.met == self.updates:
            return
        self.met = self.updates
        for s in range(self.size):
            copies = [replica[s] for replica in self.replicas]
            names = [name for name, p in copies[0].own.items() if p.requires_grad]
            mean = {name: sum(own.own[name].detach() for own in copies) / len(copies) for name in names}
            merged = mean if kind == "local-sgd" else self.outer_step(s, mean, *options[1:])
            for own in copies:
                own.replace(merged)

    def outer_step(self, s, mean, lr, momentum):
        if self.outer is None:
            self.outer = {}
        if s not in self.outer:
            start = self.replicas[0][s].versions[0].weights
            self.outer[s] = {name: (start[name], torch.zeros_like(start[name])) for name in mean}
        out = {}
        for name, merged in mean.items():
            last, velocity = self.outer[s][name]
            gradient = last - merged
            velocity = momentum * velocity + gradient
            last = last - lr * (gradient + momentum * velocity)
            self.outer[s][name] = last, velocity
            out[name] = last
        return out

    def drain(self):
        """The pipeline is empty."""
        self.base, self.begun = self.updates, self.entered

    def flush(self):
        """Training pauses."""
        self.drain()
        self.meet(True)

    def weights(self):
        """Parameters and buffers of replica 0, as state dicts of stages and of heads."""
        stages, heads = [], []
        for own in self.replicas[0]:
            state = {name: p.detach() for name, p in own.own.items() if not name.startswith("head.")}
            for (user, name), (owner, owned) in self.network.tied.items():
                if user == own.index:
                    state[name] = self.replicas[0][owner].own[owned].detach()
            stages.append({**state, **own.buffers})
            heads.append({name[5:]: p.detach() for name, p in own.own.items() if name.startswith("head.")})
        return stages, heads


def first(value):
    return value[0] if isinstance(value, tuple) else value


def cut(value, pieces):
    """Along the examples, the first parts being one longer where it does not divide."""
    if isinstance(value, tuple):
        return list(zip(*(cut(each, pieces) for each in value), strict=True))
    n = len(value)
    sizes = [n // pieces + (i < n % pieces) for i in range(pieces)]
    return list(value.split(sizes))


def norm(gradients):
    return math.sqrt(sum(float(each.square().sum()) for each in gradients.values()))
