"""Networks as PyTorch's tutorials write them: torch's own transformers with masks, recurrent ones, tiny."""

import math

import torch
from torch import nn

WORDS, LENGTH, WIDTH = 13, 6, 8


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=32):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2] = torch.sin(position * div_term)
        pe[0, :, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return self.dropout(x + self.pe[:, : x.size(1)])


class LanguageModel(nn.Module):
    """word_language_model: nn.TransformerEncoder, a causal mask made in the forward, dropout."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.pos_encoder = PositionalEncoding(WIDTH, dropout)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout, batch_first=True)
        self.transformer_encoder = nn.TransformerEncoder(layer, 3)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.linear = nn.Linear(WIDTH, WORDS)

    def forward(self, src, src_mask=None):
        src = self.embedding(src) * math.sqrt(WIDTH)
        src = self.pos_encoder(src)
        if src_mask is None:
            src_mask = nn.Transformer.generate_square_subsequent_mask(src.size(1)).to(src.device, src.dtype)
        output = self.transformer_encoder(src, src_mask)
        return self.linear(output)


class Classifier(nn.Module):
    """nn.TransformerEncoder with a mask of padding, and a mean over what counts."""

    def __init__(self, classes=5, dropout=0.1):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.fc = nn.Linear(WIDTH, classes)

    def forward(self, tokens):
        padding = tokens == 0
        x = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        keep = (~padding).unsqueeze(-1)
        return self.fc((x * keep).sum(1) / keep.sum(1))


class Seq2Seq(nn.Module):
    """The tutorial of translation: nn.Transformer, masks of padding, a causal one for the target."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 12, dropout, batch_first=True)
        self.generator = nn.Linear(WIDTH, WORDS)
        self.src_tok_emb, self.tgt_tok_emb = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.positional_encoding = PositionalEncoding(WIDTH, dropout)

    def forward(self, src, trg):
        tgt_mask = torch.triu(torch.ones(trg.shape[1], trg.shape[1], device=src.device), diagonal=1).bool()
        src_padding_mask, tgt_padding_mask = src == 0, trg == 0
        src_emb = self.positional_encoding(self.src_tok_emb(src))
        tgt_emb = self.positional_encoding(self.tgt_tok_emb(trg))
        outs = self.transformer(
            src_emb, tgt_emb, None, tgt_mask, None, src_padding_mask, tgt_padding_mask, src_padding_mask
        )
        return self.generator(outs)


class Tagger(nn.Module):
    """An LSTM in both directions, stacked, a tag for each word."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=dropout, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(dropout)
        self.hidden, self.out = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x, _ = self.lstm(self.dropout(self.embedding(x)))
        x = torch.relu(self.hidden(self.dropout(x)))
        return self.out(x)


class Gru(nn.Module):
    """Encoder and decoder of the translation tutorial: the state of one starts the other."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.1)
        self.encoder, self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, src, trg):
        _, hidden = self.encoder(self.dropout(self.embedding(src)))
        output, _ = self.decoder(torch.relu(self.embedding(trg)), hidden)
        return self.out(output)


NETWORKS = {
    "TransformerEncoder, causal mask": (LanguageModel, "words"),
    "TransformerEncoder, padding": (Classifier, "classes"),
    "Transformer, causal and padding": (Seq2Seq, "pairs"),
    "LSTM, both directions": (Tagger, "words"),
    "GRU encoder and decoder": (Gru, "pairs"),
}


def network(name, seed=0):
    """A network in float64, in training mode."""
    torch.manual_seed(seed)
    return NETWORKS[name][0]().double()


def batches(name, number, rows, seed=1):
    """Words, of which 0 is padding; a target is a word for each, or a class."""
    drawn, task = torch.Generator().manual_seed(seed), NETWORKS[name][1]
    return [batch(task, rows, drawn) for _ in range(number)]


def batch(task, rows, drawn):
    x = torch.randint(1, WORDS, (rows, LENGTH), generator=drawn)
    lengths = torch.randint(2, LENGTH + 1, (rows, 1), generator=drawn)
    counts = torch.arange(LENGTH) < lengths
    if task == "classes":
        return x * counts, torch.randint(5, (rows,), generator=drawn)
    y = torch.randint(1, WORDS, (rows, LENGTH), generator=drawn)
    if task == "words":
        return x, y.masked_fill(~counts, -100)
    start = torch.ones(rows, 1, dtype=torch.long)
    return (x * counts, torch.cat([start, y[:, :-1]], 1) * counts), y.masked_fill(~counts, -100)
