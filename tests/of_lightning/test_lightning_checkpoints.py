"""Checkpoints: Lightning's own files, which plain Lightning reads, and from which every method goes on to the bit."""

import pytest
import torch

from late_imports import Late

callbacks, lit, piped = Late("lightning.pytorch.callbacks"), Late("lit_modules"), Late("stretto.lightning")
pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch", "ignore::FutureWarning")
SLOW = ("1f1b", "greedy", "pb-lwp-sc", "pipemare", "overlapping")
METHODS = ["pipedream", *(pytest.param(method, marks=pytest.mark.slow) for method in SLOW)]


def adam(parameters):
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)}


def fit(folder, strategy, epochs, path=None, configure=adam, **options):
    saves = callbacks.ModelCheckpoint(folder, save_last=True, save_top_k=1, monitor="val_loss")
    own = lit.trainer(strategy, max_epochs=epochs, callbacks=[saves], enable_checkpointing=True, **options)
    module = lit.Classifier(configure=configure)
    own.fit(module, lit.loader(), lit.loader(16), ckpt_path=path)
    return module, own


def ours(method="1f1b", stages=4):
    return piped.StrettoStrategy(method, stages=stages)


@pytest.mark.parametrize("method", METHODS)
def test_training_goes_on_to_the_last_bit(tmp_path, method):
    configure = None if method == "pb-lwp-sc" else adam
    whole, by_whole = fit(tmp_path / "whole", ours(method), 2, configure=configure)
    fit(tmp_path / "parts", ours(method), 1, configure=configure)
    rest, by_rest = fit(tmp_path / "parts", ours(method), 2, path="last", configure=configure)
    assert lit.difference(whole, rest) == 0
    assert by_whole.global_step == by_rest.global_step == 2 * lit.STEPS
    one, two = ({k: v.item() for k, v in own.callback_metrics.items()} for own in (by_whole, by_rest))
    assert one == two


@pytest.mark.parametrize("method", [pytest.param("1f1b", marks=pytest.mark.slow), "pipedream"])
def test_a_checkpoint_saved_after_the_fit_goes_on_to_the_last_bit(tmp_path, method):
    whole, _ = fit(tmp_path / "whole", ours(method), 2)
    _, own = fit(tmp_path / "half", ours(method), 1)
    own.save_checkpoint(tmp_path / "by-hand.ckpt")
    rest, _ = fit(tmp_path / "rest", ours(method), 2, path=tmp_path / "by-hand.ckpt")
    assert lit.difference(whole, rest) == 0


def test_another_module_is_tested_after_a_fit(tmp_path):
    trained, own = fit(tmp_path, ours(), 1)
    other = lit.Classifier(configure=adam)
    other.load_state_dict(trained.state_dict())
    (one,), (two,) = (own.test(module, lit.loader(), verbose=False) for module in (trained, other))
    assert one == two


def test_plain_lightning_goes_on_from_ours_and_we_from_its(tmp_path):
    """Weights, the optimizer's state and the scheduler's are where Lightning looks for them."""
    fit(tmp_path / "ours", ours(), 1)
    fit(tmp_path / "its", "auto", 1)
    names = [saved["state_dict"] for saved in map(read, (tmp_path / "ours", tmp_path / "its"))]
    assert list(names[0]) == list(names[1])
    ends = [
        fit(tmp_path / folder, strategy, 2, path="last")[0]
        for folder, strategy in (("ours", "auto"), ("its", ours("1f1b", 2)))
    ]
    ends += [fit(tmp_path / "none", "auto", 2)[0]]
    assert lit.difference(ends[0], ends[2]) < 1e-12
    assert lit.difference(ends[1], ends[2]) < 1e-12


def test_another_number_of_stages_goes_on_with_weights_and_optimizer(tmp_path):
    fit(tmp_path, ours("1f1b", 4), 1)
    one, _ = fit(tmp_path, ours("gpipe", 2), 2, path="last")
    assert lit.difference(one, fit(tmp_path / "whole", "auto", 2)[0]) < 1e-12


def test_what_async_stood_for_before_is_told(tmp_path, monkeypatch):
    fit(tmp_path, ours("pipedream"), 1)
    said = []
    monkeypatch.setattr("stretto.lightning.strategy.rank_zero_info", said.append)
    fit(tmp_path, ours("async"), 2, path="last")
    assert "'async' stood for another method: give method='pipedream' to go on exactly" in said[-1]


def test_a_file_holds_each_weight_once_and_loads_as_weights(tmp_path):
    module, _ = fit(tmp_path, ours(), 1)
    fit(tmp_path / "its", "auto", 1)
    ours_bytes, its_bytes = ((folder / "last.ckpt").stat().st_size for folder in (tmp_path, tmp_path / "its"))
    assert ours_bytes < 2 * its_bytes  # the weights and Adam's two moments are not there twice
    other = lit.Classifier()
    other.load_state_dict(read(tmp_path)["state_dict"])
    assert lit.difference(module, other) == 0


def read(folder):
    return torch.load(folder / "last.ckpt", weights_only=True)


def test_the_best_checkpoint_is_tested(tmp_path):
    module, own = fit(tmp_path, ours(), 2)
    (best,) = own.test(module, lit.loader(), ckpt_path="best", verbose=False)
    module, plain = fit(tmp_path / "its", "auto", 2)
    (other,) = plain.test(module, lit.loader(), ckpt_path="best", verbose=False)
    assert best["test_loss"] == pytest.approx(other["test_loss"], abs=1e-12)


@pytest.mark.parametrize("method", ["1f1b", "pipedream"])
def test_a_checkpoint_within_an_epoch_loses_no_log(tmp_path, method):
    """It drains the pipeline; losses that are known by then are still logged in their turn, each under its own step."""
    saves = callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    logger = lit.Remembering()
    own = lit.trainer(ours(method, 2), callbacks=[saves], enable_checkpointing=True, logger=logger, limit_val_batches=0)
    own.fit(lit.Classifier(), lit.loader())
    assert len(list(tmp_path.glob("*.ckpt"))) == 4
    losses = logger.of("train_loss_step")
    assert sorted(losses) == list(range(2 * lit.STEPS))
    of_the_last_epoch = list(losses.values())[-lit.STEPS :]
    assert own.callback_metrics["train_loss_epoch"].item() == pytest.approx(sum(of_the_last_epoch) / lit.STEPS)
