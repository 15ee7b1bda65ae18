"""Three ideas for the figure that study 1 misses: finer updates, these rotated, less momentum. See rules.md."""

import depth
from harness import Cell, Claim, Study

FINER = 8  # micro-batches of an update: two examples each
MOMENTA = (0.5, 0.0)  # AdamW's beta 1


def cells() -> tuple[Cell, ...]:
    """The two references of study 1 again, then the ideas."""
    plain, rotated = (depth.ALL_BY_NAME[f"1 stage, AdamW, {cure}"] for cure in ("none", "rotated"))
    finer, turned = f"paci(every={FINER})", f"paci(every={FINER}, rotate=True)"
    return (
        plain,
        rotated,
        _cell(f"32 stages, AdamW, PACI({FINER})", finer, plain),
        Cell(
            f"32 stages, AdamW, PACI({FINER}), rotated", turned, "AdamW", rotated.rates, rotated.steps, {"stages": 32},
            reference=rotated.name, beside=plain.name, uncured=f"32 stages, AdamW, PACI({FINER})",
        ),
        _cell("2 stages, AdamW, 2BW", "pipedream-2bw", plain, stages=2),
        *(
            _cell(f"32 stages, AdamW, stash, momentum {momentum:g}", "pipedream", plain, betas=(momentum, 0.99))
            for momentum in MOMENTA
        ),
    )  # fmt: skip


def _cell(name: str, method: str, reference: Cell, *, stages: int = 32, **options: tuple[float, float]) -> Cell:
    settings = {"stages": stages, **({"options": options} if options else {})}
    return Cell(name, method, "AdamW", reference.rates, reference.steps, settings, reference=reference.name)


ALL = cells()
STUDY = Study(
    name="depth_ideas",
    title="Depth: three ideas for 32 stages",
    question=(
        "Study 1 asks for at most 1.3 times the steps of training without delay at 32 stages. Its cells with a delay "
        "of up to 31 updates need more; do these?"
    ),
    cells=ALL,
    train=depth.train,
    horizon=depth.HORIZON,
    claims=(
        Claim(
            "At 32 stages on asynchronous 1F1B, at most 1.3 times the steps of the same optimizer without delay "
            "(aim 1.15)",
            "ratio",
            tuple(cell.name for cell in ALL if cell.settings["stages"] == 32),
            1.3,
            1.15,
        ),
    ),
    setting=(
        "The network, data, rates, cut-off and grids of [study 1](../depth/README.md); its references are trained "
        f"again. (1) *Finer updates*: a minibatch of {depth.BATCH} in {FINER} micro-batches, so that a gradient is at "
        f"most {-(-31 // FINER)} updates old instead of 31 (PACI), with the same examples an update; its limit is 2BW, "
        "whose gradients are one update old on any number of stages (32 need 32 micro-batches of a minibatch: this "
        "cell has two stages, which have the same delay). (2) The same with a rotated basis. (3) *Less momentum*, "
        "since delay acts as momentum does: [rules](../../rules.md), the ideas of study 1."
    ),
    tried=(
        "Left out beforehand: a synchronous warm-up (PipeMare's T3). A minibatch of N micro-batches that is alone in "
        "32 stages takes (N + 31) / N times as long as one that follows others: 60 of them with N = 8 take as long as "
        "290 asynchronous ones, on a run of 300.",
    ),
)
