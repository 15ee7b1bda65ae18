"""Optimizers as functions of numbered gradients, and delayed training with a change of their step: plain tensors.

No line of it is shared with what it checks; Muon's orthogonalisation alone is torch's own, on a loose matrix.
"""

import numpy as np
import torch


class Sgd:
    """v <- m v + g + wd w;  u = lr v."""

    def __init__(self, momentum=0.9, decay=1e-3):
        self.momentum, self.decay, self.velocity = momentum, decay, None

    def move(self, w, g, rate):
        g = [each + self.decay * x for each, x in zip(g, w, strict=True)]
        old = self.velocity or [0.0] * len(w)
        self.velocity = [self.momentum * v + each for v, each in zip(old, g, strict=True)]
        return [rate * v for v in self.velocity]


class AdamW:
    """u = lr (m_hat / (sqrt(v_hat) + eps) + wd w), the averages of each matrix in the basis that `turn` gives."""

    def __init__(self, betas=(0.9, 0.95), decay=0.1, eps=1e-6):
        self.betas, self.decay, self.eps, self.count, self.state = betas, decay, eps, 0, {}

    def basis(self, i, g):
        """Orthogonal matrices left and right of a gradient, None for none."""
        return None, None

    def turned(self, i, second):
        """The second moments in the bases as they are now."""
        return second

    def move(self, w, g, rate):
        self.count += 1
        return [self.one(i, x, each, rate) for i, (x, each) in enumerate(zip(w, g, strict=True))]

    def one(self, i, w, g, rate):
        (first, second), (b1, b2) = self.state.get(i, (0.0, 0.0)), self.betas
        left, right = self.basis(i, g)
        second = self.turned(i, second)

        def into(x):
            x = x if left is None else left.T @ x
            return x if right is None else x @ right

        def out(x):
            x = x if left is None else left @ x
            return x if right is None else x @ right.T

        first = b1 * first + (1 - b1) * g
        second = b2 * second + (1 - b2) * into(g) ** 2
        self.state[i] = first, second
        scaled = np.sqrt(second / (1 - b2**self.count)) + self.eps
        return rate * (out(into(self.numerator(i, first, g)) / scaled) + self.decay * w)

    def numerator(self, i, first, g):
        """The average of the gradients, without bias."""
        return first / (1 - self.betas[0] ** self.count)


class Rotated(AdamW):
    """AdamW in bases that one step of the power method renews every `interval` updates."""

    def __init__(self, interval, sides=2, **options):
        super().__init__(**options)
        self.interval, self.sides, self.products, self.bases, self.former = interval, sides, {}, {}, {}

    def basis(self, i, g):
        if g.ndim != 2:
            return None, None
        found = []
        for side, product in enumerate((g @ g.T, g.T @ g)[: self.sides]):
            key, b2 = (i, side), self.betas[1]
            self.products[key] = b2 * self.products.get(key, 0.0) + (1 - b2) * product
            basis = self.bases.get(key, np.eye(len(product)))
            if self.count % self.interval == 1 or self.interval == 1:
                mean = np.trace(self.products[key]) / len(product)
                basis = np.linalg.qr(self.products[key] @ basis + 1e-4 * mean * basis)[0]
            self.former[key] = self.bases.get(key, np.eye(len(product)))
            self.bases[key] = basis
            found.append(basis)
        return (*found, None)[:2]

    def turned(self, i, second):
        for side in range(self.sides if (i, 0) in self.bases else 0):
            shares = np.einsum("ka,kb->ab", self.bases[i, side], self.former[i, side]) ** 2
            if np.ndim(second):
                second = np.einsum(("ab,bc->ac", "ab,cb->ca")[side], shares, second)
        return second


class Muon:
    """torch's step of a matrix that is in no network, and nothing of anything else."""

    def __init__(self, momentum=0.95, decay=0.1):
        self.options, self.made = {"momentum": momentum, "weight_decay": decay}, None

    def move(self, w, g, rate):
        if self.made is None:
            self.loose = torch.nn.Parameter(torch.tensor(w[0]))
            self.made = torch.optim.Muon([self.loose], lr=rate, **self.options)
        self.loose.data, self.loose.grad = torch.tensor(w[0]), torch.tensor(g[0])
        self.made.param_groups[0]["lr"] = rate
        self.made.step()
        return [w[0] - self.loose.detach().numpy(), np.zeros_like(w[1])]


def train_versions(
    network, data, rules, seen, *, c=lambda s: 0.0, rate=lambda k: 0.02, stashed=True, every=1, warmup=0, finish=None,
    horizon=lambda s: 0,
):  # fmt: skip
    """Train with every version kept. A minibatch has `every` micro-batches. At the forward of micro-batch m, stage s
    has had the backwards of the first seen(s, m); its own sees the same version if `stashed`, else the newest.
    w <- w - u - c (u - u_prev); the first step is plain, and so are all before
    minibatch `warmup` and from `finish` on, which forget u_prev. The forwards of all others see their version moved
    `horizon(s)` times by its last change. Returns the versions, the u of each, the losses."""
    stages = range(len(network.start))
    versions, moves, losses = [[list(pair)] for pair in network.start], [[] for _ in stages], []
    former = [None for _ in stages]
    for t, (x, y) in enumerate(data):
        plain = t < warmup or (finish is not None and t >= finish)
        sums, loss = [[0.0, 0.0] for _ in stages], 0.0
        for i, part in enumerate(np.array_split(np.arange(len(x)), every)):
            numbers = [t if plain else max(warmup, seen(s, t * every + i) // every) for s in stages]
            ahead = [looking(versions[s], numbers[s], 0 if plain else horizon(s)) for s in stages]
            back = ahead if stashed else [versions[s][t] for s in stages]
            gradients, each = network.gradient(ahead, back, x[part], y[part])
            share = len(part) / len(x)
            loss += share * each
            sums = [[a + share * g for a, g in zip(*pair, strict=True)] for pair in zip(sums, gradients, strict=True)]
        losses.append(loss)
        for s in stages:
            w = versions[s][-1]
            rules[s].plain = plain
            u = rules[s].move(w, sums[s], rate(t))
            extra = [0.0] * len(w)
            if former[s] is not None and not plain:
                extra = [c(s) * (a - b) for a, b in zip(u, former[s], strict=True)]
            versions[s].append([x - a - b for x, a, b in zip(w, u, extra, strict=True)])
            moves[s].append(u)
            former[s] = None if plain else u
    return versions, moves, losses


def looking(versions, number, horizon):
    """w + h (w - the one before); w itself before the first change."""
    if horizon == 0 or number == 0:
        return versions[number]
    return [w + horizon * (w - former) for w, former in zip(versions[number], versions[number - 1], strict=True)]
