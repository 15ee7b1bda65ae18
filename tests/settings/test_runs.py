import json
from dataclasses import replace

import pytest

from stretto import UsageError
from stretto.optimizers import OPTIMIZERS
from stretto.settings.command_line import option
from stretto.settings.runs import DEFAULTS, CompareSettings, TrainSettings, check, with_defaults


@pytest.mark.parametrize("model", DEFAULTS)
def test_defaults_fill_everything_and_survive_json(model):
    for kind in (TrainSettings, CompareSettings):
        resolved = with_defaults(kind(model=model, stages=2, workers=2))
        check(resolved)
        assert [key for key, value in resolved.to_json().items() if value is None] == [
            "examples",
            "reference_batch",
            "clip",
            "measure",
            *(["bounds", "checkpoint_every"] if kind is TrainSettings else []),
        ]
        assert resolved.optimizer in OPTIMIZERS
        assert kind.from_json(json.loads(json.dumps(resolved.to_json())), "here") == resolved
        assert with_defaults(resolved) == resolved


def test_what_is_given_stays():
    resolved = with_defaults(CompareSettings(optimizer="adam", lr=(0.5,), steps=3))
    assert (resolved.optimizer, resolved.lr, resolved.steps) == ("adam", (0.5,), 3)
    assert with_defaults(TrainSettings(optimizer="adam")).lr == 0.003


def test_a_reference_batch_is_for_sgd():
    assert with_defaults(TrainSettings(reference_batch=8)).reference_batch == 8
    for kind in (
        TrainSettings(optimizer="adam", reference_batch=8),
        CompareSettings(model="transformer", reference_batch=8),
    ):
        with pytest.raises(UsageError, match=r"reference_batch=8.*no such rule for adam"):
            with_defaults(kind)


def test_other_scaling_is_for_any_optimizer():
    for optimizer in ("adam", "lamb", "lars"):
        resolved = with_defaults(TrainSettings(optimizer=optimizer, reference_batch=8, lr_scaling="sqrt"))
        check(resolved)
        assert resolved.lr_scaling == "sqrt"


def test_examples_instead_of_steps():
    """Every batch size goes through as many, and a resolved run says so in steps."""
    resolved = with_defaults(CompareSettings(examples=1000, batch_size=(8, 64, 999)))
    check(resolved)
    assert (resolved.steps, resolved.examples) == (None, 1000)
    assert with_defaults(resolved) == resolved
    assert {run.batch_size: (run.steps, run.examples) for run in resolved.runs()} == {
        8: (125, None),
        64: (16, None),
        999: (2, None),
    }
    alone = with_defaults(TrainSettings(examples=1000, batch_size=64))
    assert (alone.steps, alone.examples) == (16, None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"examples": 0}, "examples=0: choose a whole number of at least 1"),
        ({"examples": 9, "steps": 9}, "steps=9, examples=9: give one of both"),
        ({"lr_scaling": "linaer"}, "unknown lr_scaling 'linaer': did you mean 'linear'"),
        ({"lr_scaling": "linear"}, "lr_scaling=linear: give the batch size that rates are scaled from"),
        ({"lr_warmup": 2.0}, "lr_warmup=2.0: choose a share of the run, from 0 to 1"),
        ({"measure": ("sharpnes",)}, "cannot measure 'sharpnes': did you mean 'sharpness'"),
        ({"steps": 0}, "steps=0: choose a whole number of at least 1"),
        ({"evaluations": -1}, "evaluations=-1"),
        ({"stages": 0}, "stages=0"),
        ({"workers": 0}, "workers=0"),
        ({"seeds": 0}, "seeds=0"),
        ({"reference_batch": 0}, "reference_batch=0"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin': did you mean 'cosine'"),
        ({"precision": "bf61"}, "unknown precision 'bf61': did you mean 'bf16'"),
        ({"accounting": "papr"}, "unknown accounting 'papr': did you mean 'paper'"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"momentum": float("nan")}, "momentum=nan"),
        ({"weight_decay": -1e-9}, "weight_decay=-1e-09"),
        ({"weight_decay": float("nan")}, "weight_decay=nan"),
        ({"lr": (0.0,)}, "lr=0.0: choose a positive number"),
        ({"lr": (-0.1,)}, "lr=-0.1"),
        ({"lr": (float("inf"),)}, "lr=inf"),
        ({"lr": ()}, "lr is empty"),
        ({"methods": ()}, "methods is empty"),
        ({"batch_size": (0,)}, "batch_size=0"),
        ({"batch_size": (8, 16, 8)}, "batch_size lists 8 twice"),
        ({"seeds": 10**8, "lr": (0.1, 0.2)}, "seeds=100000000 of 8 configurations are 800,000,000 runs: choose fewer"),
    ],
)
def test_values_that_no_run_could_have(wrong, message):
    with pytest.raises(UsageError) as error:
        check(replace(CompareSettings(), **wrong))
    assert message in str(error.value)


def test_a_runs_folder_has_a_name_of_its_own():
    settings = with_defaults(
        CompareSettings(
            methods=("greedy", "overlapping", "overlapping(delay=1)", "chunked(chunks=2)", "chunked(chunks=21)"),
            lr=(0.1, 0.1000000001, 1.0, 1e-7),
            batch_size=(8, 16),
        )
    )
    runs = settings.runs()
    assert len(runs) == 5 * 4 * 2 * 2
    assert len({run.id for run in runs}) == len(runs)
    assert runs[0].id == "greedy-lr0.1-b8-s0"
    assert all(c.isalnum() or c in "-." for run in runs for c in run.id)


def test_an_early_stop_leaves_whole_sweeps():
    runs = with_defaults(CompareSettings(seeds=3)).runs()
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)


def test_reading_refuses_unknown_and_missing_keys():
    content = with_defaults(CompareSettings()).to_json()
    with pytest.raises(UsageError, match=r"x\.json: unknown key 'stpes': did you mean 'steps'"):
        CompareSettings.from_json({**content, "stpes": 1}, "x.json")
    del content["lr"], content["seeds"]
    with pytest.raises(UsageError, match=r"x\.json lacks lr, seeds"):
        CompareSettings.from_json(content, "x.json")


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("-2", -2), ("0.5", 0.5), ("1e-3", 0.001), ("true", True), ("False", False), ("a", "a")],
)
def test_options_of_networks_and_data(text, value):
    assert option(text) == value
    assert type(option(text)) is type(value)


def test_nesterov_brings_its_optimizer_and_the_papers_beta():
    from stretto.settings.runs import CompareSettings, TrainSettings
    from stretto.study.prepare import resolve
    from stretto.study.study import choose

    alone = resolve(TrainSettings(method="nesterov"))
    assert (alone.optimizer, alone.momentum, alone.lr) == ("nadam", 0.99, 0.003)
    told = resolve(TrainSettings(method="nesterov", momentum=0.0, optimizer="nadam"))
    assert told.momentum == 0.0
    assert resolve(TrainSettings(method="pb")).momentum == 0.9
    assert choose(CompareSettings(methods=("nesterov",))).settings.optimizer == "nadam"
    with pytest.raises(UsageError, match=r"built on torch\.optim\.NAdam"):
        choose(CompareSettings(methods=("pb", "nesterov")))


def test_where_a_run_computes_is_shown_and_no_part_of_it():
    there = with_defaults(TrainSettings(device="cuda:1", threads=4))
    assert there.digest == with_defaults(TrainSettings()).digest
    assert not {"device", "threads"} & there.to_json().keys()
    assert there.to_show() == {**there.to_json(), "device": "cuda:1", "threads": 4}
    assert with_defaults(TrainSettings()).to_show() == there.to_json()
    swept = with_defaults(CompareSettings(device="cuda:1", threads=4)).runs()
    assert {(run.device, run.threads) for run in swept} == {("cuda:1", 4)}
