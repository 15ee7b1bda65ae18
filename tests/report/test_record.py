import json
import math

import pytest

from stretto.errors import UsageError
from stretto.report import Page, Point, Record
from stretto.report.record import family, methods

from .synthetic import make_run, observation, point, run


def test_json_and_back():
    record = make_run("greedy", 0.1, 32, 0)
    text = json.dumps(record.to_json(), allow_nan=False)
    assert Record.from_json(json.loads(text)) == record


def test_json_of_a_diverged_run_holds_null():
    record = next(r for seed in range(9) if (r := make_run("greedy", 1.0, 32, seed)).diverged)
    data = json.loads(json.dumps(record.to_json(), allow_nan=False))
    assert data["train_loss"] is None
    assert Record.from_json(data) == record


def test_unknown_keys_are_ignored_and_missing_ones_named():
    data = run([1.0]).to_json()
    assert Record.from_json({**data, "later": 1}) == run([1.0])
    del data["seed"]
    with pytest.raises(UsageError, match="lacks seed"):
        Record.from_json(data)
    with pytest.raises(UsageError, match="lacks serial_flops"):
        Point.from_json({k: v for k, v in point().to_json().items() if k != "serial_flops"})


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "3", True])
def test_a_point_is_finite(value):
    with pytest.raises(UsageError, match="train_loss of the evaluation at step 7"):
        point(step=7, train_loss=value)


def test_a_record_is_consistent():
    with pytest.raises(UsageError, match="status is 'done'"):
        run([1.0], status="done")
    with pytest.raises(UsageError, match="test_loss of run 'a'"):
        run([1.0], id="a", test_loss=math.nan)
    with pytest.raises(UsageError, match="in order of step"):
        Record(id="a", method="pb", seed=0, options={}, status="finished", points=(point(step=2), point(step=1)))


def test_configuration_ignores_seed_and_order_of_options():
    a, b = run(seed=0, options={"lr": 0.1, "batch_size": 4}), run(seed=1, options={"batch_size": 4, "lr": 0.1})
    assert a.configuration == b.configuration
    assert a.configuration != run(options={"lr": 0.2, "batch_size": 4}).configuration
    assert a.option_text == "lr=0.1, batch_size=4"


def test_methods_and_families():
    assert methods((run(method="greedy"), run(), run(method="greedy"))) == ("greedy", "backprop")
    assert family("chunked(chunks=2)") == "chunked"


def test_page_checks_itself():
    with pytest.raises(UsageError, match="accounting is 'free'"):
        Page(title="t", records=(), planned=0, accounting="free")
    with pytest.raises(UsageError, match="planned=0"):
        Page(title="t", records=(run([1.0]),), planned=0)


def test_observations_go_with_their_run():
    record = run([1.0], observations=(observation(3), observation(9, prediction_error=(0.5, None, None))))
    text = json.dumps(record.to_json(), allow_nan=False)
    assert Record.from_json(json.loads(text)) == record
    with pytest.raises(UsageError, match="mismatch of the observation at step 3 is nan"):
        observation(3, (math.nan,))
