"""Synthetic studies: learning curves that behave like those of local methods, with costs to match."""

import math
import random
from dataclasses import replace

from stretto.report import Page, Point, Record
from stretto.report.record import Observation
from stretto.report.recorded_run import RecordedRun

# method -> (total FLOP per example, serial FLOP per step, floor of the loss, speed, learning rate that is too high)
METHODS = {
    "backprop": (3.0e6, 3.0e6, 0.0008, 1.00, 0.9),
    "greedy": (3.3e6, 0.9e6, 0.07, 0.80, 0.5),
    "overlapping": (3.9e6, 1.2e6, 0.02, 0.90, 0.9),
    "chunked(chunks=2)": (3.1e6, 1.6e6, 0.006, 0.95, 0.9),
}
RATES, BATCHES, SEEDS = (0.03, 0.1, 0.3, 1.0), (32, 128), (0, 1, 2)
PICTURE = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 240 60">'
    + "".join(
        f'<rect x="{5 + 30 * i}" y="{8 + 14 * (i % 3)}" width="28" height="12" fill="#9ecae1"/>' for i in range(7)
    )
    + "</svg>"
)


def make_run(method, rate, batch, seed, *, accuracy=True, steps=2000, every=100, generalise=0.25) -> Record:
    total, serial, floor, speed, limit = METHODS.get(method, METHODS["overlapping"])
    noise = random.Random(f"{method}{rate}{batch}{seed}")
    fails = rate > limit and noise.random() < 0.8
    end = noise.randrange(150, 900) if fails else steps
    pace = speed * min(rate, 0.6 * limit) ** 0.7 * (batch / 64) ** 0.4 * noise.uniform(0.9, 1.1) / 90
    points = []
    for step in range(0, end + 1, every):
        train = floor + 2.3 * math.exp(-pace * step) * noise.uniform(0.93, 1.07)
        validation = math.hypot(train, generalise * (1 + 4 * floor)) * noise.uniform(0.98, 1.02)
        share = round(math.exp(-0.13 * validation**1.1), 4) if accuracy else None
        points.append(
            Point(
                step=step,
                examples=step * batch,
                total_flops=total * step * batch,
                serial_flops=serial * step,
                seconds=0.004 * step * (batch / 32) ** 0.5,
                train_loss=train,
                validation_loss=validation,
                train_accuracy=None if share is None else round(math.exp(-0.13 * train**1.1), 4),
                validation_accuracy=share,
                validation_bleu=None if share is None else 100 * share**4,
            )
        )
    last = points[-1]
    record = Record(
        id=f"{method}-{rate}-{batch}-{seed}",
        method=method,
        seed=seed,
        options={"lr": rate, "batch_size": batch},
        status="diverged" if fails else "finished",
        diverged_at=end if fails else None,
        points=tuple(points),
        total_flops=total * end * batch,
        serial_flops=serial * end,
        seconds=0.004 * end,
    )
    if fails:
        return record
    return replace(
        record,
        train_loss=last.train_loss,
        train_accuracy=last.train_accuracy,
        validation_loss=last.validation_loss,
        validation_accuracy=last.validation_accuracy,
        validation_bleu=last.validation_bleu,
        test_loss=last.validation_loss * 1.03,
        test_accuracy=last.validation_accuracy and last.validation_accuracy - 0.004,
        test_bleu=last.validation_bleu and last.validation_bleu - 0.4,
    )


def make_records(methods=tuple(METHODS), rates=RATES, batches=BATCHES, seeds=SEEDS, **options) -> tuple[Record, ...]:
    return tuple(
        make_run(method, rate, batch, seed, **options)
        for method in methods
        for rate in rates
        for batch in batches
        for seed in seeds
    )


def make_page(records=None, **changes) -> Page:
    records = make_records() if records is None else records
    values = {
        "title": "Local parallelism on digits",
        "records": records,
        "planned": max(len(records), 1),
        "accounting_note": "Total compute is what PyTorch's counter counts on the real modules; serial compute is the "
        "simulated time of a steady-state step with those counts as durations.",
        "dataset": "digits: 1,437 training, 180 validation, 180 test images of 8 by 8",
        "model": "MLP, 8 layers of 256 units, 4 stages",
        "heads_note": "Each local stage has one linear layer to the logits. The paper's heads could not be retrieved.",
        "settings": {"steps": 2000, "methods": list(METHODS), "model": {"name": "mlp", "width": 256, "norm": None}},
        "versions": {"stretto": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "pictures": {"backprop": PICTURE, "greedy": PICTURE},
        "command": "stretto compare --model mlp --data digits --methods backprop,greedy --seeds 3",
    }
    return Page(**{**values, **changes})


def point(serial=1.0, total=1.0, step=1, **values) -> Point:
    defaults = {"examples": step, "seconds": 0.0, "train_loss": 1.0, "validation_loss": 1.0}
    return Point(step=step, total_flops=total, serial_flops=serial, **{**defaults, **values})


def run(losses=(), method="backprop", seed=0, id=None, costs=None, **values) -> Record:
    """A run whose train and validation loss take these values at steps 1, 2, ...; costs are (serial, total)."""
    costs = costs or [(float(step), float(step)) for step in range(1, len(losses) + 1)]
    points = tuple(
        point(*cost, step=step, train_loss=loss, validation_loss=loss)
        for step, (loss, cost) in enumerate(zip(losses, costs, strict=True), start=1)
    )
    values = {"options": {"lr": 0.1}, "status": "finished", **values}
    if values["status"] == "finished" and losses:
        values = {"train_loss": losses[-1], "validation_loss": losses[-1], **values}
        values = {"serial_flops": costs[-1][0], "total_flops": costs[-1][1], **values}
    return Record(id=id or f"{method}-{seed}-{losses}", method=method, seed=seed, points=points, **values)


def observation(step=10, mismatch=(0.2, 0.1, 0.0), **values) -> Observation:
    """Three stages that predict nothing and hold their weights once."""
    nothing = (None,) * len(mismatch)
    figures = {"prediction_error": nothing, "unpredicted_error": nothing,
               "weight_bytes": (1000,) * len(mismatch), "activation_bytes": (300, 200, 100)}  # fmt: skip
    return Observation(step=step, mismatch=mismatch, **{**figures, **values})


def recorded(run, method, recordings, schedule, rules, **values):
    return RecordedRun(run=run, method=method, recordings=recordings, schedule=schedule, rules=rules, **values)
