"""Plain PyTorch as the judge: a network with habits under a method, beside a loop of a few lines."""

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch.func import functional_call

import stretto
from habits.networks import STATEFUL, batches, called, loss_of, network

METHODS = {
    "backprop": 1,
    "gpipe(microbatches=2)": 2,
    "1f1b(microbatches=3)": 3,
    "zb-h1(microbatches=2)": 2,
    "pipedream": 1,
}
STEPS = 4
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Verdict:
    """What became of a case: "equal", "refused" or "SILENT", and the message or the difference."""

    kind: str
    said: str


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def seeded():
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


def verdict(habits, method, stages=2):
    """Train by Stretto and by a plain loop, and compare the weights, the buffers and the outputs that both come to."""
    model, loss, data = network(habits), loss_of(habits), batches(habits, STEPS)
    try:
        cut = stretto.split(model, stages, example=data[0][0])
        trainer = stretto.Trainer(cut, loss, sgd, method)
        seeded()
        for x, y in data:
            trainer.step(x, y)
        trainer.flush()
    except stretto.UsageError as error:
        return Verdict("refused", f"{error}")
    owners = {id(p): s for s in reversed(range(stages)) for p in cut[s].parameters()}
    stage_of = {name: owners.get(id(p), stages - 1) for name, p in model.named_parameters()}
    # functional_call would recompute with other weights than it computed with
    plain, judge = network(habits - {"checkpointed", "checkpointed as before 2.0"}), loss_of(habits)
    seeded()
    loop = delayed if method == "pipedream" else synchronous
    loop(plain, judge, data, stage_of=stage_of, stages=stages, pieces=METHODS[method] if habits & {*STATEFUL} else 1)
    found = difference(model, plain, loss, judge, data[-1][0])
    return Verdict("equal", "") if found is None else Verdict("SILENT", found)


def value_of(judge, output, target):
    """The loss as a number, and its count where it gives a pair."""
    value = judge(output, target)
    return value if isinstance(value, tuple) else (value, None)


def parameters_of(model, judge):
    return [*model.parameters(), *(judge.parameters() if isinstance(judge, torch.nn.Module) else ())]


def synchronous(model, judge, data, *, pieces, stage_of, stages):
    """A step for each minibatch; gradients of `pieces` of it are added up."""
    optimizer = sgd(parameters_of(model, judge))
    for x, y in data:
        optimizer.zero_grad()
        parts = list(zip(cut_in(x, pieces), y.tensor_split(pieces), strict=True))
        total = sum(count or 0 for count in (len(part) for _, part in parts))
        for part, target in parts:
            value, count = value_of(judge, called(model, part), target)
            share = len(target) / total if count is None else 1 / total
            (value * share).backward()
        optimizer.step()


def delayed(model, judge, data, *, pieces, stage_of, stages):
    """PipeDream: in minibatch t, stage s computes with the weights after t - (S - 1 - s) updates."""
    optimizer = sgd(parameters_of(model, judge))
    named = dict(model.named_parameters())
    versions = [{name: p.detach().clone() for name, p in named.items()}]
    for t, (x, y) in enumerate(data):
        optimizer.zero_grad()
        seen = {
            name: versions[max(0, t - (stages - 1 - stage_of[name]))][name].clone().requires_grad_(p.requires_grad)
            for name, p in named.items()
        }
        args, kwargs = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})
        value, count = value_of(judge, functional_call(model, seen, args, kwargs), y)
        (value if count is None else value / count).backward()
        for name, p in named.items():
            gradient = seen[name].grad
            if gradient is not None:
                for hook in (p._backward_hooks or {}).values():
                    gradient = hook(gradient)
            p.grad = gradient
            if gradient is not None:
                for hook in (p._post_accumulate_grad_hooks or {}).values():
                    hook(p)
        optimizer.step()
        versions.append({name: p.detach().clone() for name, p in named.items()})


def cut_in(x, pieces):
    """A batch's inputs in parts."""
    if isinstance(x, dict):
        parts = [cut_in(value, pieces) for value in x.values()]
        return [dict(zip(x, part, strict=True)) for part in zip(*parts, strict=True)]
    if isinstance(x, tuple):
        return list(zip(*(cut_in(value, pieces) for value in x), strict=True))
    return x.tensor_split(pieces)


def difference(model, plain, loss, judge, x):
    """What differs most; None if nothing does."""
    pairs = [*zip(state_of(model), state_of(plain), strict=True)]
    if isinstance(judge, torch.nn.Module):
        pairs += [*zip(state_of(loss), state_of(judge), strict=True)]
    for (name, ours), (_, theirs) in pairs:
        if not torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE):
            return f"{name} differs by {float((ours - theirs).detach().abs().max()):.3g}"
    outputs = []
    for each in (model.eval(), plain.eval()):
        seeded()
        with torch.no_grad():
            outputs.append(torch.utils._pytree.tree_leaves(called(each, x)))
    same = all(torch.allclose(one, two, rtol=TOLERANCE, atol=TOLERANCE) for one, two in zip(*outputs, strict=True))
    return None if same else "the outputs in evaluation differ"


def state_of(module):
    """Parameters and buffers by name, those that state_dict leaves out included."""
    return [*module.named_parameters(), *module.named_buffers()]
