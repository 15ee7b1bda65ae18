"""Fifty things that people do when they train, from public issue trackers, on small networks.

Each function makes the two sides of one situation under a method: a plain loop, and Stretto. What is said of a source
is the report that it was made after, not a claim about that project today.
"""

import copy
import math
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

import stretto
from situations.kit import METHODS, SYNCHRONOUS, WHOLE, Loop, Sides, adamw, seeded, sgd, situation, state_of, training

W, CLASSES, ROWS, STEPS = 8, 4, 12, 4


# -- what most of them are made of ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width=W):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """A first layer, blocks, a head: as most of them look."""

    def __init__(self, blocks=4, outputs=CLASSES):
        super().__init__()
        self.first = nn.Linear(W, W)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(W, outputs)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(*shape, seed, number=CLASSES):
    return torch.randint(number, shape, generator=torch.Generator().manual_seed(seed + 100))


def examples(steps=STEPS, rows=ROWS):
    """Batches of vectors with classes."""
    return [(drawn(rows, W, seed=step), classes(rows, seed=step)) for step in range(steps)]


def sequences(steps=STEPS, rows=ROWS, lengths=(5,)):
    """Batches of sequences with a class each; their lengths alternate."""
    return [
        (drawn(rows, lengths[step % len(lengths)], W, seed=step), classes(rows, seed=step)) for step in range(steps)
    ]


def of(model: Callable[[], nn.Module], loss=F.cross_entropy):
    """What `training` makes anew for each side: a model in float64, and a loss."""
    return lambda: (model().double(), loss)


# -- models ------------------------------------------------------------------------------------------------------------


@situation("a moving average of the weights, by AveragedModel after each step", "pytorch/pytorch#94820", SYNCHRONOUS)
def situation_00(method):
    """Users keep the model and hand it to AveragedModel; the average has to be of the weights that train."""
    kept = {}

    def average(step, model, loss):
        if step == 0:
            kept["ema"] = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        kept["ema"].update_parameters(model)

    sides = training(of(Net), examples, method, each=average)

    def with_average(run):
        return run() | {f"average.{name}": value for name, value in state_of(kept["ema"].module).items()}

    return Sides(lambda: with_average(sides.plain), lambda: with_average(sides.ours))


class Byol(nn.Module):
    """A student, and a teacher that is a moving average of it, updated in the forward."""

    def __init__(self):
        super().__init__()
        self.student = nn.ModuleList(Block() for _ in range(4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Linear(W, W)

    @torch.no_grad()
    def move(self):
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(fast, 0.1)

    def forward(self, x):
        if self.training:
            self.move()
        with torch.no_grad():
            aim = x
            for block in self.teacher:
                aim = block(aim)
        for block in self.student:
            x = block(x)
        return self.predictor(x), aim


@situation("a teacher that is a moving average of the student, updated in the forward", "lucidrains/byol-pytorch")
def situation_01(method):
    """`update_moving_average` within the forward."""
    return training(of(Byol, lambda o, _: F.mse_loss(o[0], o[1])), examples, method, in_parts=True)


class Moco(nn.Module):
    """An encoder, a slow one, and a queue of keys in a buffer with a pointer."""

    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(W, 24), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, one, two):
        q = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            k = F.normalize(self.key(two), dim=1)
        same = (q * k).sum(1, keepdim=True)
        others = q @ self.queue.clone().detach()
        if self.training:
            at = int(self.pointer)
            self.queue[:, at : at + len(k)] = k.T
            self.pointer[0] = (at + len(k)) % self.queue.shape[1]
        return torch.cat([same, others], 1) / 0.2


@situation("a queue of keys in a buffer, with a pointer (MoCo)", "facebookresearch/moco#21")
def situation_02(method):
    """The queue is written in place in the forward, the pointer moves."""

    def pairs():
        return [((x, x + 0.1 * drawn(ROWS, W, seed=9)), torch.zeros(ROWS, dtype=torch.long)) for x, _ in examples()]

    return training(of(Moco), pairs, method, in_parts=True)


class Quantizer(nn.Module):
    """The nearest code, straight through, with codes that are moving averages of what came to them."""

    def __init__(self, codes=6):
        super().__init__()
        self.register_buffer("codes", torch.randn(codes, W))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x):
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        if self.training:
            hot = F.one_hot(nearest, len(self.codes)).to(x.dtype)
            self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(hot.T @ x.detach(), alpha=0.1)
            self.codes.data = self.sums / self.counts.unsqueeze(1)
        found = self.codes[nearest]
        return x + (found - x).detach(), F.mse_loss(x, found.detach(), reduction="none").mean(1)


class Vqvae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))
        self.quantizer = Quantizer()
        self.decoder = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))

    def forward(self, x):
        codes, commitment = self.quantizer(self.encoder(x))
        return self.decoder(codes), commitment


@situation("a vector quantizer, straight through, with averaged codes", "lucidrains/vector-quantize-pytorch#40")
def situation_03(method):
    """Codes are buffers that the forward replaces by `.data =`."""

    def loss(output, x):
        return F.mse_loss(output[0], x) + output[1].mean()

    return training(of(Vqvae, loss), lambda: [(x, x) for x, _ in examples()], method, in_parts=True)


class Distilled(nn.Module):
    """A frozen teacher with batch norms, kept in evaluation, inside the student's module."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.ReLU(), nn.Linear(W, CLASSES))
        self.teacher.requires_grad_(False).eval()
        self.student = Net()

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            aim = self.teacher(x)
        return self.student(x), aim


@situation("a frozen teacher with batch norms inside the module", "Lightning-AI/pytorch-lightning#2551")
def situation_04(method):
    """The teacher stays in evaluation, also after an evaluation in between."""

    def loss(output, y):
        soft = F.kl_div(
            F.log_softmax(output[0], 1), F.log_softmax(output[1], 1), reduction="batchmean", log_target=True
        )
        return F.cross_entropy(output[0], y) + soft

    return training(of(Distilled, loss), examples, method, evaluate_every=2)


class Experts(nn.Module):
    """A mixture of experts that leaves its balancing loss in an attribute."""

    def __init__(self, experts=3):
        super().__init__()
        self.gate = nn.Linear(W, experts)
        self.experts = nn.ModuleList(nn.Linear(W, W) for _ in range(experts))
        self.aux_loss = None

    def forward(self, x):
        chances = self.gate(x).softmax(1)
        hot = F.one_hot(chances.argmax(1), len(self.experts)).to(x.dtype)
        self.aux_loss = len(self.experts) * (hot.mean(0) * chances.mean(0)).sum()
        return x + sum(chances[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


@situation("a balancing loss that the forward leaves in an attribute", "pytorch/torchtitan#3000")
def situation_05(method):
    """`aux_loss` of each mixture of experts is collected by the loss after the forward."""

    def make():
        model = Net()
        for index in (1, 3):
            model.blocks[index] = Experts()
        model = model.double()

        def loss(output, y):
            mixtures = [module for module in model.modules() if isinstance(module, Experts)]
            return F.cross_entropy(output, y) + 0.1 * sum(module.aux_loss for module in mixtures)

        return model, loss

    return training(make, examples, method)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(W, 3 * W), nn.Linear(W, W)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out((q @ k.transpose(-1, -2) / math.sqrt(W) + mask).softmax(-1) @ v)


class Masked(nn.Module):
    """The mask is made when it is first needed, and again when the length changes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(4))
        self.head = nn.Linear(W, CLASSES)
        self.mask = None

    def forward(self, x):
        if self.mask is None or len(self.mask) != x.shape[1]:
            self.mask = torch.triu(torch.full((x.shape[1], x.shape[1]), -math.inf, dtype=x.dtype), 1)
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.head(x[:, -1])


@situation("a causal mask made in the first forward, again for other lengths", "pytorch/examples, word_language_model")
def situation_06(method):
    """`self.src_mask = None` until the first forward; lengths of batches alternate."""
    return training(of(Masked), lambda: sequences(lengths=(5, 7)), method)


class Rotated(nn.Module):
    """Attention with rotary tables in plain attributes, which grow with the sequences."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.cached, self.cos, self.sin = 0, None, None

    def turned(self, x):
        half = x.shape[-1] // 2
        back = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos[: x.shape[1]] + back * self.sin[: x.shape[1]]

    def forward(self, x):
        if x.shape[1] > self.cached:
            self.cached = x.shape[1]
            rates = 100.0 ** (-torch.arange(0, W, 2, dtype=x.dtype) / W)
            angles = torch.arange(self.cached, dtype=x.dtype)[:, None] * torch.cat([rates, rates])
            self.cos, self.sin = angles.cos(), angles.sin()
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out((self.turned(q) @ self.turned(k).transpose(-1, -2)).softmax(-1) @ v)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Rotated() for _ in range(4))
        self.head = nn.Linear(W, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@situation("rotary tables that grow with the longest sequence yet", "facebookresearch/xformers#728")
def situation_07(method):
    """Tables are plain attributes of each layer."""
    return training(of(Rotary), lambda: sequences(lengths=(3, 6, 4)), method)


class Stateful(nn.Module):
    """An LSTM that goes on from where the last batch ended."""

    def __init__(self):
        super().__init__()
        self.first, self.lstm, self.head = nn.Linear(W, W), nn.LSTM(W, W, batch_first=True), nn.Linear(W, CLASSES)
        self.hidden = None

    def forward(self, x):
        out, hidden = self.lstm(torch.tanh(self.first(x)), self.hidden)
        self.hidden = tuple(each.detach() for each in hidden)
        return self.head(out[:, -1])


@situation("an LSTM's state carried from batch to batch", "karpathy/char-rnn#91", (METHODS[0], METHODS[1], METHODS[3]))
def situation_08(method):
    """Row i of a batch goes on where row i of the last one ended."""
    return training(of(Stateful), sequences, method, evaluation=False)


class Packed(nn.Module):
    """A GRU over packed sequences."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, W)
        self.layers = nn.ModuleList(nn.GRU(W, W, batch_first=True) for _ in range(2))
        self.head = nn.Linear(W, CLASSES)

    def forward(self, ids, lengths):
        x = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            x, last = layer(x)
        return self.head(last[-1])


@situation("packed sequences, with lengths beside the ids", "OpenNMT/OpenNMT-py#36")
def situation_09(method):
    """Lengths of the rows travel as a tensor; batches have other longest rows."""

    def texts():
        made = []
        for step in range(STEPS):
            lengths = 1 + classes(ROWS, seed=step, number=6)
            made.append(((classes(ROWS, 6, seed=step, number=11), lengths), classes(ROWS, seed=step + 50)))
        return made

    return training(of(Packed), texts, method)


class Listed(nn.Module):
    """Activations as partials and lambdas in a plain list."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(W, W) for _ in range(3))
        self.head = nn.Linear(W, CLASSES)
        self.acts = [F.relu, partial(F.leaky_relu, negative_slope=0.2), lambda x: x * torch.sigmoid(x)]

    def forward(self, x):
        for linear, act in zip(self.linears, self.acts, strict=True):
            x = act(linear(x))
        return self.head(x)


@situation("lambdas and partials as layers in a plain list", "pytorch/pytorch#153086")
def situation_10(method):
    """After two steps one of them is replaced."""

    def replaced(step, model, loss):
        if step == 1:
            model.acts[1] = partial(F.leaky_relu, negative_slope=0.5)

    return training(of(Listed), examples, method, each=replaced if method in SYNCHRONOUS else None)


@dataclass
class Output:
    logits: torch.Tensor
    features: torch.Tensor


class Dataclassed(Net):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return Output(self.head(x), x)


@situation("a dataclass as the output", "pytorch/pytorch#124666")
def situation_11(method):
    """One that torch's pytree does not know."""

    def loss(output, y):
        return F.cross_entropy(output.logits, y) + 0.01 * output.features.pow(2).mean()

    return training(of(Dataclassed, loss), examples, method)


class Annealed(Net):
    def forward(self, x, step):
        return super().forward(x) / max(0.5, 2.0 - 0.3 * step)


@situation("a number that grows with each step as an argument of the forward", "facebookresearch/fairseq, wav2vec 2.0")
def situation_12(method):
    """`forward(x, step)` anneals by a Python number."""
    return training(of(Annealed), lambda: [((x, i), y) for i, (x, y) in enumerate(examples())], method)


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.lstm, self.head = nn.Linear(W, W), nn.LSTM(W, W), nn.Linear(W, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(torch.tanh(self.first(x)))[0][-1])


@situation("sequences with time first, as many steps as rows", "yunjey/pytorch-tutorial#196")
def situation_13(method):
    """nn.LSTM as it comes takes [T, N, W]; T equals N, so nothing looks wrong where the first dimension is cut."""
    return training(of(TimeFirst), lambda: sequences(rows=6, lengths=(6,)), method)


class AcrossRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(W, 2, 16, dropout=0.0) for _ in range(2))
        self.head = nn.Linear(W, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@situation("an encoder that attends over the batch, for want of batch_first", "IBM/TabFormer#14")
def situation_14(method):
    """nn.TransformerEncoderLayer as it comes, given [N, T, W]: the rows of a batch see each other."""
    return training(of(AcrossRows), sequences, method)


class Spectral(nn.Module):
    """Weights of complex numbers between two transforms."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(W, W, dtype=torch.complex128) / W)
        self.bias = nn.Parameter(torch.zeros(W, dtype=torch.complex128))

    def forward(self, x):
        return torch.fft.fft(x, dim=-1) @ self.weight + self.bias


class Magnitude(nn.Module):
    def forward(self, z):
        return z.abs()


@situation("weights and activations of complex numbers, clipped", "pytorch/pytorch#158753", SYNCHRONOUS)
def situation_15(method):
    """A complex layer at the end of the first stage, so that complex numbers travel."""

    def make():
        layers = nn.Linear(W, W), Spectral(), Spectral(), Magnitude(), nn.Linear(W, CLASSES)
        layers[0].double(), layers[4].double()
        return nn.Sequential(*layers), F.cross_entropy

    def cut(model):
        return [nn.Sequential(*model[:2]), nn.Sequential(*model[2:])]

    return training(make, examples, method, cut=cut, clip=0.05, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))


class Autocast(Net):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
        return self.head(x.float())


@situation("autocast in the forward", "from memory: torch.fx drops contexts", WHOLE)
def situation_16(method):
    """The blocks compute in bfloat16, the head in float32."""
    float32 = [(x.float(), y) for x, y in examples()]
    return training(lambda: (Autocast(), F.cross_entropy), lambda: copy.deepcopy(float32), method, tolerance=1e-5)


class InPlace(Net):
    def forward(self, x):
        x.sub_(x.mean(1, keepdim=True)).div_(2)
        return super().forward(x)


@situation(
    "a forward that normalises the user's batch in place", "from memory: forums on in-place normalisation", WHOLE
)
def situation_17(method):
    """The same two batches come again, and are no longer what they were."""

    def again():
        two = examples(2)
        return [*two, *two]

    return training(of(InPlace), again, method, evaluation=False)


class FrozenNorms(nn.Module):
    """Keeps the batch norms of its backbone in evaluation, whoever calls train()."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(W, CLASSES)
        self.train()

    def train(self, mode=True):
        super().train(mode)
        for layer in self.layers:
            layer[1].eval()
        return self

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@situation("train() overridden to keep batch norms in evaluation", "pgniewko/gt-pyg#112")
def situation_18(method):
    """Evaluations in between call eval(), and train() after that."""
    return training(of(FrozenNorms), examples, method, evaluate_every=1)


class Critic:
    """A critic's loss with a penalty on its gradient at points that the loss draws itself."""

    def __init__(self, net):
        self.net = net

    def __call__(self, output, between):
        between = between.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)
        return output.mean() + 10 * (slope.norm(2, dim=1) - 1).pow(2).mean()


@situation("a gradient penalty: a loss object that calls the network again", "pytorch/pytorch#2467")
def situation_19(method):
    """The penalty's double backward goes through weights of all stages."""

    def make():
        net = Net(outputs=1).double()
        return net, Critic(net)

    return training(make, lambda: [(x, x.flip(0)) for x, _ in examples()], method, evaluation=False)


class Lasso(nn.Module):
    """A loss that holds the model for a penalty on its weights."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, output, y):
        return F.cross_entropy(output, y) + 0.01 * sum(p.abs().sum() for p in self.model.parameters())


@situation("an L1 penalty by a loss module that holds the model", "from memory: forums on L1 regularisation")
def situation_20(method):
    """The loss's parameters are the model's."""

    def make():
        model = Net().double()
        return model, Lasso(model)

    return training(make, examples, method)


# -- optimizers and schedules -----------------------------------------------------------------------------------------


@situation("LBFGS, which evaluates a closure", "Lightning-AI/pytorch-lightning#246", METHODS[:2])
def situation_21(method):
    """Its step needs the closure."""

    def lbfgs(params):
        return torch.optim.LBFGS(params, lr=0.1, max_iter=3)

    sides = training(of(Net), examples, method, optimizer=lbfgs)

    def plain():
        seeded()
        model = Net().double()
        optimizer = lbfgs(model.parameters())
        for x, y in examples():

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return state_of(model)

    return Sides(plain, lambda: {name: value for name, value in sides.ours().items() if "." in name})


@situation("ReduceLROnPlateau, which needs the loss", "ContinualAI/avalanche#692")
def situation_22(method):
    """Its step takes the metric."""

    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=1.0)

    return training(of(Net), examples, method, scheduler=plateau)


@situation("groups by name over the whole model, whatever the argument", "pytorch/pytorch#101343")
def situation_23(method):
    """The function for the optimizer closes over the model and does not look at what it is given."""
    kept = {}

    def make():
        kept["model"] = Net().double()
        return kept["model"], F.cross_entropy

    def by_name(params):
        named = list(kept["model"].named_parameters())
        decayed = [p for name, p in named if name.endswith("weight")]
        others = [p for name, p in named if not name.endswith("weight")]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}], lr=0.01
        )

    return training(make, examples, method, optimizer=by_name)


@situation("hooks around the optimizer's step: clipped by value, weights clamped", "martinarjovsky/WassersteinGAN")
def situation_24(method):
    """register_step_pre_hook and register_step_post_hook."""

    def hooked(params):
        optimizer = torch.optim.RMSprop(params, lr=0.01)
        owned = [p for group in optimizer.param_groups for p in group["params"]]

        def clamp(*_):
            with torch.no_grad():
                for p in owned:
                    p.clamp_(-0.3, 0.3)

        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(owned, 0.01))
        optimizer.register_step_post_hook(clamp)
        return optimizer

    return training(of(Net), examples, method, optimizer=hooked)


@situation("a rate that the user sets by hand before each step", "from memory: warm-up loops", SYNCHRONOUS)
def situation_25(method):
    """Through `param_groups`, as in a loop of one's own."""

    def ours():
        seeded()
        model = Net().double()
        trainer = stretto.Trainer(stretto.split(model, 2, example=examples()[0][0]), F.cross_entropy, adamw, method)
        for step, (x, y) in enumerate(examples()):
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"], group["weight_decay"] = 0.01 * (step + 1), 0.1 / (step + 1)
            trainer.step(x, y)
        return state_of(model)

    def plain():
        seeded()
        model = Net().double()
        loop = Loop(model, F.cross_entropy, adamw)
        for step, (x, y) in enumerate(examples()):
            for group in loop.optimizer.param_groups:
                group["lr"], group["weight_decay"] = 0.01 * (step + 1), 0.1 / (step + 1)
            loop.step(x, y)
        return state_of(model)

    return Sides(plain, ours)


@situation("pretrained weights loaded after the Trainer was made", "deepspeedai/DeepSpeed#762",
           (*METHODS, "backprop, precision=bf16", "pipedream, precision=bf16"))  # fmt: skip
def situation_26(method):
    """Masters and stashed versions may still hold the weights of before. In bf16 one step must start from them."""
    name, _, precision = method.partition(", precision=")
    steps = 1 if precision else STEPS
    dtype = torch.float32 if precision else torch.float64

    def pretrained():
        torch.manual_seed(11)
        return Net().to(dtype).state_dict()

    def batches():
        return [(x.to(dtype), y) for x, y in examples(steps)]

    def ours():
        seeded()
        model = Net().to(dtype)
        stages = stretto.split(model, 2, example=batches()[0][0])
        trainer = stretto.Trainer(stages, F.cross_entropy, sgd, name, precision=precision or None)
        owners = {id(p): s for s in (1, 0) for p in stages[s].parameters()}
        delays.update({name: 1 - owners[id(p)] for name, p in model.named_parameters()})
        model.load_state_dict(pretrained())
        for x, y in batches():
            trainer.step(x, y)
        trainer.flush()
        return {name: value.to(dtype) for name, value in state_of(model).items()}

    delays = {}

    def plain():
        model = Net().to(dtype)
        model.load_state_dict(pretrained())
        loop = Loop(model, F.cross_entropy, sgd, late=delays if name == "pipedream" else None)
        for x, y in batches():
            loop.step(x, y)
        return state_of(model)

    return Sides(plain, ours, 1e-9 if not precision else 2e-2)


@situation("torch.nn.utils.prune, again while training", "pytorch/pytorch#24076")
def situation_27(method):
    """A mask as a buffer, a pre-hook that computes the weight; after two steps more is pruned."""
    from torch.nn.utils import prune

    def make():
        model = Net().double()
        prune.l1_unstructured(model.blocks[1].linear, "weight", amount=0.3)
        return model, F.cross_entropy

    def more(step, model, loss):
        if step == 1:
            prune.l1_unstructured(model.blocks[1].linear, "weight", amount=0.3)

    return training(make, examples, method, each=more if method in SYNCHRONOUS else None)


# -- losses ----------------------------------------------------------------------------------------------------------


class Perceptual(nn.Module):
    """Distances of features of a frozen network with batch norms and dropout, which is in evaluation."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.Dropout(0.5), nn.ReLU(), nn.Linear(W, W))
        self.features.requires_grad_(False).eval()

    def forward(self, output, x):
        return F.l1_loss(output, x) + F.mse_loss(self.features(output), self.features(x))


@situation("a perceptual loss: a frozen network in the loss", "junyanz/pytorch-CycleGAN-and-pix2pix#822")
def situation_28(method):
    """It must not train, nor change its modes or statistics."""

    def make():
        return Net(outputs=W).double(), Perceptual().double()

    return training(make, lambda: [(x, x) for x, _ in examples()], method, evaluate_every=2)


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.GRU(W, W, batch_first=True) for _ in range(2))
        self.head = nn.Linear(W, CLASSES + 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x).log_softmax(-1).transpose(0, 1)


@situation("CTC: outputs with time first, lengths in the targets", "SeanNaren/warp-ctc#78")
def situation_29(method):
    """Outputs are [T, N, C], and T equals N."""

    def loss(output, y):
        return F.ctc_loss(output, y[0], y[1], y[2], blank=CLASSES)

    def utterances():
        made = []
        for step, (x, _) in enumerate(sequences(rows=8, lengths=(8,))):
            said = 1 + classes(8, seed=step + 7, number=3)
            made.append((x, (classes(8, 3, seed=step), torch.full((8,), 8), said)))
        return made

    return training(of(Speech, loss), utterances, method)


class Centered(nn.Module):
    """A loss with a moving center of the outputs, and a count of its calls that anneals it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, CLASSES))
        self.calls = 0

    def forward(self, output, y):
        self.calls += 1
        value = F.cross_entropy((output - self.center) * (1 + 0.1 * self.calls), y)
        with torch.no_grad():
            self.center.mul_(0.9).add_(output.mean(0, keepdim=True), alpha=0.1)
        return value


@situation("a loss with a moving center and a count of its calls (DINO)", "lightly-ai/lightly#2062")
def situation_30(method):
    """Each call changes it: what looks at a loss by calling it must leave it alone."""
    made = []

    def make():
        made.append(Centered().double())
        return Net().double(), made[-1]

    sides = training(make, examples, method, evaluation=False, in_parts=True)
    return Sides(lambda: sides.plain() | {"calls": made[-1].calls}, lambda: sides.ours() | {"calls": made[-1].calls})


@situation("soft targets with class weights and smoothing", "pytorch/pytorch#61044")
def situation_31(method):
    """For probabilities torch's mean is over examples, whatever the weights."""
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)

    def mixed():
        return [(x, torch.softmax(drawn(ROWS, CLASSES, seed=i + 20), 1)) for i, (x, _) in enumerate(examples())]

    return training(of(Net, nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1)), mixed, method)


@situation("class weights and smoothing of a criterion that change while training", "kaidic/LDAM-DRW")
def situation_32(method):
    """Deferred re-weighting: `criterion.weight = ...` after some steps."""

    def make():
        return Net().double(), nn.CrossEntropyLoss(label_smoothing=0.2)

    def reweighted(step, model, loss):
        if step == 1:
            loss.weight = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
            loss.label_smoothing = 0.0

    return training(make, examples, method, each=reweighted if method in SYNCHRONOUS else None)


@situation("mse_loss of [N, 1] and [N], which broadcasts", "pytorch/pytorch#16045")
def situation_33(method):
    """A mean over all pairs of examples."""
    return training(of(lambda: Net(outputs=1), nn.MSELoss()), lambda: [(x, x.sum(1)) for x, _ in examples()], method)


# -- more models -------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed = nn.Embedding(9, W, **options)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(W, CLASSES)

    def forward(self, ids):
        x = self.embed(ids).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def texts(steps=STEPS):
    return [(classes(ROWS, 5, seed=step + 30, number=9), classes(ROWS, seed=step)) for step in range(steps)]


@situation("an embedding with max_norm, which shrinks its weights in the forward", "pytorch/pytorch#37246")
def situation_34(method):
    """The forward changes weights in place."""
    return training(of(lambda: Words(max_norm=1.0)), texts, method)


@situation("scale_grad_by_freq, which counts in the batch", "pytorch/pytorch#84491")
def situation_35(method):
    """A row's gradient is divided by how often it comes in the minibatch."""
    return training(of(lambda: Words(scale_grad_by_freq=True)), texts, method)


class Augmented(Dataset):
    """Items that draw noise from torch's generator."""

    def __init__(self, start, stop):
        self.rows = range(start, stop)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return drawn(W, seed=row) + 0.1 * torch.randn(W, dtype=torch.float64), row % CLASSES


@situation("shuffled training and validation loaders that share torch's generator", "pytorch/pytorch#80119",
           METHODS[:2])  # fmt: skip
def situation_36(method):
    """What validation draws changes the order of the next epoch."""

    def loaders():
        return (
            DataLoader(Augmented(0, 40), batch_size=8, shuffle=True),
            DataLoader(Augmented(40, 56), batch_size=8, shuffle=True),
        )

    def ours():
        seeded()
        model = Net().double()
        stages = stretto.split(model, 2, example=drawn(8, W, seed=0))
        trainer = stretto.Trainer(stages, F.cross_entropy, sgd, method)
        train, validation = loaders()
        seeded()
        history = trainer.fit(train, validation, epochs=3, quiet=True)
        return state_of(model) | {"validation": history.validation_loss}

    def plain():
        seeded()
        model = Net().double()
        loop = Loop(model, F.cross_entropy, sgd)
        train, validation = loaders()
        seeded()
        losses = []
        for _ in range(3):
            for x, y in train:
                loop.step(x, y)
            losses.append(sum(loop.evaluate(x, y) * len(y) for x, y in validation) / 16)
        return state_of(model) | {"validation": losses}

    return Sides(plain, ours)


@situation("batches of uneven lengths accumulated, inside transformers", "huggingface/transformers#34191",
           ("1f1b", "gpipe(microbatches=2)"))  # fmt: skip
def situation_37(method):
    """Tokens that are padding count for nothing, over all batches of a step."""
    import transformers

    def gpt2():
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)

    def rows():
        made = []
        for row in range(24):
            length = 3 + (7 * row) % 9
            made.append({"input_ids": classes(length, seed=row, number=31)})
        return made

    def collate(items):
        longest = max(len(item["input_ids"]) for item in items)
        ids = torch.stack([F.pad(item["input_ids"], (0, longest - len(item["input_ids"]))) for item in items])
        mask = torch.stack(
            [F.pad(torch.ones_like(item["input_ids"]), (0, longest - len(item["input_ids"]))) for item in items]
        )
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def run(kind, **options):
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=0.01,
                lr_scheduler_type="constant", report_to="none", use_cpu=True, logging_steps=1, save_strategy="no",
                disable_tqdm=True, remove_unused_columns=False,
            )  # fmt: skip
            trainer = kind(gpt2(), arguments, train_dataset=rows(), data_collator=collate, **options)
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            return state_of(trainer.model) | {"losses": losses}

    def ours():
        from stretto.transformers import StrettoTrainer

        return run(StrettoTrainer, method=method, stages=2)

    return Sides(lambda: run(transformers.Trainer), ours, 1e-5)


@situation("a weight of the loss that grows with the epoch, and norms frozen at each epoch's start, inside Lightning",
           "Lightning-AI/pytorch-lightning#2551", ("backprop", "gpipe(microbatches=2)"))  # fmt: skip
def situation_38(method):
    """`self.current_epoch` in training_step; on_train_epoch_start puts batch norms into evaluation."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.Tanh()) for _ in range(3)]
            self.net = nn.Sequential(*layers, nn.Linear(W, CLASSES)).double()

        def forward(self, x):
            return self.net(x)

        def on_train_epoch_start(self):
            for module in self.net.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()

        def training_step(self, batch, batch_idx):
            output = self(batch[0])
            beta = 0.1 * self.current_epoch
            loss = F.cross_entropy(output, batch[1]) + beta * output.pow(2).mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def run(**options):
        x, y = drawn(32, W, seed=5), classes(32, seed=5)
        loader = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
        module = Module()
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip
        trainer.fit(module, loader, loader)
        return state_of(module) | {"val_loss": float(trainer.callback_metrics["val_loss"])}

    def ours():
        from stretto.lightning import StrettoStrategy

        return run(strategy=StrettoStrategy(method, stages=2))

    return Sides(run, ours)


@situation("a block compiled in place", "pytorch/torchtitan, apply_compile")
def situation_39(method):
    """`block.compile()` before the model is cut."""

    def make():
        model = Net().double()
        for block in model.blocks:
            block.compile(backend="eager")
        return model, F.cross_entropy

    return training(make, examples, method)


class OneBatch(Net):
    def forward(self, batch):
        return super().forward(batch["x"]) * batch["scale"]


@situation("a forward that takes the batch's dict as its one argument", "from memory: Lightning's examples of batches",
           SYNCHRONOUS)  # fmt: skip
def situation_40(method):
    """`model(batch)`, not `model(**batch)`."""

    def batches():
        return [({"x": x, "scale": 1 + drawn(ROWS, 1, seed=i).abs()}, y) for i, (x, y) in enumerate(examples())]

    sides = training(of(OneBatch), batches, method)

    def plain():
        seeded()
        model = OneBatch().double()
        loop = Loop(model, F.cross_entropy, sgd)
        wrapped = [((batch,), y) for batch, y in batches()]
        losses = [loop.step(x, y) for x, y in wrapped]
        return state_of(model) | {"losses": losses, "evaluation": loop.evaluate(*wrapped[-1])}

    return Sides(plain, sides.ours)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(W, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@situation("a model in evaluation mode that trains", "Lightning-AI/pytorch-lightning#20986")
def situation_41(method):
    """`model.eval()` before training: no dropout, fixed statistics."""
    return training(lambda: (Dropping().double().eval(), F.cross_entropy), examples, method, evaluate_every=2)


class Tasks(nn.Module):
    """One head for each task; the batch says which."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"0": nn.Linear(W, CLASSES), "1": nn.Linear(W, CLASSES)})

    def forward(self, x, task):
        return self.heads[str(int(task[0]))](x)


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.tasks = Tasks()

    def forward(self, x, task):
        for block in self.blocks:
            x = block(x)
        return self.tasks(x, task)


@situation("heads by task: some parameters have no gradient in some steps", "pytorch/pytorch#28294")
def situation_42(method):
    """AdamW leaves alone what has no gradient: no decay, no moving average."""

    def batches():
        return [((x, torch.full((ROWS,), (i // 2) % 2)), y) for i, (x, y) in enumerate(examples(6))]

    return training(of(MultiTask), batches, method, optimizer=adamw)


@situation("a GAN: two Trainers that share the discriminator, requires_grad switched between them",
           "junyanz/pytorch-CycleGAN-and-pix2pix#651", METHODS[:2])  # fmt: skip
def situation_43(method):
    """`set_requires_grad(net_D, False)` while the generator trains."""

    def nets():
        seeded()
        generator = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W)).double()
        discriminator = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, 1)).double()
        return generator, discriminator

    ones, zeros = torch.ones(ROWS, 1, dtype=torch.float64), torch.zeros(ROWS, 1, dtype=torch.float64)
    loss = F.binary_cross_entropy_with_logits

    def ours():
        generator, discriminator = nets()
        trains_d = stretto.Trainer([*discriminator], loss, sgd, method)
        discriminator.requires_grad_(False)
        trains_g = stretto.Trainer([*generator, *discriminator], loss, sgd, method)
        for step, (z, _) in enumerate(examples()):
            real = drawn(ROWS, W, seed=step + 40)
            discriminator.requires_grad_(True)
            with torch.no_grad():
                fake = generator(z)
            trains_d.step(torch.cat([real, fake]), torch.cat([ones, zeros]))
            discriminator.requires_grad_(False)
            trains_g.step(z, ones)
        return {"g" + k: v for k, v in state_of(generator).items()} | {
            "d" + k: v for k, v in state_of(discriminator).items()
        }

    def plain():
        generator, discriminator = nets()
        one, two = sgd(discriminator.parameters()), sgd(generator.parameters())
        for step, (z, _) in enumerate(examples()):
            real = drawn(ROWS, W, seed=step + 40)
            discriminator.requires_grad_(True)
            with torch.no_grad():
                fake = generator(z)
            one.zero_grad()
            loss(discriminator(torch.cat([real, fake])), torch.cat([ones, zeros])).backward()
            one.step()
            discriminator.requires_grad_(False)
            two.zero_grad()
            loss(discriminator(generator(z)), ones).backward()
            two.step()
        return {"g" + k: v for k, v in state_of(generator).items()} | {
            "d" + k: v for k, v in state_of(discriminator).items()
        }

    return Sides(plain, ours)


class FixedBatch(nn.Module):
    """Knows how many rows a batch has."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows
        self.first, self.gru, self.head = nn.Linear(W, W), nn.GRU(W, W, batch_first=True), nn.Linear(W, CLASSES)

    def init_hidden(self):
        return torch.zeros(1, self.rows, W, dtype=torch.float64)

    def forward(self, x):
        out, _ = self.gru(torch.tanh(self.first(x)), self.init_hidden())
        return self.head(out[:, -1])


@situation("a batch size written into the model", "sgadgil6/cnslab_fmri#4")
def situation_44(method):
    """`init_hidden` makes zeros for so many rows."""
    return training(of(lambda: FixedBatch(ROWS)), sequences, method)


class GivenMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(W, CLASSES)

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x[:, -1])


@situation("one mask [T, T] for all rows as an input, as many steps as rows", "pytorch/pytorch#116400")
def situation_45(method):
    """Where the first dimension of all inputs is cut, the mask is cut, too."""

    def batches():
        mask = torch.triu(torch.full((6, 6), -math.inf, dtype=torch.float64), 1)
        return [((x, mask), y) for x, y in sequences(rows=6, lengths=(6,))]

    return training(of(GivenMask), batches, method)


@situation("averaged weights put in by p.data for an evaluation, and taken out", "Lightning-AI/pytorch-lightning#21724")
def situation_46(method):
    """store, copy, evaluate, restore, by replacing `.data`."""

    def shadows(model):
        return {name: 0.5 * p.detach() for name, p in model.named_parameters()}

    delays = {}

    def with_shadows(model, evaluate):
        kept = {name: p.data for name, p in model.named_parameters()}
        for name, value in shadows(model).items():
            model.get_parameter(name).data = value
        found = evaluate()
        for name, value in kept.items():
            model.get_parameter(name).data = value
        return found

    def ours():
        seeded()
        model = Net().double()
        stages = stretto.split(model, 2, example=examples()[0][0])
        trainer = stretto.Trainer(stages, F.cross_entropy, sgd, method)
        owners = {id(p): s for s in (1, 0) for p in stages[s].parameters()}
        delays.update({name: 1 - owners[id(p)] for name, p in model.named_parameters()})
        evaluated = []
        for half in (examples()[:2], examples()[2:]):
            for x, y in half:
                trainer.step(x, y)
            trainer.flush()
            evaluated.append(with_shadows(model, lambda: trainer.evaluate([examples()[0]])["loss"]))
        return state_of(model) | {"evaluated": evaluated}

    def plain():
        seeded()
        model = Net().double()
        loop = Loop(model, F.cross_entropy, sgd, late=delays if method == "pipedream" else None)
        evaluated = []
        for half in (examples()[:2], examples()[2:]):
            loop.versions.clear()  # a flush: what enters next sees the newest weights
            for x, y in half:
                loop.step(x, y)
            evaluated.append(with_shadows(model, lambda: loop.evaluate(*examples()[0])))
        return state_of(model) | {"evaluated": evaluated}

    return Sides(plain, ours)


class Builder:
    """Builds networks of the width that it has now."""

    def __init__(self, width):
        self.width = width

    def __call__(self):
        return [nn.Sequential(nn.Linear(W, self.width), nn.Tanh()), nn.Linear(self.width, CLASSES)]


@situation("a sweep: the same builder with another width, into the same folder", "from memory: sweeps over a config",
           ("backprop",))  # fmt: skip
def situation_47(method):
    """The second run must not be the first one's."""
    x, y = drawn(64, W, seed=1).float(), classes(64, seed=1)
    data = (x[:48], y[:48]), (x[48:], y[48:])
    settings = {"loss": "cross_entropy", "lr": 0.05, "steps": 4, "batch_size": 8, "evaluations": 1, "quiet": True}

    def ours():
        build, widths = Builder(4), []
        with tempfile.TemporaryDirectory() as folder:
            for width in (4, 16):
                build.width = width
                run = stretto.train(build, data, method=method, out=f"{folder}/run", **settings)
                widths.append(max(value.shape[0] for value in run.weights().values()))
        return {"widths": widths}

    def plain():
        build, widths = Builder(4), []
        for width in (4, 16):
            build.width = width
            model = nn.Sequential(*build())
            loop = Loop(model, F.cross_entropy, sgd)
            for rows in torch.arange(32).split(8):
                loop.step(x[rows], y[rows])
            widths.append(max(value.shape[0] for value in model.state_dict().values()))
        return {"widths": widths}

    return Sides(plain, ours)


@situation("the root's forward replaced on the object", "pytorch/pytorch#177521")
def situation_48(method):
    """`model.forward = MethodType(...)`, as libraries patch models."""

    def make():
        model = Net().double()

        def forward(self, x):
            return type(self).forward(self, 0.5 * x) * 2

        model.forward = types.MethodType(forward, model)
        return model, F.cross_entropy

    return training(make, examples, method)


@situation("a block's forward wrapped on the object, and unwrapped later", "huggingface/diffusers#14135")
def situation_49(method):
    """As accelerate's and diffusers' hooks do: `block.forward = partial(wrapper, block.forward)`."""

    def doubled(inner, x):
        return 2 * inner(x)

    def make():
        model = Net().double()
        model.blocks[1].forward = partial(doubled, model.blocks[1].forward)
        return model, F.cross_entropy

    def unwrapped(step, model, loss):
        if step == 1:
            del model.blocks[1].forward

    return training(make, examples, method, each=unwrapped if method in SYNCHRONOUS else None)
