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
