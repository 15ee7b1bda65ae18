"""Plain PyTorch as the judge: a network with habits under a method, beside a loop of a few lines."""

import copy
import random
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import stretto
from habits import networks
from habits.loaders import LOADERS, loader
from habits.networks import STATEFUL, Head, batches, called, loss_of, network
from runtime import worlds


@dataclass(frozen=True)
class Loop:
    """What a method is in a plain loop.

    pieces: micro-batches whose gradients make an update. versions(q, s): after how many updates are the weights with
    which the forward and the backward of micro-batch q compute, s stages before the last. segments(S): for a local
    method, the first and the last stage that each loss trains.
    """

    pieces: int = 1
    versions: Callable | None = None
    segments: Callable | None = None


METHODS = {
    "backprop": Loop(),
    "gpipe(microbatches=2)": Loop(2),
    "1f1b(microbatches=3)": Loop(3),
    "zb-h1(microbatches=2)": Loop(2),
    "pipedream": Loop(versions=lambda q, s: (q - s, q - s)),
    "pipedream-2bw(microbatches=2)": Loop(2, versions=lambda q, s: (q // 2 - 1, q // 2 - 1)),
    "pb": Loop(versions=lambda q, s: (q - 2 * s, q)),
    "greedy": Loop(segments=lambda stages: [(s, s) for s in range(stages)]),
    "chunked(chunks=2)": Loop(segments=lambda stages: [(0, (stages - 1) // 2), ((stages - 1) // 2 + 1, stages - 1)]),
    "overlapping": Loop(segments=lambda stages: [(s - 1, s) for s in range(1, stages)]),
}
WAYS = ("step", "fit", "resumed", "processes")
STEPS, EPOCHS, HALF = 4, 2, 2
TOLERANCE = 1e-9
SHARED = {"tied ends", "blocks that share weights", "a block called twice", "one batch norm for all"}
CHECKPOINTED = {"checkpointed", "checkpointed as before 2.0"}


@dataclass(frozen=True)
class Verdict:
    """What became of a case: "equal", "refused" or "SILENT", and the message or the difference."""

    kind: str
    said: str


@dataclass
class Trained:
    """What Stretto came to: tensors by name and outputs in evaluation, and what a plain loop needs to do the same."""

    values: dict[str, torch.Tensor]
    outputs: list[torch.Tensor] | None
    stage_of: dict[str, int]
    masks: dict
    left_out: bool = False  # `fit` has said so of a batch
    stages: list[nn.Module] = field(default_factory=list)  # of a local method, before training
    heads: list[nn.Module | None] = field(default_factory=list)


def judged(habits, method):
    """Whether a plain loop is judge: which version of a weight of several stages each of them sees, where these are not
    the same, is the method's law and no habit (tests/attack/reference)."""
    loop = METHODS[method]
    return not (habits & SHARED and (loop.segments is not None or method == "pb"))


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def seeded():
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


def verdict(habits, method, stages=2, way="step", load=LOADERS[0]):
    """Train by Stretto and by a plain loop, and compare the weights, the buffers and the outputs that both come to."""
    loop = METHODS[method]
    processes = way == "processes"
    networks.tape.end()
    try:
        if processes:
            found = worlds.do(stages, "habits.judge:in_a_process", habits, method, stages)
            refusals = [each for each in found if isinstance(each, str)]
            if refusals:
                return Verdict("refused", refusals[0])
            masks = {index: drawn for each in found for index, drawn in each.masks.items()}
            found = replace(found[0], masks=masks, **before(habits, method, stages))
        else:
            found = trained(habits, method, stages, way, load)
    except stretto.UsageError as error:
        return Verdict("refused", f"{error}")
    judge = loss_of(habits)
    networks.tape.replay(found.masks)
    data = epochs(habits, load, loop.pieces) if way == "fit" else batches(habits, STEPS)
    if way == "fit" and found.left_out != (len(data) < len(epochs(habits, load))):
        return Verdict("SILENT", "a batch is left out without a word, or a word is said without one")
    seeded()
    if loop.segments is None:
        model = network(habits - CHECKPOINTED)  # which change no numbers, with whatever weights they compute again
        pieces = loop.pieces if loop.versions or habits & {*STATEFUL} else 1
        again = (lambda: network(habits - CHECKPOINTED, seed=9)) if way == "resumed" else None
        model = globally(model, judge, data, loop, pieces, found.stage_of, stages, again)
        values, outputs = values_of(model), outputs_of(model, judge, habits)
    else:
        restart = way == "resumed"
        modules, heads = locally(found.stages, found.heads, judge, data, loop.segments(stages), restart)
        values = values_of(nn.ModuleList(modules)) | {
            f"heads.{k}": v for k, v in values_of(nn.ModuleList(heads)).items()
        }
        outputs = None
    values |= {f"loss.{name}": value for name, value in values_of(judge).items()}
    said = difference(found, values, outputs)
    return Verdict("equal", "") if said is None else Verdict("SILENT", said)


def epochs(habits, load, least=1):
    """The batches that a plain loop over the loader sees, but for those with fewer rows than micro-batches."""
    made = loader(load, habits)
    return [(tuple(x) if isinstance(x, list) else x, y) for _ in range(EPOCHS) for x, y in made if len(y) >= least]


# -- Stretto -----------------------------------------------------------------------------------------------------------


def in_a_process(habits, method, stages):
    """What one process of several comes to, or its refusal."""
    try:
        return trained(habits, method, stages, "processes", LOADERS[0])
    except stretto.UsageError as error:
        return f"{error}"


def trained(habits, method, stages, way, load):
    """A network with habits, trained by Stretto. Raises UsageError where that is refused."""
    segments = METHODS[method].segments
    data = batches(habits, STEPS)
    model, loss, cut, heads, trainer = made(habits, method, stages, data[0][0])
    names = names_of(cut, model)
    owners = {id(p): s for s in reversed(range(stages)) for p in cut[s].parameters()}
    stage_of = {name: owners.get(id(p), stages - 1) for name, p in model.named_parameters()}
    first = copied(cut), copied(heads)
    networks.tape.record()
    seeded()
    left_out = False
    if way == "fit":
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.fit(loader(load, habits), epochs=EPOCHS, quiet=True)
        left_out = any("it is left out" in str(each.message) for each in said)
    for n, (x, y) in enumerate(data if way != "fit" else ()):
        if way == "resumed" and n == HALF:
            with tempfile.TemporaryDirectory() as folder:
                trainer.save(f"{folder}/half")
                with networks.tape.stopped():
                    model, loss, cut, heads, trainer = made(habits, method, stages, x, seed=9)
                trainer.load(f"{folder}/half")
            seeded()
        trainer.step(x, y)
    trainer.flush()
    masks, outputs = networks.tape.end(), None
    if way == "processes":
        state = trainer.gather() or {}
        values = {names.get(key, key): value.clone() for key, value in state.items()}
        if segments is not None:
            values = {key: value.clone() for key, value in state.items()}
    elif segments is None:
        values, outputs = values_of(model), outputs_of(model, loss, habits)
    else:
        values = values_of(nn.ModuleList([*cut]))
        values |= {f"heads.{key}": value for key, value in values_of(nn.ModuleList(heads)).items()}
    if way != "processes":
        values |= {f"loss.{name}": value for name, value in values_of(loss).items()}
    if segments is None:
        return Trained(values, outputs, stage_of, masks, left_out)
    if way == "processes":  # which hooks do not survive
        first = [], []
    return Trained(values, outputs, stage_of, masks, left_out, stages=first[0], heads=first[1])


def before(habits, method, stages):
    """Stages and heads as they were in the processes of a local method before they trained."""
    if METHODS[method].segments is None:
        return {}
    _, _, cut, heads, _ = made(habits, method, stages, batches(habits, 1)[0][0])
    return {"stages": copied(cut), "heads": copied(heads)}


def made(habits, method, stages, x, seed=0):
    """A network, its loss, its stages, heads where the method has losses, and a Trainer of them."""
    model, loss = network(habits, seed=seed), loss_of(habits)
    cut = stretto.split(model, stages, example=x)
    heads, segments = None, METHODS[method].segments
    if segments is not None:
        torch.manual_seed(seed)
        ends = {last for _, last in segments(stages)} - {stages - 1}
        heads = [Head().double() if s in ends else None for s in range(stages)]
    return model, loss, cut, heads, stretto.Trainer(cut, loss, sgd, method, heads=heads)


def copied(modules):
    """Copies with the hooks of parameters, which copy.deepcopy leaves out."""
    before = [*modules] if modules else []
    for module in nn.ModuleList(before).modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:  # as an old weight_norm leaves it
                setattr(module, name, value.detach())
    after = copy.deepcopy(before)
    for one, two in zip(before, after, strict=True):
        for p, q in zip(one.parameters() if one else (), two.parameters() if two else (), strict=True):
            for hook in (p._backward_hooks or {}).values():
                q.register_hook(hook)
            for hook in (p._post_accumulate_grad_hooks or {}).values():
                q.register_post_accumulate_grad_hook(hook)
    return after


def names_of(cut, model):
    """The network's name of each tensor, by the name that `gather` gives it."""
    names = {id(tensor): name for name, tensor in state_of(model)}
    return {
        f"{s}.{name}": names.get(id(t), f"{s}.{name}") for s, stage in enumerate(cut) for name, t in state_of(stage)
    }


# -- plain PyTorch -----------------------------------------------------------------------------------------------------


def globally(model, judge, data, loop, pieces, stage_of, stages, again):
    """Backpropagation, each micro-batch with the versions of the weights that the method says.

    `again` makes the network of a run that goes on from HALF on.
    """
    optimizer = sgd([*model.parameters(), *parameters_of(judge)])
    versions, q = [copies(model, judge)], 0
    for n, (x, y) in enumerate(data):
        if again is not None and n == HALF:
            model, optimizer = gone_on(model, judge, optimizer, again())
            versions, q = [copies(model, judge)], 0
            seeded()
        optimizer.zero_grad()
        parts = list(zip(cut_in(x, pieces), y.tensor_split(pieces), strict=True))
        for part, target in parts:
            forward, backward = {}, {}
            for name in versions[-1]:
                ahead, back = (loop.versions or newest)(q, stages - 1 - stage_of.get(name, stages - 1))
                forward[name], backward[name] = (
                    versions[min(max(0, at), len(versions) - 1)][name] for at in (ahead, back)
                )
            put(forward, model, judge)
            value = share_of(judge, called(model, part), target, len(y))
            put(backward, model, judge)
            value.backward()
            q += 1
        put(versions[-1], model, judge)
        optimizer.step()
        versions.append(copies(model, judge))
    return model


def newest(q, s):
    return 1 << 30, 1 << 30


def parameters_of(judge):
    return [*judge.parameters()] if isinstance(judge, nn.Module) else []


def share_of(judge, output, target, rows):
    """The loss of a micro-batch in the mean over the minibatch; a loss may give a sum and a count."""
    value = judge(output, target)
    return value[0] / rows if isinstance(value, tuple) else value * len(target) / rows


def named(model, judge):
    pairs = [*model.named_parameters()]
    return pairs + [(f"loss.{name}", p) for name, p in judge.named_parameters()] if parameters_of(judge) else pairs


def copies(model, judge):
    return {name: p.detach().clone() for name, p in named(model, judge)}


def put(values, model, judge):
    """Other weights in the same storage: what a forward has kept for its backward changes as well."""
    for name, p in named(model, judge):
        p.data.copy_(values[name])


def gone_on(model, judge, optimizer, new):
    """Another network with the weights, the buffers and the extra state of one, and its optimizer's state."""
    with torch.no_grad():
        for (_, mine), (_, theirs) in zip(state_of(new), state_of(model), strict=True):
            mine.copy_(theirs)
    new.load_state_dict(copy.deepcopy(model.state_dict()))
    after = sgd([*new.parameters(), *parameters_of(judge)])
    after.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return new, after


def locally(stages, heads, judge, data, segments, restart):
    """Each loss trains its segment; what a segment is given has no history."""
    parts, fresh = nn.ModuleList([*stages, *heads]), nn.ModuleList([*copied(stages), *copied(heads)])
    optimizer = sgd([*parts.parameters(), *parameters_of(judge)])
    for n, (x, y) in enumerate(data):
        if restart and n == HALF:
            parts, optimizer = gone_on(parts, judge, optimizer, fresh)
            stages, heads = parts[: len(stages)], parts[len(stages) :]
            seeded()
        optimizer.zero_grad()
        taken, given = [], []
        current = x
        for stage in stages:
            leaves = tree_map(leaf, current)
            current = called(stage, leaves)
            taken.append(tree_leaves(leaves))
            given.append(current)
        for low, high in segments:
            output = given[high] if high == len(stages) - 1 else heads[high](*as_tuple(given[high]))
            for tensor in taken[high]:
                tensor.grad = None
            share_of(judge, output, y, len(y)).backward(retain_graph=True)
            for s in reversed(range(low, high)):
                pairs = [
                    (tensor, part.grad)
                    for tensor, part in zip(tree_leaves(given[s]), taken[s + 1], strict=True)
                    if part.grad is not None and tensor.requires_grad
                ]
                for tensor in taken[s]:
                    tensor.grad = None
                if pairs:
                    torch.autograd.backward(*zip(*pairs, strict=True), retain_graph=True)
        optimizer.step()
    return [*stages], [*heads]


def leaf(value):
    """A tensor without history, as a backward begins or ends there."""
    return value.detach().requires_grad_(value.is_floating_point())


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def cut_in(x, pieces):
    """A batch's inputs in parts."""
    if isinstance(x, dict):
        parts = [cut_in(value, pieces) for value in x.values()]
        return [dict(zip(x, part, strict=True)) for part in zip(*parts, strict=True)]
    if isinstance(x, tuple):
        return list(zip(*(cut_in(value, pieces) for value in x), strict=True))
    return x.tensor_split(pieces)


# -- comparison --------------------------------------------------------------------------------------------------------


def difference(found, values, outputs):
    """What differs most; None if nothing does."""
    missing = found.values.keys() - values.keys()
    if missing or not found.values:
        return f"a plain loop has no {sorted(missing)}"
    for name, ours in found.values.items():
        if not alike(ours, values[name]):
            return f"{name} differs by {float((ours - values[name]).abs().max()):.3g}"
    if found.outputs is None or outputs is None:
        return None
    same = all(alike(one, two) for one, two in zip(found.outputs, outputs, strict=True))
    return None if same else "the outputs in evaluation differ"


def alike(one, two):
    return torch.allclose(one, two, rtol=TOLERANCE, atol=TOLERANCE)


def outputs_of(model, judge, habits):
    """What the network says in evaluation mode."""
    seeded()
    model.eval()
    with torch.no_grad():
        return [*tree_leaves(called(model, batches(habits, STEPS)[-1][0]))]


def values_of(module):
    return {name: tensor.detach().clone() for name, tensor in state_of(module)} if isinstance(module, nn.Module) else {}


def state_of(module):
    """Parameters and buffers by name, those that state_dict leaves out included."""
    return [*module.named_parameters(), *module.named_buffers()]
