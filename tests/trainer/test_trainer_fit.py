"""`Trainer.fit`: the numbers of a hand-written loop, resumed to the last bit, and what it refuses."""

import os
import re
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import stretto
from pairwise import in_turn, slow_where
from runtime import fitted
from runtime.fitted import X, Y, build, same
from runtime.processes import launch
from stretto.data.dataset import Split
from stretto.errors import UsageError
from stretto.nn.seeding import derive
from stretto.trainer.history import EarlyStop, History

METHODS = ["backprop", "1f1b(microbatches=2)", "pb"]


def by_hand(trainer, epochs, batch_size=6, seed=None):
    """Losses of the loop that a user would write; each at its own step."""
    split, losses = Split(X, Y), []
    seed = derive(trainer.seed, "batches") if seed is None else seed
    for epoch in range(epochs):
        for x, y in split.batches(batch_size, seed=derive(seed, "epoch", epoch)):
            losses.append(trainer.step(x, y))
    return [loss for loss in losses if loss is not None] + trainer.flush()


def fit(trainer, train=None, **options):
    options = {"quiet": True, **options}
    if not {"epochs", "steps"} & {*options}:
        options["epochs"] = 3
    if train is None:
        train, options = (X, Y), {"batch_size": 6, **options}
    return trainer.fit(train, **options)


def weights(trainer):
    return {key: value.clone() for key, value in trainer.model.state_dict().items()}


class CrashError(Exception):
    """What ends a run in these tests, as a crash would."""


def crash_after(step):
    """A log that ends the run once the loss of that step is known."""

    def log(told):
        if told["step"] == step:
            raise CrashError

    return log


# -- the numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_it_equals_a_loop_by_hand(method):
    one, other = build(method), build(method)
    history = fit(one, validation=(X, Y))
    losses = by_hand(other, 3)
    assert history.steps == losses
    assert same(weights(one), weights(other))
    result = other.evaluate([(X, Y)])
    assert history.validation_loss[-1] == pytest.approx(result["loss"], abs=1e-7)
    assert history["validation_accuracy"][-1] == result["accuracy"]
    assert len(history["train_loss"]) == len(history.validation_loss) == 3


@pytest.mark.parametrize("method", METHODS)
def test_losses_belong_to_their_own_epoch_and_step(method):
    logged, entries = [], []
    trainer = build(method)
    history = fit(trainer, log=logged.append, callbacks=[lambda who, entry: entries.append((who, entry))])
    assert [told["step"] for told in logged] == list(range(1, 16))
    assert [told["loss"] for told in logged] == history.steps
    assert all(told["examples_per_second"] > 0 for told in logged)
    sizes = [6, 6, 6, 6, 3]  # 27 examples
    for epoch in range(3):
        losses = history.steps[5 * epoch : 5 * epoch + 5]
        wanted = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / 27
        assert history.train_loss[epoch] == pytest.approx(wanted, abs=1e-12)
    assert [entry for _, entry in entries] == history.entries
    assert all(who is trainer for who, _ in entries)


def test_a_checkpoint_of_an_asynchronous_method_has_a_flush_before_it(tmp_path):
    one, other = build("pb"), build("pb")
    history = fit(one, checkpoint=tmp_path / "saved")
    losses, seed = [], derive(other.seed, "batches")
    for epoch in range(3):
        taken = []
        for x, y in Split(X, Y).batches(6, seed=derive(seed, "epoch", epoch)):
            taken.append(other.step(x, y))
        losses += other.flush()[-5:]
    assert history.steps == losses
    assert same(weights(one), weights(other))


def test_a_second_fit_goes_on_with_other_orders():
    trainer = build()
    first, second = fit(trainer, epochs=1), fit(trainer, epochs=1)
    other = build()
    assert by_hand(other, 1) == first.steps
    assert by_hand(other, 1, seed=derive(other.seed, "batches", 5)) == second.steps
    assert [len(first.steps), len(second.steps)] == [5, 5]


def test_losses_of_steps_before_belong_to_no_epoch():
    one, other = build("pb"), build("pb")
    for trainer in (one, other):
        for number in range(3):
            trainer.step(X[number : number + 6], Y[number : number + 6])
    history = fit(one, epochs=1)
    losses = by_hand(other, 1, seed=derive(other.seed, "batches", 3))
    assert history.steps == losses[-5:]


@pytest.mark.parametrize("method", METHODS)
def test_steps_of_a_callback_are_no_part_of_the_history(method):
    more = (X[5:11], Y[5:11])
    told = []

    def train_more(trainer, entry):
        for _ in range(entry["epoch"]):
            trainer.step(*more)

    def load_too(trainer, entry):
        trainer.load_state_dict(trainer.state_dict())

    trainer, calls = build(method), []
    step, flush = trainer.step, trainer.flush
    trainer.step = lambda x, y: calls.append((x, y)) or step(x, y)
    trainer.flush = lambda: calls.append(None) or flush()
    history = fit(trainer, in_batches(), steps=11, evaluate_every=3, callbacks=[train_more], log=told.append)
    other, losses = build(method), []
    for call in calls:
        losses += other.flush()[: other.entered - len(losses)] if call is None else [other.step(*call)]
        losses = [loss for loss in losses if loss is not None]
    own = [number for number, (x, _) in enumerate(call for call in calls if call is not None) if x is not more[0]]
    assert history.steps == [losses[number] for number in own]
    assert [row["loss"] for row in told] == history.steps
    assert history["step"] == [3, 6, 9, 11]
    again = fit(build(method), in_batches(), steps=11, evaluate_every=3, callbacks=[load_too])
    assert (len(again.steps), again["step"]) == (11, history["step"])


def test_steps_instead_of_epochs():
    history = fit(build("pb"), validation=(X, Y), steps=12)
    assert history["step"] == [5, 10, 12]
    assert history["epoch"] == [1, 2, 3]
    assert len(history.validation_loss) == 3
    every = fit(build("pb"), validation=(X, Y), steps=12, evaluate_every=5)
    assert every["step"] == [5, 10, 12]
    every = fit(build("pb"), steps=7, evaluate_every=3)
    assert every["step"] == [3, 6, 7]
    assert every.steps == history.steps[:7]


def test_metrics_are_those_of_evaluate():
    def share(output, target):
        return (output.argmax(1) == target).float().mean()

    history = fit(build(), validation=(X, Y), metrics={"share": share})
    assert history["validation_share"] == pytest.approx(history.validation_accuracy, abs=1e-6)


# -- data ---------------------------------------------------------------------------------------------------------


class Items(torch.utils.data.Dataset):
    """Examples that are changed at random each time they are read."""

    def __len__(self):
        return len(X)

    def __getitem__(self, number):
        return X[number] + torch.randn(8) * 0.1, Y[number]


class Batches:
    """A loader with a state: it counts its batches and epochs, and another order comes in each."""

    def __init__(self):
        self.epoch, self.given = 0, 0

    def __iter__(self):
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(self.epoch)).split(6)
        while self.given < len(order):
            rows = order[self.given]
            self.given += 1
            yield X[rows], Y[rows]
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "given": torch.tensor(self.given), "of": np.arange(3)}

    def load_state_dict(self, state):
        assert state["of"].tolist() == [0, 1, 2]
        self.epoch, self.given = state["epoch"], int(state["given"])


class Endless(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


def in_batches(size=6):
    return list(zip(X.split(size), Y.split(size), strict=True))


def test_batches_are_gone_through_as_they_are():
    wanted = build()
    losses = [wanted.step(x, y) for _ in range(2) for x, y in in_batches()]
    sampled = DataLoader(TensorDataset(X, Y), batch_sampler=[range(n, min(n + 6, 27)) for n in range(0, 27, 6)])
    own = BatchSampler(SequentialSampler(X), 6, drop_last=False)
    for data in (
        in_batches(), DataLoader(Endless(), batch_size=6), sampled, DataLoader(TensorDataset(X, Y), 6),
        DataLoader(TensorDataset(X, Y), sampler=own, batch_size=None),
        [{"inputs": x, "labels": y} for x, y in in_batches()],
    ):  # fmt: skip
        assert fit(build(), data, validation=data, epochs=2).steps == losses


def test_two_batches_in_a_list_are_no_pair_of_tuples():
    batches = in_batches()[:2]
    wanted = build()
    assert fit(build(), batches, epochs=1).steps == [wanted.step(x, y) for x, y in batches]


def test_forms_of_data_come_to_the_same_numbers():
    wanted = fit(build()).steps
    loader = DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True)
    for data in ((X.numpy(), Y.numpy()), TensorDataset(X, Y), Split(X, Y)):
        assert fit(build(), data, batch_size=6).steps == wanted
    assert fit(build(), loader).steps == wanted
    assert len(fit(build(), loader, batch_size=9, epochs=1).steps) == 3
    assert len(fit(build(), DataLoader(TensorDataset(X, Y), 6, shuffle=True, drop_last=True), epochs=1).steps) == 4
    assert len(fit(build(), (X, Y), epochs=1).steps) == 1  # 32 at a time


def test_a_hugging_face_dataset():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": X.numpy(), "labels": Y.numpy()})
    assert fit(build(), rows, batch_size=6).steps == fit(build()).steps
    stream = rows.with_format("torch").to_iterable_dataset()
    assert len(fit(build(), DataLoader(stream, batch_size=6), epochs=2).steps) == 10


def test_a_last_batch_too_small_is_left_out_and_told_once():
    with pytest.warns(UserWarning, match="the last batch of an epoch has 3 examples, too few for 4 micro") as told:
        history = fit(build("1f1b(microbatches=4)"))
    assert len(told) == 1
    assert len(history.steps) == 12
    with pytest.warns(UserWarning, match="has 3 examples"):
        assert len(fit(build("1f1b(microbatches=4)"), in_batches(), epochs=1).steps) == 4
    assert len(fit(build("1f1b(microbatches=3)")).steps) == 15


def test_replicas_count_where_a_batch_is_cut():
    with pytest.warns(UserWarning, match="too few for 4 micro-batches and replicas together"):
        fit(build("1f1b(microbatches=2)", mesh=stretto.Mesh(data=2)), epochs=1)


# -- going on -----------------------------------------------------------------------------------------------------


def runs(make_data, method, tmp_path, crash, **options):
    """The history and the weights of a run, and of the same that crashed and was called again."""
    whole = build(method)
    wanted = fit(whole, make_data(), checkpoint=tmp_path / "whole", validation=(X, Y), **options)
    with pytest.raises(CrashError):
        fit(build(method), make_data(), checkpoint=tmp_path / "cut", validation=(X, Y), **options, log=crash)
    again = build(method)
    history = fit(again, make_data(), checkpoint=tmp_path / "cut", validation=(X, Y), **options)
    return (wanted, weights(whole)), (history, weights(again))


KINDS = {"pair": lambda: (X, Y), "items": Items, "batches": Batches, "in_batches": in_batches}


@pytest.mark.parametrize(("kind", "method"), in_turn(KINDS, ["pb", *METHODS[:2]], rounds=3, slow=2))
def test_a_crash_goes_on_from_the_last_epoch_to_the_bit(kind, method, tmp_path):
    data = KINDS[kind]
    options = {"epochs": 2} if data in (Batches, in_batches) else {"epochs": 2, "batch_size": 6}
    (wanted, trained), (history, resumed) = runs(data, method, tmp_path, crash_after(6), **options)
    assert history.steps == wanted.steps
    assert len(history.steps) == 10
    assert history.entries == wanted.entries
    assert same(resumed, trained)


@pytest.mark.parametrize(("kind", "method"), in_turn(KINDS, METHODS[:2], rounds=2, slow=1))
def test_ctrl_c_saves_after_the_step_and_says_how_to_go_on(kind, method, tmp_path):
    data = KINDS[kind]
    options = {} if data in (Batches, in_batches) else {"batch_size": 6}
    options |= {"checkpoint": tmp_path / "saved", "epochs": 2}
    whole = build(method)
    wanted = fit(whole, data(), validation=(X, Y), **{**options, "checkpoint": None})

    def press(told):
        if told["step"] == 7:
            os.kill(os.getpid(), signal.SIGINT)

    message = r"after step 7 \(batch 2 of epoch 2\), which is saved in .*saved: call it again"
    with pytest.raises(KeyboardInterrupt, match=message):
        fit(build(method), data(), validation=(X, Y), log=press, **options)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    again, logged = build(method), []
    history = fit(again, data(), validation=(X, Y), log=logged.append, **options)
    assert [told["step"] for told in logged] == list(range(8, 11))
    assert history.entries == wanted.entries
    assert history.steps == wanted.steps
    assert same(weights(again), weights(whole))


def test_checkpoint_every_saves_between_entries_and_goes_on_to_the_bit(tmp_path):
    options = {"checkpoint": tmp_path / "saved", "checkpoint_every": 2, "validation": (X, Y)}
    whole, again, logged = build(), build(), []
    wanted = fit(whole, validation=(X, Y))
    with pytest.raises(CrashError):
        fit(build(), log=crash_after(8), **options)
    history = fit(again, log=logged.append, **options)
    assert [told["step"] for told in logged] == list(range(7, 16))  # an epoch has 5 steps
    assert (history.steps, history.entries) == (wanted.steps, wanted.entries)
    assert same(weights(again), weights(whole))


def test_the_folder_of_a_checkpoint_is_made_or_refused_before_training(tmp_path):
    fit(build("backprop"), (X, Y), epochs=1, checkpoint=tmp_path / "a" / "b" / "saved")
    assert (tmp_path / "a" / "b" / "saved").is_dir()
    (tmp_path / "file").write_text("")
    trainer = build("backprop")
    with pytest.raises(UsageError, match=r"fit: checkpoint=.*: cannot make .*file: "):
        fit(trainer, (X, Y), epochs=1, checkpoint=tmp_path / "file" / "saved")
    assert trainer.entered == 0


def test_ctrl_c_under_an_asynchronous_method_goes_on_with_all_losses(tmp_path):
    def press(told):
        if told["step"] == 7:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(build("pb"), checkpoint=tmp_path / "saved", log=press)
    history = fit(build("pb"), checkpoint=tmp_path / "saved")
    assert len(history.steps) == 15
    assert len(history.train_loss) == 3


def test_an_interrupt_of_a_callback_saves_too(tmp_path):
    def interrupt(trainer, entry):
        raise KeyboardInterrupt

    wanted = fit(build(), checkpoint=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt) as told:
        fit(build(), checkpoint=tmp_path / "saved", callbacks=[interrupt])
    assert "after step 5 (batch 0 of epoch 2)" in told.value.__notes__[0]
    assert fit(build(), checkpoint=tmp_path / "saved").steps == wanted.steps


@pytest.mark.parametrize("make_data", [in_batches, lambda: (X, Y)])
@pytest.mark.parametrize(("method", "step"), [("backprop", 4), ("backprop", 10), ("pb", 4)])
def test_an_interrupted_log_is_told_again_and_its_entry_is_there(method, step, make_data, tmp_path):
    told = []

    def log(row):
        told.append(row)
        if [each["step"] for each in told].count(step) == 1 and row["step"] == step:
            raise KeyboardInterrupt

    common = {"steps": 12, "evaluate_every": 2, "batch_size": None if make_data is in_batches else 6}
    wanted = fit(build(method), make_data(), **common)
    with pytest.raises(KeyboardInterrupt) as raised:
        fit(build(method), make_data(), checkpoint=tmp_path / "saved", log=log, **common)
    assert "is saved in" in raised.value.__notes__[0]
    history = fit(build(method), make_data(), checkpoint=tmp_path / "saved", log=log, **common)
    assert [row["step"] for row in told] == [*range(1, step + 1), *range(step, 13)]
    assert [row["loss"] for row in told] == [*history.steps[:step], *history.steps[step - 1 :]]
    assert history["step"] == wanted["step"] == [2, 4, 6, 8, 10, 12]
    if method == "backprop":  # under "pb" each entry's checkpoint drains
        assert history.entries == wanted.entries


@pytest.mark.filterwarnings("ignore:.*a batch has 1 examples, too few")
@pytest.mark.parametrize("small", range(6))
def test_a_batch_too_small_counts_for_nothing_when_a_list_goes_on(small, tmp_path):
    def data():
        batches = list(zip(X[:15].split(3), Y[:15].split(3), strict=True))
        return [*batches[:small], (X[:1], Y[:1]), *batches[small:]]

    def stop_at(step):
        return lambda row: os.kill(os.getpid(), signal.SIGINT) if row["step"] == step else None

    def run(**options):
        return fit(build("1f1b(microbatches=2)"), data(), epochs=2, checkpoint=tmp_path / f"{step}", **options)

    wanted = build("1f1b(microbatches=2)")
    losses = [wanted.step(x, y) for _ in range(2) for x, y in data() if len(x) > 1]
    for step in (2, 8):
        with pytest.raises(KeyboardInterrupt, match=f"after step {step} "):
            run(log=stop_at(step))
        assert run().steps == losses


def test_a_loader_without_a_state_starts_again_and_the_user_is_told(tmp_path):
    def data():
        return DataLoader(Endless(), batch_size=6)

    with pytest.raises(CrashError):
        fit(build(), data(), checkpoint=tmp_path / "saved", log=crash_after(7))
    with pytest.warns(UserWarning, match=r"train is <.*DataLoader.*, without state_dict .*starts again"):
        history = fit(build(), data(), checkpoint=tmp_path / "saved")
    assert len(history.steps) == 15


def test_a_finished_run_is_not_trained_again_and_may_be_made_longer(tmp_path, capfd):
    first = fit(build(), checkpoint=tmp_path / "saved")
    again = build()
    assert fit(again, checkpoint=tmp_path / "saved", quiet=False).entries == first.entries
    assert "nothing is left to do" in capfd.readouterr().err
    whole = build()
    wanted = fit(whole, epochs=5)
    longer = build()
    assert fit(longer, epochs=5, checkpoint=tmp_path / "saved").steps == wanted.steps
    assert same(weights(longer), weights(whole))


def test_steps_go_on_in_the_middle_of_an_epoch(tmp_path):
    wanted = fit(build(), steps=12)
    fit(build(), steps=7, checkpoint=tmp_path / "saved")
    history = fit(build(), steps=12, checkpoint=tmp_path / "saved")
    assert history.steps == wanted.steps
    assert history["step"] == [5, 7, 10, 12]


def test_other_data_or_another_checkpoint_are_refused(tmp_path):
    fit(build(), checkpoint=tmp_path / "saved", epochs=1)
    for data, options in (((X + 1, Y), {}), ((X, Y), {"batch_size": 5})):
        with pytest.raises(UsageError, match=r"was trained with .*: give the same, or name another folder"):
            fit(build(), data, checkpoint=tmp_path / "saved", **{"batch_size": 6, **options})
    trainer = build()
    trainer.save(tmp_path / "other")
    with pytest.raises(UsageError, match="a checkpoint that fit did not write: load it"):
        fit(trainer, checkpoint=tmp_path / "other")
    (tmp_path / "empty").mkdir()
    assert len(fit(trainer, checkpoint=tmp_path / "empty", epochs=1).steps) == 5


# -- stopping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", slow_where(lambda method: method != "pb", METHODS))
def test_a_callback_stops_it(method, tmp_path):
    def stop(trainer, entry):
        return entry["epoch"] == 2 or "no"  # anything but True goes on

    history = fit(build(method), epochs=9, callbacks=[stop])
    assert history.stopped == "by a callback after step 10"
    assert history["epoch"][:2] == [1, 2]
    for _ in range(2):  # and does not go on when it is called again
        history = fit(build(method), epochs=9, callbacks=[stop], checkpoint=tmp_path / "saved")
        assert len(history.steps) == 10
        assert history.stopped == "by a callback after step 10"


def test_early_stop(tmp_path):
    trainer = build(optimizer=lambda params: torch.optim.SGD(params, lr=0.0))  # nothing gets better
    history = fit(trainer, epochs=20, validation=(X, Y), early_stop=3)
    assert len(history.validation_loss) == 4
    assert re.match(r"validation_loss has not bettered \S+ for 3 entries", history.stopped)


def test_early_stop_goes_on_only_with_more_patience(tmp_path):
    def run(patience):
        trainer = build(optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
        return fit(trainer, epochs=20, validation=(X, Y), early_stop=patience, checkpoint=tmp_path / "saved")

    assert [len(run(patience).validation_loss) for patience in (2, 2, 4, 1)] == [3, 3, 5, 5]


@pytest.mark.parametrize("method", METHODS)
def test_early_stop_counts_the_losses_of_its_own_epochs(method):
    rule = EarlyStop(1, metric="train_loss", least_change=100.0)  # the second epoch cannot be so much better
    history = fit(build(method), epochs=9, early_stop=rule)
    assert len(history.train_loss) in ((2,) if method != "pb" else (2, 3))
    assert history.stopped.startswith("train_loss has not bettered")


def test_the_rule_by_itself():
    from stretto.trainer.history import Patience

    for higher, values in ((False, [3.0, 2.0, 2.0, 1.95, float("nan")]), (True, [1.0, 2.0, 2.0, 2.05, float("nan")])):
        waiting = Patience(EarlyStop(3, least_change=0.1, higher=higher))
        assert [waiting.should_stop(value) for value in values] == [False, False, False, False, True]
        assert waiting.best == 2.0


# -- what is said -------------------------------------------------------------------------------------------------


def test_a_history_can_be_read():
    history = fit(build(), validation=(X, Y), epochs=2)
    assert list(history) == ["epoch", "step", "train_loss", "validation_loss", "validation_accuracy"]
    assert history["train_loss"] == history.train_loss
    lines = repr(history).splitlines()
    assert lines[0] == "History of 2 entries, 10 steps"
    assert lines[1].split() == list(history)
    assert lines[2].split()[:2] == ["1", "5"]
    assert len(lines) == 4
    with pytest.raises(KeyError, match="did you mean 'train_loss'"):
        history["trainloss"]
    with pytest.raises(AttributeError, match="a History without 'accuracy'"):
        _ = history.accuracy
    assert repr(History()) == "History of 0 entries, 0 steps"


def test_progress_says_a_line_per_tenth(capfd):
    fit(build(), quiet=False, epochs=4)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 10
    pattern = r"fit: \d+ %, epoch \d, loss [\d.]+, [\d,]+ examples/s, bubble 67%, \d+ s left"
    assert all(re.fullmatch(pattern, line) for line in lines), lines
    fit(build(), (pair for pair in in_batches(2) * 8), quiet=False, epochs=1)
    assert re.fullmatch(r"fit: step 100, epoch 1, .*bubble 67%", capfd.readouterr().err.strip())


# -- mistakes -----------------------------------------------------------------------------------------------------

MISTAKES = [
    ({"epochs": 0}, "fit: epochs=0: give a whole number, at least 1"),
    ({"epochs": 2, "steps": 3}, "epochs=2 and steps=3: give one of the two"),
    ({"epochs": None}, "epochs=None and steps=None"),
    ({"batch_size": 0}, "fit: batch_size=0"),
    ({"evaluate_every": 3}, "fit: evaluate_every=3 goes with steps="),
    ({"callbacks": print}, "fit: callbacks=<built-in function print>: give a list"),
    ({"callbacks": [3]}, r"fit: callbacks\[0\]=3"),
    ({"log": 3}, "fit: log=3"),
    ({"checkpoint": ""}, "fit: checkpoint=''"),
    ({"checkpoint_every": 3}, "fit: checkpoint_every=3 without a folder: give checkpoint='runs/one', too"),
    ({"checkpoint": "saved", "checkpoint_every": 0}, "fit: checkpoint_every=0: give a whole number, at least 1"),
    ({"quiet": 1}, "fit: quiet=1"),
    ({"early_stop": 0}, "fit: early_stop=0"),
    ({"early_stop": 2}, "metric 'validation_loss' is not measured: choose train_loss, or give validation="),
    ({"early_stop": EarlyStop(2, metric="loss"), "validation": (X, Y)}, "metric 'loss' is not measured"),
    ({"metrics": {"f": print}}, "metrics f are measured on validation data"),
    ({"metrics": {"loss": print}, "validation": (X, Y)}, "choose another name"),
    ({"validation": 3}, "validation is 3, which has no length: give a pair"),
    ({"validation": (X[:0], Y[:0])}, "validation is empty"),
    ({"validation": iter([(X, Y)])}, "validation is <list_iterator .*, an iterator, which can be gone through once"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_wrong_arguments_are_refused_before_anything_is_trained(options, message):
    trainer = build()
    with pytest.raises(UsageError, match=message):
        fit(trainer, **options)
    assert trainer.entered == 0


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ((X[:0], Y[:0]), {}, "fit: train is empty: give at least one example"),
        ([], {}, r"fit: train=\[\] has no batches"),
        ((X, Y[:5]), {}, "of unequal lengths"),
        (7, {}, "fit: train is 7, which has no length"),
        ("data", {}, "fit: train is 'data'"),
        ([X, X, X], {}, "batch 0 is Tensor .* give pairs"),
        (DataLoader(X.unsqueeze(1).tolist(), batch_sampler=[[0, 1]]), {}, "give pairs"),
        (DataLoader(Endless(), 6), {"batch_size": 6}, "makes batches itself: leave batch_size out"),
        ([(torch.tensor(1.0), Y[0])], {}, "batch 0: x is Tensor .* whose first dimension counts the examples"),
        (iter(in_batches()), {"epochs": 2}, "an iterator, which can be gone through once"),
        (iter(in_batches()), {"steps": 9}, "an iterator, which can be gone through once"),
        (iter([]), {"epochs": 1}, "train gave no batches in epoch 1: is it empty, or used up"),
        ((X[:3], Y[:3]), {"method": "1f1b(microbatches=4)"}, "3 examples, which make no batch that can be trained"),
        ([(X[:3], Y[:3])], {"method": "1f1b(microbatches=4)"}, "only batches of fewer than 4 examples"),
        ((X, Y), {"batch_size": 2, "method": "1f1b(microbatches=4)"}, "batch_size=2"),
    ],
)
def test_wrong_data_are_refused(data, options, message):
    trainer = build(options.pop("method", "backprop"))
    with pytest.raises(UsageError, match=message):
        fit(trainer, data, **options)


def test_an_early_stop_without_its_metric_is_refused():
    numbers = torch.randn(27, 4)
    trainer = build(loss=nn.functional.mse_loss)
    rule = EarlyStop(2, metric="validation_accuracy")
    with pytest.raises(UsageError, match="there is no validation_accuracy: targets are no classes"):
        fit(trainer, (X, numbers), validation=(X, numbers), early_stop=rule)


@pytest.mark.parametrize(
    "options", [{"patience": 0}, {"patience": 2, "least_change": -1}, {"patience": 2, "metric": 3}]
)
def test_a_wrong_rule_is_refused(options):
    with pytest.raises(UsageError, match="EarlyStop: "):
        EarlyStop(**options)


# -- several processes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processes", "methods"),
    [(2, METHODS[2:]), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, METHODS[:2]), (3, METHODS)))],
    ids=["two", "two, other methods", "three"],
)
def test_processes_come_to_the_numbers_of_emulation_and_read_what_they_need(processes, methods, tmp_path):
    told = launch(processes, "runtime.fitted:fit_all", methods, str(tmp_path / "processes"))
    for number, method in enumerate(methods):
        wanted = fitted.fit_one(method, str(tmp_path / f"here-{method}"), workers=processes)
        for rank, each in enumerate(told):
            assert each[number]["entries"] == wanted["entries"], (method, rank)
            assert each[number]["steps"] == wanted["steps"]
            assert (each[number]["logged"] > 0) == (rank == 0)
            reads = rank in (0, processes - 1)
            assert (each[number]["read"] > 0) == reads, (method, rank)
        assert same(told[0][number]["weights"], wanted["weights"])


def test_replicas_on_processes():
    told = launch(2, "runtime.fitted:fit_replicas")
    wanted = fitted.fit_replicas()
    assert all(each[:2] == wanted[:2] for each in told)
    assert same(told[0][2], wanted[2])


def test_processes_that_disagree_are_told_with_both_ranks():
    told = launch(2, "runtime.fitted:disagree")
    for kind in fitted.DISAGREEMENTS:
        (first, one), (second, other) = (each[kind] for each in told)
        assert {first, second} == {"UsageError"}, (kind, one, other)
        assert one == other, kind
        assert "rank 1 " in one, one
        assert "rank 0" in one, one
        assert "the same data, in the same order" in one, one


def test_loaders_draw_alike_on_processes_or_are_refused(tmp_path):
    told = launch(2, "runtime.fitted:with_loaders", str(tmp_path / "processes"))
    wanted, resumed, trained, _ = fitted.with_loaders(str(tmp_path / "here"))
    assert resumed == wanted
    for entries, again, _, refusal in told:
        assert entries == again == wanted
        assert refusal.startswith("rank 1 goes through other data than rank 0: fit: train, first batch of epoch 1 is")
        assert refusal.endswith("give loaders that shuffle a generator, or seed all processes alike")
    assert same(told[0][2], trained)


def test_ctrl_c_on_one_process_saves_on_all(tmp_path):
    told = launch(2, "runtime.fitted:interrupted", str(tmp_path / "saved"))
    whole = build("1f1b(microbatches=2)")
    history = fit(whole)
    for message, steps, logged, trained in told:
        assert re.search(r"which is saved in .*saved: call it again", message)
        assert steps == history.steps
        assert logged < 15  # the others were made before
        assert trained is None or same(trained, weights(whole))


def test_one_process_stops_all():
    told = launch(2, "runtime.fitted:stopped_by_one")
    assert told[0] == told[1]
    assert told[0] == ("by a callback after step 10", 10)
