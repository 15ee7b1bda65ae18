"""Wrong calls of what a script calls beside `step`: each is a UsageError with the argument, its value and a remedy."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from stretto import checkpoint, cost, heads, losses, methods, optim, schedule, trackers

X, Y = torch.ones(8, 4), torch.arange(8) % 3


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def trainer(method="greedy", loss=cross_entropy, **options):
    return stretto.Trainer([nn.Linear(4, 4), nn.Linear(4, 3)], loss, sgd, method, example=X, device="cpu", **options)


def fitted(**options):
    return trainer().fit((X, Y), **{"epochs": 1, "quiet": True, **options})


def ran(call=stretto.train, **options):
    data = ((X, Y), (X, Y))
    return call(lambda: nn.Sequential(nn.Linear(4, 3)), data, **{"steps": 1, "quiet": True, **options})


def ran_lazy():
    return stretto.train(nn.LazyLinear(3), ((X, Y), (X, Y)), steps=1, quiet=True)


def registered():
    methods.register("of-this-test")(lambda: 5)
    try:
        return stretto.method("of-this-test")
    finally:
        del methods.table.METHODS["of-this-test"]


WRONG = {
    r"fit: callbacks\[0\]=<function .*: give a function of .trainer, entry.": lambda: fitted(callbacks=[lambda: None]),
    r"fit: callbacks\[0\]=Sequential.*: give a function of .trainer, entry.": lambda: fitted(
        callbacks=[nn.Sequential(nn.Linear(3, 3))]
    ),
    "log=.*: give a function of a dict": lambda: fitted(log=lambda: None),
    r"batch_size=9223372036854775808: give": lambda: fitted(batch_size=2**63),
    r"threads='two': give a whole number": lambda: ran(threads="two"),
    r"schedule=5: give text": lambda: ran(schedule=5),
    r"clip=Tensor \[\] of torch.float32: give a number or None": lambda: ran(clip=torch.tensor(1.0)),
    r"seed='0': give a whole number": lambda: ran(seed="0"),
    r"quiet='yes': give True or False": lambda: ran(quiet="yes"),
    r"out=5: give a path": lambda: ran(out=5),
    r"tensor=1000000000000000000000000000000: choose": lambda: ran(stretto.compare, tensor=10**30, methods=["gpipe"]),
    r"space=1000000000000000000000000000000: choose": lambda: ran(space=(10**30, 1)),
    r"a model with lazy parameters, .*: call it once on a batch": ran_lazy,
    r"warmup=None: a number of minibatches": lambda: stretto.method("pb", warmup=None, finish=2),
    r"CrossEntropy: ignore_index=10+: give a whole": lambda: losses.CrossEntropy(ignore_index=10**30),
    r"loss: weight is lazy .*: call the loss once": lambda: trainer("1f1b", nn.LazyLinear(3)),
    r"heads\[0\]: weight is lazy .*: call the head once": lambda: trainer(heads=[nn.LazyLinear(3), None]),
    "RotatedAdam: delay=1e\\+30: give a number from 0 up to": lambda: optim.RotatedAdam(
        torch.optim.Adam([X.clone().requires_grad_()], lr=0.1), 5, delay=1e30
    ),
    "SpikeCompensation: delay=1e\\+30: give a number": lambda: optim.SpikeCompensation(
        torch.optim.Adam([X.clone().requires_grad_()], lr=0.1), delay=1e30
    ),
    r"muon: exclude=5: give a list": lambda: optim.muon([X.clone().requires_grad_()], lr=0.1, exclude=5),
    r"clip=inf: choose a positive number below": lambda: ran(clip=float("inf")),
    r"clip=9223372036854775808: choose a positive number": lambda: ran(stretto.compare, clip=2**63, methods=["gpipe"]),
    r"lr=9.*: choose a positive number": lambda: ran(stretto.compare, lr=2**63, methods=["gpipe"]),
    r"optimizer .* takes no arguments": lambda: ran(optimizer=type("Empty", (), {})),
    r"NamedOptimizer: function=.* failed with TypeError": lambda: optim.NamedOptimizer(nn.Linear(4, 4)).named(["a"])(
        [X]
    ),
    r"labels_of: the model has lazy parameters": lambda: optim.labels_of(nn.LazyLinear(3)),
    r"CrossEntropy: label_smoothing=2: give a number": lambda: losses.CrossEntropy(label_smoothing=2),
    r"states=Tensor \[\] .*: give a list": lambda: checkpoint.write("new", torch.ones(()), None),
    r"methods=None: give a list of methods": lambda: ran(stretto.compare, methods=None),
    r"jobs='2': choose a whole number": lambda: ran(stretto.compare, jobs="2"),
    r"write_weights: names='a': give a function": lambda: trainer().write_weights("weights", names="a"),
    r"write_weights: names\('.*'\) is 'a': give .* another one for each": lambda: trainer().write_weights(
        "weights", names=lambda name: "a"
    ),
    r"load_state_dict: state=5: give what state_dict returned": lambda: trainer().load_state_dict(5),
    r"method name <function": lambda: methods.register(lambda: None),
    r"methods.register\('mine'\)=5: give a function": lambda: methods.register("mine")(5),
    r"method 'of-this-test' returned 5": registered,
    r"heads.register: name=<function": lambda: heads.register(lambda site: None),
    r"heads.register\('mine'\)=5: give a function": lambda: heads.register("mine")(5),
    r"heads.register\('mine'\)=<class 'int'>: give a function": lambda: heads.register("mine")(int),
    r"heads.register: dims=5: give a function": lambda: heads.register("mine", dims=5),
    r"CombinedOptimizer: optimizers=\[SGD": lambda: optim.CombinedOptimizer([sgd([nn.Parameter(X)])]),
    r"NamedOptimizer: function=5": lambda: optim.NamedOptimizer(5),
    r"csv: folder=5: give text or a path": lambda: trackers.CSV(folder=5),
    r"RunDescription: name=5: give text": lambda: trackers.RunDescription(5),
    r"path=5: give the path of a checkpoint": lambda: checkpoint.read_manifest(5),
    r"/ is the root of all folders": lambda: checkpoint.discard("/"),
    r"schedule=5: give a stretto.schedule.Schedule": lambda: schedule.to_csv(5),
    r"Device: memory='1 GB': give a number": lambda: cost.Device(memory="1 GB", memory_bandwidth=1.0, peak={"a": 1.0}),
    r"Method: weights='old': give 'current' or 'stash'": lambda: methods.Method(
        name="mine", summary="", schedule=len, synchronous=True, weights="old"
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_it_is_refused_by_name(message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(stretto.UsageError, match=message):
        WRONG[message]()
    assert not any(tmp_path.glob("runs/*"))


def test_lightnings_strategy_refuses_at_once():
    lightning = pytest.importorskip("stretto.lightning")
    for options, message in (
        ({"mesh": 5}, "StrettoStrategy: mesh=5"),
        ({"network": 5}, "StrettoStrategy: network=5: give the name of a submodule"),
        ({"split": {"bye": 1}}, "StrettoStrategy: split='bye': did you mean 'by'"),
        ({"timeout": "a"}, "StrettoStrategy: timeout='a': give a positive number"),
        ({"cluster_environment": 5}, "StrettoStrategy: cluster_environment=5: give one of Lightning's"),
    ):
        with pytest.raises(stretto.UsageError, match=message):
            lightning.StrettoStrategy("1f1b", 2, **options)


def test_what_a_callback_raises_is_its_own():
    """A tuner's, say, that ends a trial so."""

    def pruned(trainer, entry):
        raise LookupError("pruned")

    with pytest.raises(LookupError, match="pruned"):
        fitted(callbacks=[pruned])


def test_weights_are_written_into_no_file(tmp_path):
    trainer = stretto.Trainer([nn.Linear(2, 2)], nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1))
    (tmp_path / "file").touch()
    with pytest.raises(stretto.UsageError, match=r"cannot write to .*file/weights: .*: choose another folder"):
        trainer.write_weights(tmp_path / "file" / "weights")
