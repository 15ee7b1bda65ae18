"""Whole networks in training mode under a method, beside a plain loop: each gradient of each update, and the end."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import stretto
from habits import image_networks, language_models, tutorial_networks
from habits.judge import Verdict, cut_in
from stretto.nn.seeding import derive

METHODS = {"backprop": 1, "gpipe(microbatches=2)": 2, "1f1b(microbatches=3)": 3, "pipedream": 1, "greedy": 1}
STEPS, ROWS = 3, 6
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    """A network with its batches; `loss` is Stretto's, `value` gives the plain loop's sum and count.

    `blocks` names the list of blocks of a network where each takes from those before it the last one's output alone, so
    that a stage may have a loss of its own, by a head of the kind `head`.
    """

    build: Callable[..., torch.nn.Module]
    batches: Callable[..., list]
    loss: Callable[..., Any]
    value: Callable[..., Any]
    blocks: str = ""
    head: str = ""


def cross_entropy(output, target):
    """The sum over classes that count, and how many those are; classes are the last dimension of a text's logits."""
    if target.dim() == 2:
        output = output.transpose(1, 2)
    return F.cross_entropy(output, target, ignore_index=-100, reduction="sum"), int((target != -100).sum())


def next_word(output, target):
    return cross_entropy(output[:, :-1], target[:, 1:])


def with_auxiliary(one, output, target):
    """A classifier's loss, and 0.4 times that of its auxiliary logits."""
    main, auxiliary = (one(each, target) for each in output)
    if isinstance(main, tuple):
        return main[0] + 0.4 * auxiliary[0], main[1]
    return main + 0.4 * auxiliary


def first(output, target):
    return cross_entropy(output[0], target)


def images(name, number, rows, seed=1):
    drawn, target = torch.Generator().manual_seed(seed), (8, 8) if name == "U-Net" else ()
    return [
        (
            torch.randn(rows, 3, 8, 8, generator=drawn, dtype=torch.float64),
            torch.randint(image_networks.CLASSES, (rows, *target), generator=drawn),
        )
        for _ in range(number)
    ]


def pixels(output, target):
    return F.cross_entropy(output, target, reduction="sum"), target.numel()


def of_images(name):
    loss, value = F.cross_entropy, pixels
    if "auxiliary" in name and "without" not in name:
        loss, value = (partial(with_auxiliary, each) for each in (loss, value))
    build, blocks = partial(image_networks.network, name), image_networks.BLOCKS.get(name, "")
    return Case(build, partial(images, name), loss, value, blocks, "sequence" if blocks == "blocks" else "pooled")


def of_text(name):
    kind = language_models.KINDS[name]
    loss = {
        "causal": stretto.losses.next_token_cross_entropy, "images": F.cross_entropy, "classes": F.cross_entropy,
    }.get(kind.task, stretto.losses.token_cross_entropy)  # fmt: skip
    value = next_word if kind.task == "causal" else cross_entropy
    build, batches = (partial(each, name) for each in (language_models.network, language_models.batches))
    if kind.task == "pairs":  # the model gives what its encoder made, too
        loss = value = first
    head = "language" if kind.task == "causal" else "sequence"
    return Case(build, batches, loss, value, kind.blocks, head)


def of_tutorials(name):
    build, batches = (partial(each, name) for each in (tutorial_networks.network, tutorial_networks.batches))
    loss = F.cross_entropy if tutorial_networks.NETWORKS[name][1] == "classes" else stretto.losses.token_cross_entropy
    return Case(build, batches, loss, cross_entropy)


OF = {
    "torch": (of_tutorials, tutorial_networks.NETWORKS),
    "images": (of_images, image_networks.NETWORKS),
    "transformers": (of_text, language_models.KINDS),
}
NAMES = [f"{origin}: {name}" for origin, (_, names) in OF.items() for name in names]


def case_of(name):
    """The case of a name in NAMES."""
    origin, _, network = name.partition(": ")
    return OF[origin][0](network)


class Noting(torch.optim.SGD):
    """Notes the gradients of each of its steps, by parameter."""

    def __init__(self, params, noted):
        super().__init__(params, lr=0.05, momentum=0.9)
        self.noted = noted

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = None if parameter.grad is None else parameter.grad.clone()
                self.noted.setdefault(id(parameter), []).append(gradient)
        return super().step(closure)


class Draws(TorchDispatchMode):
    """Counts what is drawn from torch's generator; after as many draws as `seeds` has an entry for, seeds it.

    At once after the draw before: what a checkpoint computes again begins with the generator as it was.
    """

    def __init__(self, seeds=()):
        super().__init__()
        self.seeds, self.count = dict(seeds), 0
        if 0 in self.seeds:
            torch.manual_seed(self.seeds[0])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name():  # these draw by others
            self.count += 1
            if self.count in self.seeds:
                torch.manual_seed(self.seeds[self.count])
        return result


class InFloat64(TorchDispatchMode):
    """What norms, rotary tables and routers of transformers compute in float32 stays in float64, to be compared."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": args[0].dtype if args[0].dtype is torch.float64 else torch.float32}
        if func is torch.ops.aten._assert_tensor_metadata.default:  # of an exported graph
            return None
        return func(*args, **kwargs)


class Trained:
    """A network in stages, which one method after the other trains from the same weights, and plain loops beside it."""

    def __init__(self, case, stages, rows=ROWS, seed=0):
        self.case, self.num_stages, self.seed = case, stages, seed
        self.model, self.data = case.build(seed), case.batches(STEPS, rows, seed + 1)
        self.state = copy.deepcopy(self.model.state_dict())
        self.cuts = {}

    def stages(self, path):
        """Its stages, cut between the blocks at `path` or as Stretto chooses."""
        if path not in self.cuts:
            self.cuts[path] = stretto.split(self.model, self.num_stages, example=self.data[0][0], path=path)
        return self.cuts[path]

    def verdict(self, method):
        """What becomes of the network under a method."""
        local, noted, x = method == "greedy", {}, self.data[0][0]
        self.model.load_state_dict(self.state)
        self.model.train()
        try:
            stages = self.stages(self.case.blocks if local else None)
            name = f"greedy(head={self.case.head})" if local else method
            trainer = stretto.Trainer(stages, self.case.loss, partial(Noting, noted=noted), name, example=x)
            heads = [copy.deepcopy(head) for head in trainer.heads] if local else []
            draws = drawn_by(stages, x)
            with InFloat64():
                for each in self.data:
                    trainer.step(*each)
                trainer.flush()
        except stretto.UsageError as error:
            return Verdict("refused", f"{error}")
        plain = Plain(self.case, self.case.build(self.seed), self.data, METHODS[method], draws)
        with InFloat64():
            if local:
                wanted = plain.locally(heads, stages.bounds)
            else:
                wanted = plain.delayed(self.owners(stages)) if method == "pipedream" else plain.synchronously()
        found = {name: noted.get(id(p), []) for name, p in self.model.named_parameters()}
        for s, head in enumerate(trainer.heads if local else []):
            found |= {f"heads.{s}.{key}": noted[id(p)] for key, p in (head.named_parameters() if head else ())}
        said = difference(self.model, plain.model, found, wanted, self.data[-1][0])
        return Verdict("equal", "") if said is None else Verdict("SILENT", said)

    def owners(self, stages):
        """The first stage that has a parameter, by name."""
        first = {id(p): s for s in reversed(range(len(stages))) for p in stages[s].parameters()}
        return {name: first.get(id(p), len(stages) - 1) for name, p in self.model.named_parameters()}


def verdict(name, method, stages=2):
    """What becomes of a network of NAMES."""
    return Trained(case_of(name), stages).verdict(method)


def methods_of(name):
    """The methods that a network is trained under."""
    return [method for method in METHODS if method != "greedy" or case_of(name).blocks]


def drawn_by(cut, x):
    """How often each stage draws in a forward."""
    values, counts = x, []
    with torch.no_grad():
        for stage in copy.deepcopy(list(cut)):
            with Draws() as draws:
                values = called(stage, values)
            counts.append(draws.count)
    return counts


def called(module, x):
    if isinstance(x, dict):
        return module(**x)
    return module(*x) if isinstance(x, tuple) else module(x)


class Plain:
    """Loops of plain PyTorch; each stage's random numbers are those of its seed for the micro-batch."""

    def __init__(self, case, model, data, pieces, draws):
        self.case, self.model, self.data, self.pieces, self.stages = case, model, data, pieces, len(draws)
        self.begins = {sum(draws[:s]): s for s in range(len(draws)) if draws[s]}
        self.draws = sum(draws)
        self.noted = {}

    def output(self, call, number):
        """The model's output for a micro-batch."""
        seeds = {first: derive(derive(0, "forward", s), number) for first, s in self.begins.items()}
        with Draws(seeds) as draws:
            output = call()
        assert draws.count == self.draws
        if not hasattr(output, "keys"):
            return output
        return (output.logits,) if self.case.value is first else output.logits

    def synchronously(self):
        """A step for each minibatch; gradients of its micro-batches are added up."""
        optimizer = Noting(self.model.parameters(), self.noted)
        for t, (x, y) in enumerate(self.data):
            optimizer.zero_grad()
            parts = list(zip(cut_in(x, self.pieces), y.tensor_split(self.pieces), strict=True))
            values = []
            for m, (part, target) in enumerate(parts):
                output = self.output(partial(called, self.model, part), t * self.pieces + m)
                values.append(self.case.value(output, target))
            whole = sum(count for _, count in values)
            for total, _ in values:
                (total / whole).backward()
            optimizer.step()
        return self.gradients()

    def delayed(self, stage_of):
        """PipeDream: in minibatch t, stage s computes with the weights after t - (S - 1 - s) updates."""
        optimizer, named = Noting(self.model.parameters(), self.noted), dict(self.model.named_parameters())
        versions = [{name: p.detach().clone() for name, p in named.items()}]
        for t, (x, y) in enumerate(self.data):
            version = {name: max(0, t - (self.stages - 1 - stage_of[name])) for name in named}
            seen = {
                name: versions[version[name]][name].clone().requires_grad_(p.requires_grad) for name, p in named.items()
            }
            args, kwargs = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})
            total, count = self.case.value(self.output(partial(functional_call, self.model, seen, args, kwargs), t), y)
            (total / count).backward()
            for name, p in named.items():
                p.grad = seen[name].grad
            optimizer.step()
            versions.append({name: p.detach().clone() for name, p in named.items()})
        return self.gradients()

    def locally(self, heads, bounds):
        """Greedy: what leaves the last block of a stage has a loss of its own by a head, and no gradient comes back."""
        blocks, losses = self.model.get_submodule(self.case.blocks), []
        parameters = [*self.model.parameters(), *(p for head in heads if head for p in head.parameters())]
        optimizer = Noting(parameters, self.noted)

        def part(head, block, args, output):
            losses.append(head(output[0] if isinstance(output, tuple) else output))
            return torch.utils._pytree.tree_map(torch.Tensor.detach, output)

        for head, bound in zip(heads, bounds[1:], strict=True):
            if head is not None:
                blocks[bound - 1].register_forward_hook(partial(part, head))
        for t, (x, y) in enumerate(self.data):
            optimizer.zero_grad()
            losses.clear()
            output = self.output(partial(called, self.model, x), t)
            for each in (*losses, output):
                total, count = self.case.value(each, y)
                (total / count).backward()
            optimizer.step()
        for block in blocks:
            block._forward_hooks.clear()
        return self.gradients() | {
            f"heads.{s}.{key}": self.noted[id(p)]
            for s, head in enumerate(heads)
            for key, p in (head.named_parameters() if head else ())
        }

    def gradients(self):
        return {name: self.noted[id(p)] for name, p in self.model.named_parameters()}


def difference(model, plain, found, wanted, x):
    """What differs first; None if nothing does."""
    if found.keys() != wanted.keys():
        return f"other parameters: {sorted(found.keys() ^ wanted.keys())}"
    for name, theirs in wanted.items():
        ours = found[name] or [None] * len(theirs)
        if len(ours) != len(theirs):
            return f"{name} has {len(ours)} updates instead of {len(theirs)}"
        for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if (one is None) != (other is None) or (one is not None and not near(one, other)):
                off = "its presence" if one is None or other is None else float((one - other).abs().max())
                return f"the gradient of {name} in update {step} differs by {off}"
    for (name, ours), (_, theirs) in zip(states(model), states(plain), strict=True):
        if not near(ours, theirs):
            return f"{name} differs by {float((ours - theirs).detach().abs().max()):.3g}"
    outputs = []
    for each in (model.eval(), plain.eval()):  # with gradients: without any, torch's transformers take another kernel
        leaves = torch.utils._pytree.tree_leaves(called(each, x))
        outputs.append([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    same = len(outputs[0]) == len(outputs[1]) and all(map(near, *outputs))
    return None if same else "the outputs in evaluation differ"


def states(module):
    return [*module.named_parameters(), *module.named_buffers()]


def near(one, other):
    scale = max(1.0, float(other.detach().abs().max())) if other.numel() else 1.0
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
