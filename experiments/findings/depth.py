"""Study 1, depth: which cure for delay keeps a decoder of 32 blocks training as fast as no delay does. See rules.md."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from harness import Cell, Claim, Study, held_out, measured_training, shuffled
from harness.cells import Record
from harness.end_tables import loss_table
from harness.examples import text
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

import stretto
from stretto.losses import token_cross_entropy
from stretto.optim import SOAP, muon, warmup

BLOCKS, WIDTH, HEADS, CONTEXT, BATCH = 32, 32, 2, 32, 16
STEPS, HORIZON, EVERY, WARMUP, CLIP = 450, 300, 25, 30, 1.0
WINDOWS = 256  # of the test and of the validation text, in one batch
RESCHEDULE = 110  # updates of PipeMare's T1

SCHEDULE = warmup(WARMUP, then=lambda updates: (WARMUP / (WARMUP + updates + 1)) ** 0.5)
"""A warm-up, then the inverse square root, for any length of training."""
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, betas=(0.9, 0.99), weight_decay=0.01),
    "NAdam": partial(torch.optim.NAdam, betas=(0.99, 0.999), weight_decay=0.01, decoupled_weight_decay=True),
    "Muon": partial(muon, momentum=0.95, weight_decay=0.01),
    "SOAP": partial(SOAP, betas=(0.95, 0.95), weight_decay=0.01),
}
RATES = {
    "SGD": (0.05, 0.15, 0.45, 1.35),
    "AdamW": (0.001, 0.002, 0.004, 0.008),
    "NAdam": (0.001, 0.002, 0.004, 0.008),
    "Muon": (0.001, 0.003, 0.009, 0.027),
    "SOAP": (0.001, 0.003, 0.009, 0.027),
    "rotated": (0.002, 0.004, 0.008, 0.016),
}


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), [N, T, WIDTH] -> the same; four matrices and nothing else."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.inputs, self.output = _linear(WIDTH, 3 * WIDTH), _linear(WIDTH, WIDTH, 2 * blocks)
        self.up, self.down = _linear(WIDTH, 4 * WIDTH), _linear(4 * WIDTH, WIDTH, 2 * blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches to the residual stream."""
        query, key, value = self.inputs(_normed(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(gelu(self.up(_normed(x))))
        return out


class Embedding(nn.Module):
    """Tokens int64 [N, T] -> [N, T, WIDTH]: a vector for each token and each position."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens."""
        embedded: Tensor = self.token(tokens) + self.position.weight
        return embedded


class Unembedding(nn.Module):
    """[N, T, WIDTH] -> logits [N, T, V]."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.normal_(self.score.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of the next token."""
        logits: Tensor = self.score(_normed(x))
        return logits


def _linear(inputs: int, outputs: int, shared: int = 1) -> nn.Linear:
    """Without bias, keeping the variance of its inputs, which it shares with so many others."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=(inputs * shared) ** -0.5)
    return layer


def _normed(x: Tensor) -> Tensor:
    return layer_norm(x, (WIDTH,))


def network(vocabulary: int, stages: int, seed: int) -> list[nn.Module]:
    """The decoder in so many stages of equally many blocks; the weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [Embedding(vocabulary), *(Block(BLOCKS) for _ in range(BLOCKS)), Unembedding(vocabulary)]
    each = BLOCKS // stages
    cuts = [0, *(1 + each * s for s in range(1, stages)), len(layers)]
    return stretto.split(layers, cuts)


def train(cell: Cell, rate: float, seed: int, steps: int, path: str | None) -> dict[str, Any]:
    """One run; how often it evaluates and how much it keeps does not depend on the cell."""
    data = text(path, CONTEXT)
    optimizer = partial(OPTIMIZERS[cell.optimizer], lr=rate, **cell.settings.get("options", {}))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*it will overshoot")  # of pipeoptim: that is what is asked
        trainer = stretto.Trainer(
            network(data.num_classes, cell.settings["stages"], seed), token_cross_entropy,
            optimizer, cell.method, device="cpu", workers=1, seed=seed, clip=CLIP, scheduler=SCHEDULE,
        )  # fmt: skip
    return measured_training(trainer, shuffled(data.train, BATCH, seed), steps, EVERY, held_out(data, WINDOWS))


def cells() -> tuple[Cell, ...]:
    """All of them, in the order of the table of rules.md."""
    alone = [_cell("none", name, "backprop", 1) for name in OPTIMIZERS]
    alone.append(_cell("rotated", "AdamW", "pipedream(rotate=True)", 1, beside="1 stage, AdamW, none"))
    deep = [_cell("stash", name, "pipedream", 32) for name in OPTIMIZERS]
    cures = [
        _cell("feedback D", "AdamW", "pipedream(feedback=delay)", 32),
        _cell("predicted", "AdamW", "pipeoptim", 32),
        _cell("rotated", "AdamW", "pipedream(rotate=True)", 32),
        _cell("rotated one-sided", "AdamW", "pipedream(rotate=one-sided)", 32),
        _cell("feedback D", "Muon", "pipedream(feedback=delay)", 32),
        _cell("predicted", "Muon", "pipeoptim", 32),
    ]
    clock = [
        _cell("PB", "AdamW", "pb", 32),
        _cell("PB, T1 + T2", "AdamW", f"pipemare(reschedule={RESCHEDULE})", 32, uncured="32 stages, AdamW, PB"),
        _cell("PACI", "AdamW", "paci(every=2)", 32),
    ]
    shallow = [
        _cell(cure, "AdamW", method, stages)
        for stages in (8, 16)
        for cure, method in (("stash", "pipedream"), ("rotated", "pipedream(rotate=True)"))
    ]
    one = [
        _cell("2BW", "Muon", "pipedream-2bw", 2),
        _cell("2BW, feedback 1", "Muon", "pipedream-2bw(feedback=1)", 2, uncured="2 stages, Muon, 2BW"),
    ]
    return (*alone, *deep, *cures, *clock, *shallow, *one)


def _cell(cure: str, optimizer: str, method: str, stages: int, **against: str) -> Cell:
    rotated = cure.startswith("rotated")
    reference = f"1 stage, {optimizer}, {'rotated' if rotated else 'none'}"
    if rotated and stages > 1:
        against["beside"] = f"1 stage, {optimizer}, none"
    if stages > 1 and cure not in ("stash", "PB", "2BW"):
        against.setdefault("uncured", f"{stages} stages, {optimizer}, stash")
    return Cell(
        name=f"{stages} stage{'s' if stages > 1 else ''}, {optimizer}, {cure}",
        method=method,
        optimizer=optimizer,
        rates=RATES["rotated" if rotated else optimizer],
        steps=STEPS,
        settings={"stages": stages},
        reference=reference if stages > 1 else None,
        **against,
    )


def more(finished: Mapping[str, Record]) -> str:
    """Where the losses end, since most cells never come to the cut-off."""
    return (
        "## Where losses end\n\n"
        "Added after the runs, as steps to the cut-off tell little where no seed comes there. In % of the test loss of "
        "the same optimizer without delay (of a rotated one: of the optimizer that is not rotated), and of the same "
        "delay without the cure, seed by seed; *lower* and *higher* where the whole interval lies on one side of 0.\n\n"
        f"{loss_table(finished, ALL)}"
    )


ALL = cells()
STUDY = Study(
    name="depth",
    title="Depth: which cure keeps up at 32 stages",
    question=(
        "How many more steps does a deep asynchronous pipeline need to the loss that its own optimizer has without "
        "delay at 90 % of training, and which cure brings that down?"
    ),
    cells=ALL,
    train=train,
    horizon=HORIZON,
    claims=(
        Claim(
            "At 32 stages on asynchronous 1F1B, at most 1.3 times the steps of the same optimizer without delay "
            "(aim 1.15)",
            "ratio",
            tuple(
                cell.name
                for cell in ALL
                if cell.settings["stages"] == 32 and cell.method.startswith(("pipedream", "pipeoptim"))
            ),
            1.3,
            1.15,
        ),
        Claim(
            "Delay 1 with Muon and feedback: the last test loss at most 0.5 % above that without delay",
            "gap",
            ("2 stages, Muon, 2BW, feedback 1",),
            0.5,
        ),
    ),
    more=more,
    answer=(
        "**No cure keeps up in these 450 steps.** At 32 stages no seed of any cell comes to the loss that every seed "
        "of its own optimizer without delay has by step 270: each takes more than 1.44 to 1.61 times the steps, and "
        "the first figure is missed. (By the mean of the seeds, as rule 7 had it, NAdam's cell and so the figure were "
        "undecided; it changed with the [mended rules](../../rules.md#rules-mended), with all runs known, so that it "
        "is no test.) Losses end 15 to 29 % higher; a seed of SOAP diverged. Rotation of both sides is the one cure "
        "of this study that ends lower than the same delay without it: 2.7 % at 32 stages, 3.3 % at 16, 8.0 % at 8; "
        "it holds ten numbers for each parameter. Feedback and prediction along the step make no difference that "
        "three seeds show at 32 stages; T1 + T2 ends higher than the PB clock alone. Rates of 32 stages were chosen "
        "after 225 steps, when losses had hardly left that of byte frequencies: differences of a few percent between "
        "cures may be those of their rates. Under Muon one update of delay raises the last loss by 10 % [8, 13]; with "
        "feedback it is 5 % higher [-0.5, 11], which three seeds tell neither from no delay nor from the delay "
        "without feedback. [Three more ideas for each](../depth_ideas/README.md) did not keep up either; a "
        "synchronous warm-up brings Muon's to 1.8 %.",
        "**What delay takes away are the large rates**, by the first rung, one seed. Up to a rate of 0.003 Muon is "
        "where it is without the delay of one update (2.80 without, 2.83 with it, 2.80 with feedback); at 0.027, its "
        "best without delay, it comes to 2.61, 2.81 and 2.69. At 32 stages AdamW stays near 3.34, the loss of byte "
        "frequencies alone, for 150 steps; without delay it has left that within 75 (curves in `runs.jsonl`). These "
        "are the first 300 steps of a training, and a delay of 31 is a tenth of them all. Longer trainings at smaller "
        "rates should lose less, as others report; that is not measured here.",
    ),
    setting=(
        "A decoder of 32 thin blocks (width 32, two heads) on the bytes of PostgreSQL's manual, context 32, batches of "
        "16, 450 steps; the cut-off is what every seed of the reference has reached by step 270: "
        "[rules](../../rules.md), study 1. The data is a folder with `train.txt`, `validation.txt` and `test.txt`."
    ),
    tried=(
        "Three pilots measured speed alone: this package's own transformer block (16 tensors) against the thin one "
        "here (4 tensors), widths 16 to 48; then every cell for 10 steps. A thin block takes about half as much time, "
        "since at this size a step is calls, not arithmetic. After that, before the first run, steps were scaled by "
        "3/4.",
        "Left out beforehand: feedback c = 1 at 32 stages, SGD's velocity and spike cures (study 2), and every "
        "combination of cures.",
        "The commits told of the first ten runs are those of the repository at their ends; they were all made with the "
        "package as of 1f87d78. Later runs tell the commit of the code they were made with.",
    ),
)
