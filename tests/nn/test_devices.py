"""Devices, on an accelerator that is made up (`stand_in.py`): numbers are the CPU's."""

import re
from pathlib import Path

import pytest
import torch

import stretto
from runtime import replicated, scripts
from runtime.processes import launch
from runtime.scripts import same
from stretto.errors import UsageError
from stretto.measure import gpu_autocast as autocast
from stretto.nn import devices

SOURCE = Path(stretto.__file__).parent
SHORT = {"steps": 6, "flush_at": 3}
RUNS = [(method, SHORT) for method in ("backprop", "pb-lwp-sc", "overlapping", "pipedream", "zb-v")]
TWO = stretto.Mesh(data=2)
REPLICAS = [("greedy", TWO, {}), ("backprop", TWO, {"sync": stretto.LocalSGD(every=2)})]


def test_one_file_names_kinds_of_devices():
    """All others ask it, but for the one that has torch's lists of what autocast does there."""
    named = [
        f"{path.relative_to(SOURCE)}:{line}: {text.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in enumerate(path.read_text().splitlines(), start=1)
        if re.search("cuda", text, flags=re.IGNORECASE)
        and path not in (Path(devices.__file__), Path(autocast.__file__))
    ]
    assert named == []


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process did: results and counts by name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    scripts.save_in_the_middle("pb-lwp-sc", folder / "cpu")
    calls = [
        ("placement",), ("train_all", RUNS), ("mixtures",), ("global_generators",), ("streams_apart",),
        ("single_generator",), ("recorded",), ("split_by_time",), ("early_reuse",), ("on_a_stream",), ("bf16",),
        ("saved", folder / "device"), ("resumed", folder / "cpu"), ("peak_memory",),
    ]  # fmt: skip
    (results,) = launch(1, "runtime.on_stand_in:each", calls, own=True)
    return folder, {name: result for (name, *_), result in zip(calls, results, strict=True)}


@pytest.fixture
def results(alone):
    return {name: result for name, (result, _) in alone[1].items()}


@pytest.fixture
def counts(alone):
    return {name: count for name, (_, count) in alone[1].items()}


def test_auto_is_the_accelerator(results):
    assert results["placement"] == ("standin", {"standin"}, "1 x Stand-in")


def test_training_comes_to_the_numbers_of_the_cpu(results, counts):
    for (method, options), (losses, weights, evaluated) in zip(RUNS, results["train_all"], strict=True):
        on_cpu = scripts.train(method, device="cpu", **options)
        assert (losses, evaluated) == (on_cpu[0], on_cpu[2]), method
        assert same(weights, on_cpu[1]), method
    assert counts["train_all"]["draws"] >= 6 * 3 * len(RUNS), "dropout drew on the device"


def test_low_precision_too(results):
    losses, weights, _ = results["bf16"]
    on_cpu = scripts.train("pb", precision="bf16", device="cpu")
    assert losses[8] == pytest.approx(on_cpu[0][8], rel=1e-3)  # dropout is another operation of torch on accelerators
    assert all(torch.allclose(value, on_cpu[1][name], atol=0.02) for name, value in weights.items())


def test_a_device_refuses_what_is_not_on_it(results):
    assert all(results["mixtures"])


def test_global_generators_are_left_alone(results):
    assert results["global_generators"] == [True, True, True]


def test_a_stream_of_random_numbers_for_parts(results):
    common, own, further = results["streams_apart"]
    assert not torch.equal(common, own)
    assert further


def test_a_kind_of_which_a_machine_has_one(results):
    kind, first, again = results["single_generator"]
    assert kind == "SingleGenerator"
    assert torch.equal(first, again)


def test_a_recording_waits_for_each_action(results, counts):
    assert results["recorded"] > 0
    assert counts["recorded"]["synchronized"] == results["recorded"]


def test_a_split_by_time_waits_for_each_layer(results, counts):
    assert all(results["split_by_time"])
    assert counts["split_by_time"]["synchronized"] > 0


def test_pinned_memory_is_free_again_once_waited_for(results):
    assert results["early_reuse"] == [[2] * 4, [1] * 4, [1] * 4]


def test_streams(results):
    assert results["on_a_stream"] == (True, None)


def test_a_checkpoint_of_a_device_goes_on_on_the_cpu(alone, results):
    assert same(scripts.resume("pb-lwp-sc", alone[0] / "device", device="cpu"), results["saved"])


def test_memory_that_an_allocator_does_not_count_is_unknown(results):
    assert results["peak_memory"] is None


def test_a_checkpoint_of_the_cpu_goes_on_on_a_device(alone, results):
    assert same(scripts.resume("pb-lwp-sc", alone[0] / "cpu", device="cpu"), results["resumed"])


@pytest.mark.parametrize(
    ("link", "runs"),
    [
        pytest.param(False, RUNS[1:4], marks=pytest.mark.slow, id="through the host"),
        pytest.param(True, RUNS[1:4], marks=pytest.mark.slow, id="from device to device"),
        pytest.param(True, RUNS[3:4], id="from device to device, one method"),
    ],
)
def test_two_processes_of_one_device_each(link, runs):
    calls = [("train_all", runs), ("script", "tied", "pb"), ("script", "shapes_that_change", "pb")]
    told = launch(2, "runtime.on_stand_in:each", calls, link, own=True)
    for number, (method, options) in enumerate(runs):
        losses, weights, evaluated = scripts.train(method, workers=2, device="cpu", **options)
        for (results, _), *_ in told:
            assert (results[number][0], results[number][2]) == (losses, evaluated), method
        assert same(told[0][0][0][number][1], weights), method
    for number, name in enumerate(("tied", "shapes_that_change"), start=1):
        *wanted, weights = getattr(scripts, name)("pb", workers=2, device="cpu")
        assert list(told[0][number][0][:-1]) == wanted, name
        assert same(told[0][number][0][-1], weights), name
    for (_, counts), *_ in told:
        assert counts["pinned copies"] > 0
        assert (counts.get("streams synchronized", 0) > 0) == link


@pytest.mark.slow
def test_replicas():
    told = launch(2, "runtime.on_stand_in:each", [("train_replicas", REPLICAS)], own=True)
    for number, (method, mesh, options) in enumerate(REPLICAS):
        on_cpu = replicated.train(method, mesh, device="cpu", **options)
        assert told[0][0][0][number][0] == on_cpu[0], method
        assert same(told[0][0][0][number][1], on_cpu[1]), method


def test_one_device_each_in_turn(monkeypatch):
    monkeypatch.setattr(devices, "accelerator", lambda: "meta")
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    assert [str(devices.pick_device_of("auto", rank)) for rank in range(3)] == ["meta:0", "meta:1", "meta:0"]
    assert str(devices.pick_device_of("meta", 1)) == "meta:1"
    assert str(devices.pick_device_of("meta:0", 1)) == "meta:0"
    assert str(devices.pick_device_of("cpu", 1)) == "cpu"


def test_a_number_that_no_accelerator_has(monkeypatch):
    monkeypatch.setattr(devices, "accelerator", lambda: "meta")
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    with pytest.raises(UsageError, match="'meta:2' is not there: this machine has 'meta:0', 'meta:1', and 'cpu'"):
        devices.pick_device("meta:2")


def test_without_float64_auto_is_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: torch.device("mps"))
    assert str(devices.pick_device("auto")) == "cpu"
    assert devices.accelerator_names() == []


def test_on_the_cpu_nothing_is_pinned_or_waited_for():
    assert not devices.host_memory(4, devices.CPU).is_pinned()
    assert devices.synchronizer(devices.CPU) is None
    assert devices.generators(devices.CPU) == (torch.default_generator,)
    assert devices.direct_backend(devices.CPU) is None
    assert devices.serial_number(devices.CPU) is None


def test_a_device_that_is_not_there():
    with pytest.raises(UsageError, match="device 'xpu' cannot be used here"):
        devices.pick_device("xpu")
