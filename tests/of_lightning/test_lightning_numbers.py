"""Losses and weights: of stretto.Trainer to the bit, and of Lightning's own training where gradients are exact."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import stretto
from late_imports import Late
from pairwise import slow_where
from stretto.methods import table

callbacks, lit, piped = Late("lightning.pytorch.callbacks"), Late("lit_modules"), Late("stretto.lightning")
pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch", "ignore::FutureWarning")
QUICK = ("1f1b", "pb-lwp-sc", "pipeoptim", "greedy", "synthetic-gradients(rate=0.3)")
EXACT = ("backprop", "1f1b", "1f1b(recompute=true)", "gpipe", "zb-h1", "interleaved")
OPTIONS = ("overlapping(delay=1)", "chunked(chunks=2)", "synthetic-gradients(rate=0.3)")
OF_SGD = [name for name in table.METHODS if name != "nesterov"]
METHODS, SYNCHRONOUS = (
    slow_where(lambda method: method not in QUICK, methods)
    for methods in ([*dict.fromkeys([*EXACT, *OF_SGD, *OPTIONS])], EXACT)
)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def halved(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def plain(method, **options):
    """The losses by step and the weights of stretto.Trainer, flushed at each epoch's end as Lightning's epochs are."""
    x, y = lit.loader().dataset.tensors
    stages = stretto.split(lit.network(), 4, example=x[: lit.BATCH])
    own = stretto.Trainer(
        stages, stretto.mean(cross_entropy), sgd, method, example=x[: lit.BATCH], device="cpu", **options
    )
    losses = {}
    for _ in range(2):
        for rows in torch.arange(len(x)).split(lit.BATCH):
            loss = own.step(x[rows], y[rows])
            losses[own.entered - 1 - own.lag] = loss
        rest = own.flush()
        losses |= {own.entered - len(rest) + number: loss for number, loss in enumerate(rest)}
    return losses, [value for key, value in own.gather().items() if not key.startswith("heads.")]


@pytest.mark.parametrize("method", METHODS)
def test_the_numbers_of_stretto_trainer_to_the_bit(method):
    foresees = method == "pipeoptim"  # a Trainer's own scheduler tells it the rates to come; Lightning's does not
    module, logger = lit.Classifier(configure=sgd if foresees else with_scheduler), lit.Remembering()
    lit.fitted(piped.StrettoStrategy(method, stages=4), module, train=lit.loader(), logger=logger)
    losses, weights = plain(method, scheduler=None if foresees else halved)
    assert [torch.equal(a, b) for a, b in zip(module.net.state_dict().values(), weights, strict=True)] == [True] * 8
    logged = logger.of("train_loss_step")
    assert sorted(logged) == list(range(2 * lit.STEPS))
    for step in range(2 * lit.STEPS):
        assert logged[step] == pytest.approx(losses[step], rel=1e-14, abs=0), step


def with_scheduler(parameters):
    optimizer = sgd(parameters)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halved(optimizer), "interval": "step"}}


def one_cycle(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=2 * lit.STEPS)  # also moves the momentum
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


def plateau(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=1.0)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


def in_groups(parameters):
    weights = list(parameters)
    groups = [{"params": weights[::2], "lr": 0.05}, {"params": weights[1::2], "weight_decay": 0.0}]
    optimizer = torch.optim.Adam(groups, lr=0.01, weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 5))
    return [optimizer], [{"scheduler": warmup, "interval": "step", "frequency": 2}, halved(optimizer)]


VARIANTS = {
    "one cycle": {"configure": one_cycle},
    "plateau": {"configure": plateau, "max_epochs": 3},
    "groups": {"configure": in_groups},
    "clipped": {"gradient_clip_val": 0.3},
    "accumulated": {"accumulate_grad_batches": 2},
    "accumulated, with a rest": {"accumulate_grad_batches": 5, "rest": True},
    "some batches": {"limit_train_batches": 5, "val_check_interval": 2, "max_steps": 8},
}


@pytest.mark.parametrize("method", SYNCHRONOUS)
def test_exact_methods_come_to_what_lightning_comes_to(method):
    one, by_lightning = lit.fitted(logger=(told := lit.Remembering()))
    two, by_us = lit.fitted(piped.StrettoStrategy(method, stages=4), logger=(ours := lit.Remembering()))
    assert lit.difference(one, two) < 1e-12
    alike(told.lines, ours.lines)
    alike([(by_lightning.callback_metrics, 0)], [(by_us.callback_metrics, 0)])


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_what_a_user_varies_comes_to_the_same(variant):
    configure = variant.get("configure", sgd)
    options = {name: value for name, value in variant.items() if name not in ("configure", "rest")}
    lines, modules = [], []
    for strategy in ("auto", piped.StrettoStrategy("1f1b", stages=4)):
        watch = [callbacks.LearningRateMonitor(log_momentum=True)]
        logger = lit.Remembering()
        module, _ = lit.fitted(strategy, lit.Classifier(configure=configure), logger=logger, callbacks=watch, **options)
        modules.append(module)
        lines.append(logger.lines)
    assert lit.difference(*modules) < 1e-12
    if "rest" in variant:  # micro-batches go across the loader's batches, whose own values are not known
        lines = [[({k: metrics[k] for k in EPOCHS & metrics.keys()}, step) for metrics, step in each] for each in lines]
    alike(*lines)


EPOCHS = {"train_loss_epoch", "val_loss", "val_accuracy", "lr-SGD"}


def alike(one, two, within=1e-12):
    """The same names at the same steps, with the same values."""
    assert [(sorted(metrics), step) for metrics, step in one] == [(sorted(metrics), step) for metrics, step in two]
    for (metrics, step), (others, _) in zip(one, two, strict=True):
        for name, value in metrics.items():
            assert float(value) == pytest.approx(float(others[name]), abs=within), (name, step)


def test_float32_comes_within_a_millionth():
    one, _ = lit.fitted(
        module=lit.Classifier(lit.network().float()), train=lit.loader(shuffle=True, float32=True), limit_val_batches=0
    )
    two, _ = lit.fitted(
        piped.StrettoStrategy("1f1b", stages=4),
        lit.Classifier(lit.network().float()),
        train=lit.loader(shuffle=True, float32=True),
        limit_val_batches=0,
    )
    assert lit.difference(one, two) < 1e-6


@pytest.mark.parametrize("method", ["1f1b", pytest.param("backprop", marks=pytest.mark.slow)])
def test_callbacks_see_the_same_events(method):
    events = []
    for strategy in ("auto", piped.StrettoStrategy(method, stages=2)):
        watch = lit.Events()
        fitting = lit.fitted(strategy, callbacks=[watch], accumulate_grad_batches=1)[1]
        fitting.test(fitting.lightning_module, lit.loader(), verbose=False)
        events.append(watch.seen)
    assert [each[:3] for each in events[0]] == [each[:3] for each in events[1]]
    alike([(each[3], each) for each in events[0]], [(each[3], each) for each in events[0]])
    for (*_, metrics), (*_, others) in zip(*events, strict=True):
        alike([(metrics, 0)], [(others, 0)])


def test_early_stopping_and_predictions_are_lightnings():
    told = []
    for strategy in ("auto", piped.StrettoStrategy("1f1b", stages=2)):
        stop = callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.2)
        module, fitting = lit.fitted(strategy, callbacks=[stop], max_epochs=20)
        predicted = fitting.predict(module, lit.loader())
        tested = fitting.test(module, lit.loader(), verbose=False)
        validated = fitting.validate(module, lit.loader(), verbose=False)
        told.append((fitting.current_epoch, stop.stopped_epoch, torch.cat(predicted).tolist(), tested, validated))
    assert told[0][:3] == told[1][:3]
    assert told[0][0] < 20
    alike([(told[0][3][0], 0), (told[0][4][0], 0)], [(told[1][3][0], 0), (told[1][4][0], 0)])


def test_a_short_last_batch_is_weighted_by_its_examples_and_that_is_said():
    """Two batches of the loader are one minibatch: 5 + 5 examples, at last 5 + 3."""
    module, train = lit.Classifier(), lit.loader(5, examples=28)
    options = {"accumulate_grad_batches": 2, "limit_val_batches": 0}
    with pytest.warns(UserWarning, match="the batches of one minibatch have 5, 3 examples"):
        lit.fitted(piped.StrettoStrategy("1f1b", stages=4), module, train, **options)
    x, y = train.dataset.tensors
    stages = stretto.split(lit.network(), 4, example=x[:5])
    own = stretto.Trainer(stages, stretto.mean(cross_entropy), sgd, "1f1b", device="cpu")
    for _ in range(2):
        for rows in torch.arange(len(x)).split(10):
            own.step(x[rows], y[rows])
    assert all(map(torch.equal, module.net.state_dict().values(), own.gather().values()))
