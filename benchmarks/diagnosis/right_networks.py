"""Networks for right steps: those of networks.py, and what may look wrong although it is right."""

from collections.abc import Callable, Mapping

import torch
from networks import IGNORED, NETWORKS, ROWS, TOKENS, WIDTH, WORDS, Setup, gpt, next_token_loss
from torch import Tensor, nn
from torch.nn import functional


class Keys(nn.Module):
    """Attention with a bias of its own for keys, whose gradient is zero but for rounding; one weight is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.unused = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.ones(3))
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [rows, 6] for tokens [rows, tokens]."""
        x = self.words(tokens)
        seen = functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.head((x + seen).mean(1))


class Recurrent(nn.Module):
    """An LSTM, which uses its weights at every token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [rows, 6] for tokens [rows, tokens]."""
        return self.head(self.lstm(self.words(tokens))[0][:, -1])


def classified(model: nn.Module, dtype: torch.dtype) -> Setup:
    tokens = torch.randint(0, WORDS, (ROWS, TOKENS))
    return Setup(model.to(dtype), tokens, torch.randint(0, 6, (ROWS,)), functional.cross_entropy)


def deep(dtype: torch.dtype) -> Setup:
    """Twenty layers with norms."""
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(20)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 5)).to(dtype)
    return Setup(model, torch.randn(ROWS, WIDTH).to(dtype), torch.randint(0, 5, (ROWS,)), functional.cross_entropy)


def unpadded(dtype: torch.dtype) -> Setup:
    """The language model on rows of equal length."""
    made = gpt(dtype)
    tokens = torch.randint(1, WORDS, (ROWS, TOKENS + 1))
    return made._replace(inputs=tokens[:, :-1], target=tokens[:, 1:].contiguous())


def hollow(dtype: torch.dtype) -> Setup:
    """The language model on a batch of which the last four rows are padding and nothing else."""
    made = gpt(dtype)
    target = made.target.clone()
    target[-4:] = IGNORED
    return made._replace(target=target)


def settled(dtype: torch.dtype) -> Setup:
    """The network with batch norms, whose norms are in evaluation, as in fine-tuning."""
    made = NETWORKS["cnn"](dtype)
    for module in made.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return made


def summed(dtype: torch.dtype) -> Setup:
    """A loss that is a sum over examples, no mean."""
    return NETWORKS["mlp"](dtype)._replace(loss=sum_of_losses)


def sum_of_losses(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="sum")


def weighted(dtype: torch.dtype) -> Setup:
    """A cross entropy with weights of classes, whose mean is over the weights of the targets."""
    made = NETWORKS["mlp"](dtype)
    return made._replace(loss=nn.CrossEntropyLoss(torch.arange(1, 6).to(dtype)))


def smoothed(dtype: torch.dtype) -> Setup:
    """The language model with smoothed labels."""
    return gpt(dtype)._replace(loss=smoothed_loss)


def smoothed_loss(output: Tensor, target: Tensor) -> Tensor:
    flat = output.flatten(0, 1), target.flatten()
    return functional.cross_entropy(*flat, ignore_index=IGNORED, label_smoothing=0.1)


def regression(dtype: torch.dtype) -> Setup:
    """Squared errors of five numbers."""
    made = NETWORKS["mlp"](dtype)
    return made._replace(target=torch.randn(ROWS, 5).to(dtype), loss=functional.mse_loss)


def dropping(dtype: torch.dtype) -> Setup:
    """A network with dropout."""
    made = NETWORKS["mlp"](dtype)
    return made._replace(model=nn.Sequential(made.model[:2], nn.Dropout(0.1), made.model[2:]))


class Logits(nn.Module):
    """A language model of transformers, which gives logits alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [rows, tokens, words]."""
        return self.inner(input_ids=tokens).logits  # type: ignore[no-any-return]


def shifted_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens that are not padding; the target is the input, each output is for the token after it."""
    return next_token_loss(output[:, :-1], target[:, 1:])


def gpt2(dtype: torch.dtype) -> Setup:
    """transformers' GPT-2 of two blocks, tied, without dropout, on padded rows."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": TOKENS}
    return padded(GPT2LMHeadModel(GPT2Config(bos_token_id=1, eos_token_id=2, **sizes, **none)), dtype)


def told(dtype: torch.dtype) -> Setup:
    """GPT-2 that is told which loss it has, as transformers' Trainer looks for that."""
    made = gpt2(dtype)
    made.model.inner.loss_type = "ForCausalLM"  # type: ignore[union-attr, assignment]
    return made


def llama(dtype: torch.dtype) -> Setup:
    """transformers' Llama of two blocks on padded rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, **heads}
    return padded(LlamaForCausalLM(LlamaConfig(bos_token_id=1, eos_token_id=2, **sizes)), dtype)


def padded(model: nn.Module, dtype: torch.dtype) -> Setup:
    """A causal language model of transformers, and rows of unequal length, each the target of itself."""
    tokens = torch.randint(1, WORDS, (ROWS, TOKENS))
    empty = torch.arange(TOKENS)[None] >= torch.randint(4, TOKENS + 1, (ROWS,))[:, None]
    inputs, target = tokens.masked_fill(empty, 0), tokens.masked_fill(empty, IGNORED)
    return Setup(Logits(model).to(dtype), inputs, target, shifted_loss)


SETUPS: Mapping[str, Callable[[torch.dtype], Setup]] = {
    **NETWORKS,
    "keys": lambda dtype: classified(Keys(), dtype),
    "recurrent": lambda dtype: classified(Recurrent(), dtype),
    "deep": deep,
    "unpadded": unpadded,
    "hollow": hollow,
    "settled": settled,
    "summed": summed,
    "weighted": weighted,
    "smoothed": smoothed,
    "regression": regression,
    "dropping": dropping,
    "gpt2": gpt2,
    "told": told,
    "llama": llama,
}


def right_setup(network: str, dtype: torch.dtype, seed: int) -> Setup:
    """The same network and batch for the same seed."""
    torch.manual_seed(seed)
    return SETUPS[network](dtype)


def count(target: Tensor, loss: Callable[..., Tensor]) -> float:
    """What a loss is a mean over."""
    if isinstance(loss, nn.CrossEntropyLoss) and loss.weight is not None:
        return float(loss.weight[target].sum())
    if target.dim() == 1 or target.is_floating_point():
        return target.numel()
    return int((target[:, 1:] if loss is shifted_loss else target).ne(IGNORED).sum())
