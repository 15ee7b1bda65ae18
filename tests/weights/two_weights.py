"""Layers written by hand with two sets of weights: the forward's, and those that the backward reads.

Nothing of stretto in here. Each product of a weight and an activation is an autograd function whose backward is written
out: the activations are those of the forward, the weight it reads is another one. The rest is plain PyTorch.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Product(torch.autograd.Function):
    """`op(x, w)`, linear in both, forward with `w`; the input's gradient with `other`."""

    @staticmethod
    def forward(ctx, x, w, other, op):
        ctx.op = op
        ctx.save_for_backward(x, w.clone(), other)
        return op(x, w)

    @staticmethod
    def backward(ctx, g):
        x, w, other = ctx.saved_tensors
        with torch.enable_grad():  # linear in x, so where it is taken does not matter; the same for w
            at_x = torch.zeros_like(x).requires_grad_()
            at_w = torch.zeros_like(w).requires_grad_()
            (gx,) = torch.autograd.grad(ctx.op(at_x, other), at_x, g)
            (gw,) = torch.autograd.grad(ctx.op(x, at_w), at_w, g)
        return gx, gw, None, None


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, other):
        ctx.save_for_backward(x, other)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, other = ctx.saved_tensors
        return g @ other, g.flatten(0, -2).T @ x.flatten(0, -2), None


class Rectifier(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, other):
        ctx.save_for_backward(x, other)
        return torch.where(x > 0, x, a * x)

    @staticmethod
    def backward(ctx, g):
        x, other = ctx.saved_tensors
        return torch.where(x > 0, g, other * g), (g * x)[x <= 0].sum().reshape(1), None


def linear(x, w, name, other, bias):
    y = Linear.apply(x, w[name], other[name])
    return y + w[bias] if bias in w else y


def times(x, w, other, shape=(-1,)):
    return Product.apply(x, w["weight"], other["weight"], lambda x, g: x * g.reshape(shape))


def of_linear(m, w, other, x):
    return linear(x, w, "weight", other, "bias")


def of_conv(m, w, other, x):
    op = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}[type(m)]
    settings = {"stride": m.stride, "padding": m.padding, "dilation": m.dilation, "groups": m.groups}
    y = Product.apply(x, w["weight"], other["weight"], lambda x, k: op(x, k, **settings))
    return y + w["bias"].reshape(-1, *[1] * len(m.stride))


def of_conv_transpose(m, w, other, x):
    y = Product.apply(x, w["weight"], other["weight"], lambda x, k: F.conv_transpose2d(x, k, stride=m.stride))
    return y + w["bias"].reshape(-1, 1, 1)


def of_batch_norm(m, w, other, x):
    normal = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), keepdim=True, unbiased=False) + m.eps).sqrt()
    return times(normal, w, other, (-1, 1, 1)) + w["bias"].reshape(-1, 1, 1)


def of_layer_norm(m, w, other, x):
    normal = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + m.eps).sqrt()
    return times(normal, w, other) + w["bias"]


def of_group_norm(m, w, other, x):
    groups = x.unflatten(1, (m.num_groups, -1)).flatten(2)
    normal = (groups - groups.mean(-1, keepdim=True)) / (groups.var(-1, keepdim=True, unbiased=False) + m.eps).sqrt()
    return times(normal.reshape(x.shape), w, other, (-1, 1)) + w["bias"].reshape(-1, 1)


def of_rms_norm(m, w, other, x):
    eps = torch.finfo(x.dtype).eps if m.eps is None else m.eps
    return times(x / (x.square().mean(-1, keepdim=True) + eps).sqrt(), w, other)


def of_embedding(m, w, other, x):
    return w["weight"][x]


def of_bilinear(m, w, other, x):
    def op(xx, a):
        return torch.einsum("bij,oij->bo", xx, a)

    outer = x[:, :, None] * x.sin()[:, None, :]  # the product's gradient to both inputs is that to their outer product
    return Product.apply(outer, w["layer.weight"], other["layer.weight"], op) + w["layer.bias"]


def of_prelu(m, w, other, x):
    return Rectifier.apply(x, w["weight"], other["weight"])


def of_attention(m, w, other, x):
    heads = m.attention.num_heads
    packed = linear(x, w, "attention.in_proj_weight", other, "attention.in_proj_bias")
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in packed.chunk(3, -1))
    seen = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
    return linear(seen.transpose(1, 2).flatten(2), w, "attention.out_proj.weight", other, "attention.out_proj.bias")


def of_lstm(m, w, other, x):
    for layer in range(2):
        h = c = torch.zeros_like(x[:, 0, :3])
        outputs = []
        for t in range(x.shape[1]):
            gates = linear(x[:, t], w, f"layer.weight_ih_l{layer}", other, f"layer.bias_ih_l{layer}")
            gates = gates + linear(h, w, f"layer.weight_hh_l{layer}", other, f"layer.bias_hh_l{layer}")
            i, f, g, o = gates.chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        x = torch.stack(outputs, 1)
    return x


def of_gru(m, w, other, x):
    for layer in range(2):
        h = torch.zeros_like(x[:, 0, :3])
        outputs = []
        for t in range(x.shape[1]):
            i = linear(x[:, t], w, f"layer.weight_ih_l{layer}", other, f"layer.bias_ih_l{layer}").chunk(3, -1)
            j = linear(h, w, f"layer.weight_hh_l{layer}", other, f"layer.bias_hh_l{layer}").chunk(3, -1)
            r, z = (i[0] + j[0]).sigmoid(), (i[1] + j[1]).sigmoid()
            n = (i[2] + r * j[2]).tanh()
            h = (1 - z) * n + z * h
            outputs.append(h)
        x = torch.stack(outputs, 1)
    return x


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Bilinear(6, 6, 3)

    def forward(self, x):
        return self.layer(x, x.sin())


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(6, 3, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


LAYERS = {  # how to make it, the input's shape, the same by hand
    "linear": (lambda: nn.Linear(6, 3), (4, 6), of_linear),
    "linear-3d": (lambda: nn.Linear(6, 3, bias=False), (4, 2, 6), of_linear),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1, dilation=2), (2, 2, 9), of_conv),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 5, 5), of_conv),
    "conv2d-1x1": (lambda: nn.Conv2d(2, 3, 1), (2, 2, 5, 5), of_conv),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 3, 4, 3), of_conv),
    "conv-transpose": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), (2, 2, 4, 4), of_conv_transpose),
    "batch-norm": (lambda: nn.BatchNorm2d(2), (3, 2, 4, 4), of_batch_norm),
    "layer-norm": (lambda: nn.LayerNorm(6), (4, 6), of_layer_norm),
    "group-norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5), of_group_norm),
    "rms-norm": (lambda: nn.RMSNorm(6), (4, 6), of_rms_norm),
    "embedding": (lambda: nn.Embedding(7, 6), None, of_embedding),
    "bilinear": (Twice, (4, 6), of_bilinear),
    "attention": (Attend, (2, 5, 6), of_attention),
    "lstm": (lambda: Recurrent(nn.LSTM), (2, 5, 6), of_lstm),
    "gru": (lambda: Recurrent(nn.GRU), (2, 5, 6), of_gru),
    "prelu": (nn.PReLU, (4, 6), of_prelu),
}


def make(name, dtype=torch.float64):
    """A layer with random weights, and an input."""
    torch.manual_seed(0)
    build, shape, _ = LAYERS[name]
    module = build().to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    inputs = torch.randint(7, (3, 4)) if shape is None else torch.randn(shape, dtype=dtype)
    return module, inputs.requires_grad_(shape is not None)


def values(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def by_hand(name, module, forward, backward, inputs, cotangent):
    """Output, and gradients by name ("" for the input): forward at one set of weights, another read by the backward."""
    leaves = {key: value.clone().requires_grad_() for key, value in forward.items()}
    x = inputs.detach().clone().requires_grad_(inputs.requires_grad)
    output = LAYERS[name][2](module, leaves, backward, x)
    output.backward(cotangent)
    gradients = {key: leaf.grad for key, leaf in leaves.items()}
    if x.requires_grad:
        gradients[""] = x.grad
    return output.detach(), gradients


def found(module, inputs):
    """The gradients that a backward has left."""
    gradients = {name: p.grad for name, p in module.named_parameters()}
    if inputs.requires_grad:
        gradients[""] = inputs.grad
    return gradients


def assert_close(one, other, tolerance=1e-12):
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(
            one[key], other[key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )
