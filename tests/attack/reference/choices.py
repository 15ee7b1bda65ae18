"""Random choices of what a Trainer is given besides its stages: method, optimizer, scheduler. Each is drawn with its
definition for the reference."""

from dataclasses import replace
from functools import partial

import torch

import stretto
from attack.reference.simulator import Definition
from stretto.optim import LAMB, LARS

SYNCHRONOUS = ("backprop", "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
LOCAL = ("greedy", "overlapping", "chunked")
DELAYED = ("pipedream", "pipedream-2bw", "paci", "pipeoptim", "nesterov", "spectrain")
CLOCK = ("pb", "pb-sc", "pb-lwp", "pb-lwpw", "pb-lwp-sc", "pipemare")
METHODS = (*SYNCHRONOUS, *LOCAL, *DELAYED, *CLOCK)


def written(name, options):
    return f"{name}({', '.join(f'{key}={value}' for key, value in options.items())})" if options else name


def pb_delay(s, stages):
    return 2 * (stages - 1 - s)


def async_delay(s, stages):
    return stages - 1 - s


def synchronous(draw, name, stages):
    if name == "backprop":
        return name, {}, Definition(synchronous=True, whole_norm=True), None
    workers = None
    count = draw.choice([None, 1, 2, 3, 4, 6])
    if name in ("interleaved", "looped-bfs"):
        workers = draw.choice([w for w in range(1, stages + 1) if stages % w == 0])
        count = None if draw.random() < 0.3 else workers * draw.choice([1, 2])
    if name in ("zb-v", "dualpipe-v"):
        workers = stages // 2 if stages > 1 else None
    if name == "dualpipe-v" and count is not None:
        count += stages
    options = {} if count is None else {"microbatches": count}

    def pieces(_):
        if count:
            return count
        of_workers = stretto.method(name).plan(stages, workers)[0].num_workers
        return max(4, of_workers * (2 if name == "dualpipe-v" else 1))

    return name, options, Definition(pieces=pieces, synchronous=True, whole_norm=True), workers


def local(draw, name, stages):
    if name == "greedy":
        return name, {}, Definition(segments=lambda size: [(s, s) for s in range(size)])
    if name == "chunked":
        chunks = draw.randint(1, stages) if draw.random() < 0.7 or stages < 2 else None
        count = min(chunks or 2, stages)
        sizes = [stages // count + (i < stages % count) for i in range(count)]
        ends = [sum(sizes[: i + 1]) - 1 for i in range(count)]
        segments = [(end - size + 1, end) for end, size in zip(ends, sizes, strict=True)]
        return name, {} if chunks is None else {"chunks": chunks}, Definition(segments=lambda _: segments)
    options = {}
    if draw.random() < 0.5:
        options["combine"] = draw.choice(["sum", "mean"])
    if draw.random() < 0.5:
        options["delay"] = draw.choice([0, 1])
    late = options.get("delay", 0) if stages > 1 else 0
    segments = [(s - 1, s) for s in range(1, stages)] or [(0, 0)]
    return name, options, Definition(
        delay=lambda s, size: late, segments=lambda _: segments, mean=options.get("combine") == "mean"
    )  # fmt: skip


def decayed(s, stages, delay, m):
    return m * (1 - m**delay) / (1 - m)


def prediction(form, horizon):
    if horizon is None:
        return form, lambda s, stages, delay, m: delay
    if horizon == "decayed":
        return form, decayed
    return form, lambda s, stages, delay, m: horizon


def delayed(draw, name, stages):
    if name in ("pipedream", "nesterov"):
        return name, {}, Definition(delay=async_delay)
    if name == "pipedream-2bw":
        count = draw.choice([None, stages, stages + 1, 2 * stages])
        return (
            name,
            {} if count is None else {"microbatches": count},
            Definition(pieces=lambda _: count or stages, buffered=True),
        )
    if name == "paci":
        every = draw.choice([None, 1, 2, 3])
        options = {} if every is None else {"every": every}
        return name, options, Definition(pieces=lambda _: every or 2, delay=async_delay, live=True)
    if name == "pipeoptim":
        return name, {}, Definition(delay=async_delay, live=True, ahead=prediction("step", None))
    ahead = ("velocity", lambda s, size, delay, m: s // 2 + delay)
    return name, {}, Definition(
        delay=async_delay, live=True, ahead=ahead, behind=("velocity", lambda s, size, delay, m: s // 2)
    )  # fmt: skip


def clock(draw, name, stages):
    if name == "pipemare":
        options = {}
        if draw.random() < 0.5:
            options["reschedule"] = draw.choice([1, 5, 30])
        if draw.random() < 0.4:
            options["correct"] = draw.random() < 0.5
        if draw.random() < 0.3:
            options["microbatches"] = draw.choice([1, 2, 3])
        correction = ("correction", lambda s, size, delay, m: delay) if options.get("correct", True) else None
        many = options.get("microbatches", 1)
        return name, options, Definition(
            pieces=lambda _: many, delay=pb_delay, live=True, behind=correction, reschedule=options.get("reschedule")
        )  # fmt: skip
    spike = name in ("pb-sc", "pb-lwp-sc")
    form = {"pb-lwp": "velocity", "pb-lwpw": "weight", "pb-lwp-sc": "weight"}.get(name)
    options, stash = {}, False
    if name == "pb":
        if draw.random() < 0.4:
            options["spike"] = spike = draw.random() < 0.7
        if draw.random() < 0.5:
            options["predict"] = form = draw.choice(["velocity", "weight", "step"])
        if draw.random() < 0.4:
            options["stash"] = stash = draw.random() < 0.7
    horizon = None
    if form and name != "pb-sc" and draw.random() < 0.3:
        options["horizon"] = horizon = draw.choice([0, 1, 3, "decayed"])
    return name, options, Definition(
        delay=pb_delay, live=not stash, spike=spike, ahead=prediction(form, horizon) if form else None
    )  # fmt: skip


def method(draw, stages, minibatches, names=METHODS):
    """(how it is written, its definition, how many workers or None)."""
    names = [each for each in names if each not in ("zb-v", "dualpipe-v") or stages % 2 == 0 or stages == 1]
    name, workers = draw.choice(names), None
    if name in SYNCHRONOUS:
        name, options, definition, workers = synchronous(draw, name, stages)
    else:
        kind = local if name in LOCAL else delayed if name in DELAYED else clock
        name, options, definition = kind(draw, name, stages)
    if name not in (*SYNCHRONOUS, *LOCAL):
        phases = {}
        if draw.random() < 0.2:
            phases["warmup"] = draw.randrange(minibatches)
        if draw.random() < 0.15:
            phases["finish"] = draw.randrange(phases.get("warmup", 0), minibatches + 1)
        options |= phases
        definition = replace(definition, **phases)
    if draw.random() < 0.25:
        again = draw.choice([True, True, 1, 2, 3])
        named = written(name, {**options, "recompute": again})
        try:
            stretto.method(named).plan(stages, workers)
        except stretto.UsageError:
            pass  # nothing to recompute
        else:
            options["recompute"] = again
            size = max(1, round(stages**0.5)) if again is True else again
            definition = replace(definition, segment=lambda _: size)
    return name, written(name, options), definition, workers


# -- optimizers -------------------------------------------------------------------------------------------------------


class LarsByHand(torch.optim.Optimizer):
    """r = trust |w| / (|g| + wd |w| + eps), 1 where a norm is 0; v <- m v + r (g + wd w); w <- w - lr v."""

    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0, trust=0.001, eps=1e-8):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if p.dim() > 1:
                    w, g, wd = float(p.norm()), float(p.grad.norm()), group["weight_decay"]
                    ratio = group["trust"] * w / (g + wd * w + group["eps"]) if w > 0 and g > 0 else 1.0
                    update = ratio * (p.grad + wd * p)
                if group["momentum"]:
                    past = self.state[p].get("momentum_buffer", torch.zeros_like(p))
                    update = self.state[p]["momentum_buffer"] = group["momentum"] * past + update
                p.sub_(group["lr"] * update)


class LambByHand(torch.optim.Optimizer):
    """u = m_hat / (sqrt(v_hat) + eps) + wd w; w <- w - lr (|w| / |u|) u; vectors take AdamW's step without decay."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                own = self.state[p] or {"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                t, m = own["t"] + 1, b1 * own["m"] + (1 - b1) * p.grad
                v = b2 * own["v"] + (1 - b2) * p.grad**2
                self.state[p] = {"t": t, "m": m, "v": v}
                u = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"])
                ratio = 1.0
                if p.dim() > 1:
                    u = u + group["weight_decay"] * p
                    w, size = float(p.norm()), float(u.norm())
                    ratio = w / size if w > 0 and size > 0 else 1.0
                p.sub_(group["lr"] * ratio * u)


def grouped(kind, params, *, vectors, **options):
    """Two groups: matrices, and vectors with options of their own."""
    matrices = [p for p in params if p.dim() > 1]
    rest = [p for p in params if p.dim() <= 1]
    groups = [{"params": matrices}] * bool(matrices) + [{"params": rest, **vectors}] * bool(rest)
    return kind(groups, **options)


def momentum_sgd(draw):
    options = {"lr": draw.choice([0.01, 0.03]), "momentum": draw.choice([0.5, 0.9])}
    if draw.random() < 0.4:
        options["weight_decay"] = 0.01
    if draw.random() < 0.1:
        options["maximize"] = True
        options["lr"] = 0.003
    return torch.optim.SGD, options


def any_sgd(draw):
    kind, options = momentum_sgd(draw)
    fancy = draw.random()
    if fancy < 0.25:
        options["nesterov"] = True
    elif fancy < 0.4:
        options["dampening"] = 0.3
    elif fancy < 0.55:
        options["momentum"] = 0
    return kind, options


def adam(draw):
    kind = draw.choice([torch.optim.Adam, torch.optim.AdamW])
    options = {"lr": 0.003, "betas": draw.choice([(0.9, 0.999), (0.8, 0.9)]), "eps": 1e-6}
    if draw.random() < 0.5:
        options["weight_decay"] = 0.05
    if draw.random() < 0.3:
        options["amsgrad"] = True
    return kind, options


def nadam(draw):
    options = {"lr": 0.003, "betas": (0.99, 0.999), "eps": 1e-6}
    if draw.random() < 0.3:
        options |= {"weight_decay": 0.01, "decoupled_weight_decay": draw.random() < 0.5}
    return torch.optim.NAdam, options


def other(draw):
    return draw.choice(
        [
            (torch.optim.RMSprop, {"lr": 0.003, "momentum": draw.choice([0, 0.5]), "eps": 1e-6}),
            (torch.optim.Adagrad, {"lr": 0.01, "eps": 1e-6}),
            (torch.optim.Adadelta, {"lr": 0.1}),
            (torch.optim.Adamax, {"lr": 0.003, "eps": 1e-6}),
            (torch.optim.RAdam, {"lr": 0.003, "eps": 1e-6}),
            (torch.optim.ASGD, {"lr": 0.01, "t0": 3}),
        ]
    )


def optimizer(draw, definition, name):
    """(what it is called, Stretto's, the reference's): functions of parameters."""
    forms = {each[0] for each in (definition.ahead, definition.behind) if each}
    if name == "nesterov":
        kind, options = nadam(draw)
    elif definition.spike or "velocity" in forms:
        kind, options = momentum_sgd(draw)
    elif "step" in forms:
        kind, options = draw.choice([momentum_sgd, adam])(draw)
    else:
        kind, options = draw.choice([momentum_sgd, any_sgd, adam, nadam, other, layerwise])(draw)
    theirs = {LARS: LarsByHand, LAMB: LambByHand}.get(kind, kind)
    if draw.random() < 0.25 and kind not in (LARS, LAMB):
        vectors = {"lr": options["lr"] / 2, **({"weight_decay": 0.0} if "weight_decay" in options else {})}
        made = [partial(grouped, each, vectors=vectors, **options) for each in (kind, theirs)]
        return f"{kind.__name__} {options} in two groups", *made
    return f"{kind.__name__} {options}", partial(kind, **options), partial(theirs, **options)


def layerwise(draw):
    options = {"lr": 0.01, "weight_decay": draw.choice([0.0, 0.1])}
    if draw.random() < 0.5:
        return LAMB, options
    return LARS, {**options, "lr": 1.0, "trust": 0.01, "momentum": draw.choice([0.0, 0.9])}


def scheduler(draw):
    """A function of an optimizer, or None."""
    pick = torch.optim.lr_scheduler
    return draw.choice(
        [
            None,
            None,
            lambda o: pick.StepLR(o, 3, 0.5),
            lambda o: pick.ExponentialLR(o, 0.9),
            lambda o: pick.CosineAnnealingLR(o, 7),
            lambda o: pick.LambdaLR(o, lambda k: min(1.0, (k + 1) / 5)),
            lambda o: pick.SequentialLR(o, [pick.ConstantLR(o, 0.5, 4), pick.ExponentialLR(o, 0.9)], [4]),
            lambda o: pick.OneCycleLR(o, [g["lr"] * 2 for g in o.param_groups], total_steps=400, cycle_momentum=False),
        ]
    )
