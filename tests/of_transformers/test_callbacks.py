"""Callbacks see the same events, states and controls as without us; logs of late losses stand under their own steps."""

import pytest
import torch
from tiny_models import Examples, arguments, build

from late_imports import Late

piped, recorder, transformers = Late("stretto.transformers"), Late("recorder"), Late("transformers")


def recorded(kind, folder, more=(), **options):
    """The events of a run with transformers' own Trainer, of one with ours, and both trainers."""
    data = {"train_dataset": Examples(kind), "eval_dataset": Examples(kind, 8, seed=7)}
    runs = []
    for name, make, own in (
        ("theirs", transformers.Trainer, {}),
        ("ours", piped.StrettoTrainer, {"method": "1f1b", "stages": 2}),
    ):
        told = recorder.Recorder()
        callbacks = [told, *(callback() for callback in more)]
        trainer = make(build(kind), arguments(folder / name, **options), callbacks=callbacks, **data, **own)
        trainer.train()
        runs.append((told.events, trainer))
    return runs


def assert_alike(one, other):
    """The same, numbers within 1e-6."""
    assert type(one) is type(other) or isinstance(one, int | float)
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_alike(a, b)
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=1e-6, abs=1e-6)
    else:
        assert one == other


@pytest.mark.parametrize(
    "options",
    [
        {"num_train_epochs": 2, "max_steps": -1, "eval_strategy": "epoch", "save_strategy": "epoch",
         "load_best_model_at_end": True, "save_total_limit": 1, "gradient_accumulation_steps": 4},
        pytest.param(
            {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "logging_steps": 3,
             "logging_first_step": True, "include_num_input_tokens_seen": "all"}, marks=pytest.mark.slow,
        ),
    ],
    ids=["epochs", "steps"],
)  # fmt: skip
def test_events_states_and_controls_are_those_without_us(options, tmp_path):
    (theirs, one), (ours, other) = recorded("llama", tmp_path, **options)
    assert [event for event, *_ in ours] == [event for event, *_ in theirs]
    for before, after in zip(theirs, ours, strict=True):
        assert_alike(before, after)
    folders = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("theirs", "ours")]
    assert folders[0] == folders[1]
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_early_stopping(tmp_path):
    stop = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 20,
            "load_best_model_at_end": True, "learning_rate": 1.0, "max_grad_norm": 100.0}  # fmt: skip
    (theirs, one), (ours, other) = recorded("vit", tmp_path, [lambda: transformers.EarlyStoppingCallback(2)], **stop)
    assert [event for event, *_ in ours] == [event for event, *_ in theirs]
    assert other.state.global_step == one.state.global_step < 20
    assert other.state.best_global_step == one.state.best_global_step


def test_late_losses_are_logged_under_their_own_steps(tmp_path):
    given = {"logging_steps": 2, "max_steps": 9, "eval_strategy": "steps", "eval_steps": 3}
    data = {"train_dataset": Examples("llama"), "eval_dataset": Examples("llama", 4, seed=7)}
    single = piped.StrettoTrainer(build("llama"), arguments(tmp_path, **given | {"logging_steps": 1}), **data,
                                method="pb", stages=2)  # fmt: skip
    single.train()
    each = {entry["step"]: entry["loss"] for entry in single.state.log_history if "loss" in entry}
    assert single.pipeline.trainer.lag == 4
    assert list(each) == list(range(1, 10))
    watch = recorder.Recorder()
    trainer = piped.StrettoTrainer(build("llama"), arguments(tmp_path, **given), **data, callbacks=[watch], method="pb",
                                 stages=2)  # fmt: skip
    result = trainer.train()
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    assert {step: entry["loss"] for step, entry in logged.items()} == {
        step: pytest.approx((each[step - 1] + each[step]) / 2, rel=1e-12) for step in (2, 4, 6, 8)
    }
    assert [entry["epoch"] for entry in logged.values()] == [pytest.approx(step / 6) for step in logged]
    assert result.training_loss == pytest.approx(sum(each.values()) / 9, rel=1e-7)
    order = [(entry["step"], "loss" in entry) for entry in trainer.state.log_history]
    assert order == [(3, False), (2, True), (6, False), (4, True), (6, True), (8, True), (9, False), (9, False)]
    told = [
        seen["global_step"]
        for event, seen, *_, given, _ in watch.events
        if event == "on_log" and "loss" in given["logs"]
    ]
    assert told == [2, 4, 6, 8]  # what TensorBoard and others write down


def test_entries_wait_for_their_last_loss():
    late = Late("stretto.transformers.late_logs").LateLogs()
    late.wait(2, 0.5, {"rate": 1.0})
    late.know(0, 3.0)
    assert late.ready() == []
    late.know(1, 5.0)
    late.know(2, 7.0)
    assert [(entry.step, entry.values) for entry in late.ready()] == [(2, {"loss": 4.0, "rate": 1.0})]
    late.know(1, 9.0)  # a flush tells losses again
    late.wait(3, 0.75, {})
    assert [entry.values for entry in late.ready()] == [{"loss": 7.0}]
    assert (late.total, late.rest()) == (15.0, 0)
