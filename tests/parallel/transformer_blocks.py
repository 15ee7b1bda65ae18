"""Blocks of the shapes and names that people use, written by hand: GPT-2, Llama, BERT, ViT, as in Hugging Face's."""

import torch
from torch import nn
from torch.nn import functional as F


class Conv1D(nn.Module):
    """GPT-2's linear layer: weight [inputs, outputs]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(0.1 * torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3.0))))


class GPT2Attention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim, self.split_size = width, heads, width // heads, width
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.attn_dropout, self.resid_dropout = dropout, nn.Dropout(dropout)

    def forward(self, x, layer_past=None):
        q, k, v = self.c_attn(x).split(self.split_size, dim=2)
        q, k, v = (each.view(*each.shape[:-1], -1, self.head_dim).transpose(1, 2) for each in (q, k, v))
        p = self.attn_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p).transpose(1, 2)
        return self.resid_dropout(self.c_proj(mixed.reshape(*mixed.shape[:-2], -1).contiguous()))


class GPT2MLP(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(4 * width, width), Conv1D(width, 4 * width)
        self.act, self.dropout = NewGELU(), nn.Dropout(dropout)

    def forward(self, hidden_states):
        return self.dropout(self.c_proj(self.act(self.c_fc(hidden_states))))


class GPT2Block(nn.Module):
    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), GPT2Attention(width, heads, dropout)
        self.ln_2, self.mlp = nn.LayerNorm(width), GPT2MLP(width, dropout)

    def forward(self, hidden_states, **kwargs):
        hidden_states = self.attn(self.ln_1(hidden_states)) + hidden_states
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class GPT2(nn.Module):
    """With the head tied to the embedding."""

    def __init__(self, vocabulary, width, heads, dropout=0.0):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(GPT2Block(width, heads, dropout) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.size(1))))
        for block in self.h:
            x = block(x, use_cache=False)
        return self.lm_head(self.ln_f(x))


class LlamaAttention(nn.Module):
    """Several queries share a key."""

    def __init__(self, width, heads, key_heads):
        super().__init__()
        self.head_dim, self.num_key_value_groups = width // heads, heads // key_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, key_heads * self.head_dim, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden_states, attention_mask=None):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (each.repeat_interleave(self.num_key_value_groups, dim=1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask).transpose(1, 2)
        return self.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1).contiguous())


class LlamaMLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(hidden, width, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Llama(nn.Module):
    def __init__(self, vocabulary, width, heads, key_heads, hidden):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.self_attn, self.mlp = LlamaAttention(width, heads, key_heads), LlamaMLP(width, hidden)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        if x.ndim == 3:  # what symbols cannot decide
            x = x + self.self_attn(self.norms[0](x), attention_mask=None)
        x = x + self.mlp(self.norms[1](x))
        return self.lm_head(self.norms[2](x))


class LlamaRMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class LlamaDecoderLayer(nn.Module):
    """Called, and calling, with names; its output is a tuple, as it once was."""

    def __init__(self, width, heads, key_heads, hidden):
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(width, heads, key_heads), LlamaMLP(width, hidden)
        self.input_layernorm, self.post_attention_layernorm = LlamaRMSNorm(width), LlamaRMSNorm(width)

    def forward(self, hidden_states, attention_mask=None):
        x = hidden_states
        x = x + self.self_attn(hidden_states=self.input_layernorm(x), attention_mask=attention_mask)
        return x + self.mlp(self.post_attention_layernorm(x)), None


class LlamaModel(nn.Module):
    """Layers in a list; every layer's output is used, and the mask is that of the whole."""

    def __init__(self, width, heads, key_heads, hidden):
        super().__init__()
        self.layers = nn.ModuleList(LlamaDecoderLayer(width, heads, key_heads, hidden) for _ in range(2))

    def forward(self, x):
        total, mask = x, torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
        for layer in self.layers:
            x = layer(hidden_states=x, attention_mask=mask)[0]
            total = total + x.flip(1)
        return total


class SelfAttention(nn.Module):
    """BERT's and ViT's: the output layer stands in another module."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = heads, width // heads
        self.all_head_size = width
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        shape = (*x.shape[:2], self.num_attention_heads, self.attention_head_size)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        weights = self.dropout((q @ k.transpose(2, 3) / self.attention_head_size**0.5).softmax(-1))
        return (weights @ v).transpose(1, 2).reshape(*x.shape[:2], self.all_head_size)


class Output(nn.Module):
    def __init__(self, inputs, outputs, dropout):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inputs, outputs), nn.LayerNorm(outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, beside):
        return self.LayerNorm(self.dropout(self.dense(x)) + beside)


class Attention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.self, self.output = SelfAttention(width, heads, dropout), Output(width, width, dropout)

    def forward(self, x):
        return self.output(self.self(x), x)


class Intermediate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dense = nn.Linear(width, 4 * width)

    def forward(self, x):
        return F.gelu(self.dense(x))


class BertLayer(nn.Module):
    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.attention, self.intermediate = Attention(width, heads, dropout), Intermediate(width)
        self.output = Output(4 * width, width, dropout)

    def forward(self, x, *masks):
        if masks:
            raise ValueError("no masks here")
        x = self.attention(x)
        return self.output(self.intermediate(x), x)


class ViTAttention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.attention = SelfAttention(width, heads, dropout)
        self.output = nn.ModuleDict({"dense": nn.Linear(width, width), "dropout": nn.Dropout(dropout)})

    def forward(self, hidden_states):
        return self.output["dropout"](self.output["dense"](self.attention(hidden_states)))


class ViTOutput(nn.Module):
    def __init__(self, inputs, outputs, dropout):
        super().__init__()
        self.dense, self.dropout = nn.Linear(inputs, outputs), nn.Dropout(dropout)

    def forward(self, hidden_states, input_tensor):
        return self.dropout(self.dense(hidden_states)) + input_tensor


class ViTLayer(nn.Module):
    """Norms first."""

    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.attention, self.intermediate = ViTAttention(width, heads, dropout), Intermediate(width)
        self.output = ViTOutput(4 * width, width, dropout)
        self.layernorm_before, self.layernorm_after = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, hidden_states):
        hidden_states = self.attention(self.layernorm_before(hidden_states)) + hidden_states
        return self.output(self.intermediate(self.layernorm_after(hidden_states)), hidden_states)
