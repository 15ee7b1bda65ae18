"""Scripts whose stages several processes share, and which know nothing of processes."""

import os

import torch
from torch import nn

import stretto
from runtime.scripts import gone_on, saved_half_way, weights_of

WORDS, WIDTH = 12, 8


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(6, WIDTH)

    def forward(self, x):
        return self.words(x) + self.places(torch.arange(x.shape[1]))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.out(self.norm(x)).transpose(1, 2)


def transformer():
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
    return [Embedding(), *layers, Head()]


def convolutions():
    return [
        nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 6, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(8, 4),
    ]  # fmt: skip


def pixels():
    return [nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.ReLU()), nn.Conv2d(4, 4, 3, padding=1)]


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm, self.second = nn.BatchNorm2d(outputs), nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.last_norm, self.short = nn.BatchNorm2d(outputs), nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x):
        y = self.last_norm(self.second(torch.relu(self.norm(self.first(x)))))
        return torch.relu(y + self.short(x))


def residual():
    return [
        nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(inplace=True), Residual(5, 6)),
        nn.Sequential(Residual(6, 7, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 4)),
    ]


NETWORKS = {"transformer": transformer, "convolutions": convolutions, "pixels": pixels, "residual": residual}


def batches(network, number, size=14):
    generator = torch.Generator().manual_seed(7)
    for _ in range(number):
        if network == "transformer":
            words = torch.randint(WORDS, (size, 6), generator=generator)
            yield words, words.roll(1, 1)
        else:
            images = torch.randn(size, 3, 11, 9, generator=generator).double()
            target = (size, 11, 9) if network == "pixels" else (size,)
            yield images, torch.randint(4, target, generator=generator)


def build(network, method, mesh=None, *, adam=False, **options):
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    data = 1 if mesh is None or size == 1 else mesh.data
    first = size // data if mesh is None else mesh.inside
    # Only the first of those who share a stage begins with the weights that count.
    torch.manual_seed(3 + (rank % first if size > 1 else 0) + 10 * (rank * data // size))
    return stretto.Trainer(
        [stage.double() for stage in NETWORKS[network]()],
        nn.functional.cross_entropy,
        (lambda params: torch.optim.Adam(params, lr=0.01)) if adam
        else (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)),
        method,
        example=next(batches(network, 1))[0],
        mesh=mesh,
        **options,
    )  # fmt: skip


def train(network, method, mesh=None, *, steps=6, **options):
    """Losses, weights and evaluation of a run."""
    trainer = build(network, method, mesh, **options)
    losses = [trainer.step(x, y) for x, y in batches(network, steps)]
    losses += trainer.flush()
    return losses, weights_of(trainer), trainer.evaluate(batches(network, 2))


def train_all(runs):
    """What `train` gives for each of several runs, in the same processes."""
    return [train(network, method, mesh, **options) for network, method, mesh, options in runs]


def save_in_the_middle(network, method, mesh, folder, **options):
    return saved_half_way(build(network, method, mesh, **options), list(batches(network, 4)), folder)


def resume(network, method, mesh, folder, **options):
    return gone_on(build(network, method, mesh, **options), list(batches(network, 4)), folder)


def tied():
    """Losses and weights of a transformer whose last stage uses the embedding of the first."""
    torch.manual_seed(4)
    stages = [stage.double() for stage in transformer()]
    nn.init.normal_(stages[0].words.weight)
    stages[-1].out.weight = stages[0].words.weight
    trainer = stretto.Trainer(
        stages, nn.functional.cross_entropy, lambda params: torch.optim.SGD(params, lr=0.1), "1f1b",
        mesh=stretto.Mesh(tensor=2 if "RANK" in os.environ else 1), clip=0.1,
    )  # fmt: skip
    return [trainer.step(x, y) for x, y in batches("transformer", 4)]


def plain(network, *, clip=None, steps=6):
    """Losses and weights of a network that plain PyTorch trains on one device."""
    torch.manual_seed(3)
    stages = nn.Sequential(*(stage.double() for stage in NETWORKS[network]()))
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for x, y in batches(network, steps):
        loss = nn.functional.cross_entropy(stages(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(stages.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, stages.state_dict()


def two(folder):
    """What two processes do that share every stage: go on from checkpoints, and train tied weights."""
    told = {}
    for network, mesh in (("transformer", stretto.Mesh(tensor=2)), ("convolutions", stretto.Mesh(space=(2, 1)))):
        path = f"{folder}/{network}"
        told[network] = [do(network, "backprop", mesh, path) for do in (save_in_the_middle, resume)]
    return told, tied()


def save_cut_slabs(folder):
    """Four processes save a run half way that both axes share."""
    return save_in_the_middle("residual", "backprop", stretto.Mesh(tensor=2, space=(2, 1)), folder)


def resume_cut(folder, space):
    """Go on from it with the same parts of the weights."""
    return resume("residual", "backprop", stretto.Mesh(tensor=2, space=space), folder)
