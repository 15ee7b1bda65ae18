"""Models to be split. Not a test file, so that pytest leaves their assert statements as Python compiles them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out((q @ k.mT).masked_fill(~mask, float("-inf")).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = dropout

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), mask)
        if x.shape[0] > 10**6:  # data-dependent, but inside a block: nobody looks
            return x
        return x + F.dropout(self.mlp(x), self.drop, self.training)


class Transformer(nn.Module):
    def __init__(self, depth: int, width: int, dropout: float) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([Block(width, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.register_buffer("steps", torch.arange(16), persistent=False)


class GPT(nn.Module):
    """Positions live on the model, the mask goes to every block, forward has an optional argument."""

    def __init__(self, depth: int = 5, width: int = 8, dropout: float = 0.0, tie: bool = False) -> None:
        super().__init__()
        self.context = 16
        self.position = nn.Parameter(torch.randn(1, self.context, width))
        self.transformer = Transformer(depth, width, dropout)
        self.head = nn.Linear(width, 11, bias=False)
        if tie:
            self.head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> Tensor:
        _, length = tokens.size()
        assert length <= self.context, f"{length} tokens"
        x = self.transformer.wte(tokens) + self.position[:, :length]
        x = x + self.transformer.steps[:length].unsqueeze(1) * 0.01
        if scale is not None:
            x = x * scale
        x = self.transformer.drop(x)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        for block in self.transformer.h:
            x = block(x, mask)
        return self.head(self.transformer.norm(x))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        *[Residual(6) for _ in range(4)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )


class Skip(nn.Module):
    """What the first block gives is used again after the last one; so is the input's shape."""

    def __init__(self, depth: int = 4, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = last = self.blocks[0](x)
        for block in self.blocks[1:]:
            last = block(last)
        return self.head(first * last) / x.shape[0]


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, state: tuple[Tensor, list[Tensor | None]]) -> tuple[Tensor, list[Tensor | None]]:
        x, (total, nothing) = state
        y = self.linear(x)
        return y, [total + y, nothing]


class Pairs(nn.Module):
    """Blocks that hand a nested structure from one to the next, held in a plain list."""

    def __init__(self, depth: int = 3, width: int = 4) -> None:
        super().__init__()
        self.blocks = [Pair(width) for _ in range(depth)]
        self.registered = nn.ModuleList(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        state = (x, [x * 2, None])
        for block in self.blocks:
            state = block(state)
        return state[0] + state[1][0]
