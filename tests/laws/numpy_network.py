"""A network, its gradient and momentum SGD in plain numpy: no line of it is shared with what it checks."""

from itertools import pairwise

import numpy as np


class Network:
    """tanh layers and a linear one with softmax cross entropy; weights [out, in] and biases, one pair a stage."""

    def __init__(self, widths, seed=0):
        draw = np.random.default_rng(seed)
        pairs = list(pairwise(widths))
        self.start = [(draw.normal(size=(b, a)) / np.sqrt(a), draw.normal(size=b) * 0.1) for a, b in pairs]

    def gradient(self, forward, backward, x, y):
        """Gradients of the mean loss with one list of weights in the forward and another in the backward."""
        activations, last = [x], len(forward) - 1
        for s, (w, b) in enumerate(forward):
            z = activations[-1] @ w.T + b
            activations.append(z if s == last else np.tanh(z))
        logits = activations[-1] - activations[-1].max(1, keepdims=True)
        probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        loss = -np.log(probabilities[np.arange(len(y)), y]).mean()
        delta = (probabilities - np.eye(probabilities.shape[1])[y]) / len(y)
        gradients = [None] * len(forward)
        for s in range(last, -1, -1):
            if s != last:
                delta = delta * (1 - activations[s + 1] ** 2)
            gradients[s] = (delta.T @ activations[s], delta.sum(0))
            delta = delta @ backward[s][0]
        return gradients, loss


class Momentum:
    """v <- m v + g + wd w;  w <- w - lr v, for one stage's pair."""

    def __init__(self, lr, momentum, decay):
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self.velocity = None

    def step(self, weights, gradients):
        g = [g + self.decay * w for w, g in zip(weights, gradients, strict=True)]
        old = self.velocity or [np.zeros_like(w) for w in weights]
        self.velocity = [self.momentum * v + each for v, each in zip(old, g, strict=True)]
        return tuple(w - self.lr * v for w, v in zip(weights, self.velocity, strict=True))


def train(network, data, delay, *, lr=0.1, momentum=0.9, decay=1e-3):
    """Delayed SGD: the gradient of minibatch t on stage s is taken at version max(0, t - delay(s)) of that stage.

    Returns the weights after every minibatch is through, and the losses in order.
    """
    stages = len(network.start)
    versions = [[pair] for pair in network.start]
    optimizers = [Momentum(lr, momentum, decay) for _ in range(stages)]
    losses = []
    for t, (x, y) in enumerate(data):
        seen = [versions[s][max(0, t - delay(s))] for s in range(stages)]
        gradients, loss = network.gradient(seen, seen, x, y)
        losses.append(loss)
        for s in range(stages):
            versions[s].append(optimizers[s].step(versions[s][-1], gradients[s]))
    return [each[-1] for each in versions], losses


class Delayed:
    """One stage of an asynchronous pipeline, written out: its versions, velocities and corrections by number.

    Version k is the weights after k updates. `delay` is the stage's steady-state delay D.
    """

    def __init__(self, start, delay, *, lr, momentum, decay, spike=False, until=None, schedule=lambda k: 1.0):
        self.versions, self.velocities, self.deltas = [start], [None], [None]
        self.delay, self.lr, self.momentum, self.decay = delay, lr, momentum, decay
        self.a = momentum**delay if spike else 1.0
        self.b = (1 - momentum**delay) / (1 - momentum) if spike else 0.0
        self.until = until
        self.schedule = schedule

    def distance(self, k, horizon):
        """The rates of the updates after the k-th, as many as the horizon says, added; of a fraction the fraction."""
        parts = [min(1.0, horizon - j) for j in range(int(np.ceil(horizon)))]
        return sum(self.lr * self.schedule(k + j) * part for j, part in enumerate(parts))

    def step_ahead(self, k, horizon):
        """w_k - (lr_{k+1} + ... + lr_{k+h}) v_k."""
        v, w = self.velocities[k], self.versions[k]
        return w if v is None else [x - self.distance(k, horizon) * u for x, u in zip(w, v, strict=True)]

    def velocity_ahead(self, k, horizon):
        """w_k - lr h v_k."""
        v = self.velocities[k]
        return (
            self.versions[k]
            if v is None
            else [w - self.lr * horizon * u for w, u in zip(self.versions[k], v, strict=True)]
        )

    def weight_ahead(self, k, horizon):
        """w_k + h (w_k - w_{k-1})."""
        if k == 0:
            return self.versions[0]
        return [w + horizon * (w - u) for w, u in zip(self.versions[k], self.versions[k - 1], strict=True)]

    def corrected(self, k):
        """w_k - D delta_k."""
        d = self.deltas[k]
        return self.versions[k] if d is None else [w - self.delay * u for w, u in zip(self.versions[k], d, strict=True)]

    def apply(self, gradients, plain=False):
        """The next version; `plain` is momentum SGD without cures."""
        w, v, k = self.versions[-1], self.velocities[-1], len(self.versions) - 1
        g = [each + self.decay * x for each, x in zip(gradients, w, strict=True)]
        v = g if v is None else [self.momentum * u + each for u, each in zip(v, g, strict=True)]
        p = 0 if self.until is None or plain else 1 - min(k / self.until, 1)
        lr = self.lr * self.schedule(k) / max(self.delay, 1) ** p
        a, b = (1.0, 0.0) if plain else (self.a, self.b)
        new = [x - lr * (a * u + b * each) for x, u, each in zip(w, v, g, strict=True)]
        self.versions.append(new)
        self.velocities.append(v)
        if self.delay:
            gamma = np.exp(-2 / self.delay)
            old = self.deltas[-1] or [np.zeros_like(x) for x in w]
            self.deltas.append([gamma * d + (1 - gamma) * (x - y) for d, x, y in zip(old, new, w, strict=True)])
        else:
            self.deltas.append(None)


class DelayedAdam:
    """One stage under Adam: its versions and moments by number. `decoupled` decay is AdamW's."""

    def __init__(self, start, delay, *, lr, betas, decay, decoupled, eps=1e-8, amsgrad=False, schedule=lambda k: 1.0):
        self.versions, self.firsts, self.seconds, self.largest = [start], [None], [None], [None]
        self.lr, self.betas, self.decay, self.eps = lr, betas, decay, eps
        self.decoupled, self.amsgrad, self.schedule = decoupled, amsgrad, schedule

    def direction(self, k):
        """m_hat / (sqrt(v_hat) + eps), and AdamW's decay of the weights beside it, after k updates."""
        out = []
        for w, first, second in zip(self.versions[k], self.firsts[k], self.largest[k], strict=True):
            m_hat, v_hat = first / (1 - self.betas[0] ** k), second / (1 - self.betas[1] ** k)
            out.append(m_hat / (np.sqrt(v_hat) + self.eps) + (self.decay * w if self.decoupled else 0.0))
        return out

    def step_ahead(self, k, horizon):
        """w_k - (lr_{k+1} + ... + lr_{k+h}) direction_k; w_0 before the first update."""
        if k == 0:
            return self.versions[0]
        distance, j = 0.0, 0
        while horizon > j:
            distance += self.lr * self.schedule(k + j) * min(1.0, horizon - j)
            j += 1
        return [w - distance * d for w, d in zip(self.versions[k], self.direction(k), strict=True)]

    def weight_ahead(self, k, horizon):
        """w_k + h (w_k - w_{k-1})."""
        if k == 0:
            return self.versions[0]
        return [w + horizon * (w - u) for w, u in zip(self.versions[k], self.versions[k - 1], strict=True)]

    def apply(self, gradients, plain=False):
        """The next version: AdamW's decay first, then the step."""
        w, k = self.versions[-1], len(self.versions) - 1
        g = [each + (0.0 if self.decoupled else self.decay * x) for each, x in zip(gradients, w, strict=True)]
        zeros = [np.zeros_like(x) for x in w]
        first, second = self.firsts[-1] or zeros, self.seconds[-1] or zeros
        self.firsts.append([self.betas[0] * m + (1 - self.betas[0]) * x for m, x in zip(first, g, strict=True)])
        self.seconds.append([self.betas[1] * v + (1 - self.betas[1]) * x * x for v, x in zip(second, g, strict=True)])
        past = self.largest[-1] or zeros
        largest = [np.maximum(a, b) for a, b in zip(past, self.seconds[-1], strict=True)]
        self.largest.append(largest if self.amsgrad else self.seconds[-1])
        self.versions.append(w)  # the direction's decay is of the weights before the step
        self.versions[-1] = [x - self.lr * self.schedule(k) * d for x, d in zip(w, self.direction(k + 1), strict=True)]


def train_delayed(network, data, delay, seen, read, *, kind=Delayed, warmup=0, finish=None, **options):
    """Minibatch t: stage s's forward sees seen(stage, s, k) with k = max(0, t - D) updates made, its backward reads
    read(stage, s, t, k). Fill and drain need nothing of their own: only versions count. Before minibatch `warmup` and
    from `finish` on, training is plain, and the pipeline starts empty after `warmup`."""
    size = len(network.start)
    stages = [kind(list(pair), delay(s), **options) for s, pair in enumerate(network.start)]
    losses = []
    for t, (x, y) in enumerate(data):
        plain = t < warmup or (finish is not None and t >= finish)
        ks = [max(warmup, t - delay(s)) for s in range(size)]
        forward = [
            stage.versions[t] if plain else seen(stage, s, k)
            for s, (stage, k) in enumerate(zip(stages, ks, strict=True))
        ]
        backward = [
            f if plain else read(stage, s, t, f) for s, (stage, f) in enumerate(zip(stages, forward, strict=True))
        ]
        gradients, loss = network.gradient(forward, backward, x, y)
        losses.append(loss)
        for stage, g in zip(stages, gradients, strict=True):
            stage.apply(g, plain)
    return [stage.versions[-1] for stage in stages], losses
