"""Energy that the machine counts: from a folder as Linux' powercap has it, and from an NVML that is played."""

import sys
from types import SimpleNamespace

import pytest
import torch

from stretto.measure import energy
from stretto.measure.energy import EnergyMeter, NvmlDevice, RaplDomain, energy_meter, nvml_devices, rapl_domains

CPU = torch.device("cpu")


def add_domain(root, folder, name, microjoules, largest=1_000_000):
    (root / folder).mkdir(parents=True)
    (root / folder / "name").write_text(f"{name}\n")
    (root / folder / "max_energy_range_uj").write_text(f"{largest}\n")
    count(root / folder, microjoules)


def count(folder, microjoules):
    (folder / "energy_uj").write_text(f"{microjoules}\n")


@pytest.fixture
def powercap(tmp_path):
    """Two packages, the cores and the memory of the first, and the whole board."""
    add_domain(tmp_path, "intel-rapl:0", "package-0", 500_000)
    add_domain(tmp_path, "intel-rapl:0:0", "core", 100_000)
    add_domain(tmp_path, "intel-rapl:0:1", "dram", 10_000)
    add_domain(tmp_path, "intel-rapl:1", "package-1", 300_000)
    add_domain(tmp_path, "intel-rapl:2", "psys", 900_000)
    add_domain(tmp_path, "intel-rapl-mmio:0", "package-0", 500_000)
    (tmp_path / "intel-rapl").mkdir()
    return tmp_path


def test_packages_and_their_memory_are_counted_once(powercap):
    assert [domain.name for domain in rapl_domains(powercap)] == ["RAPL package-0", "RAPL dram", "RAPL package-1"]


def test_a_counter_goes_round(tmp_path):
    add_domain(tmp_path, "intel-rapl:0", "package-0", 900_000, largest=1_000_000)
    domain = RaplDomain(tmp_path / "intel-rapl:0")
    assert domain.joules() == 0
    for microjoules, joules in ((950_000, 0.05), (20_000, 0.12), (20_000, 0.12), (10_000, 1.11)):
        count(tmp_path / "intel-rapl:0", microjoules)
        assert domain.joules() == pytest.approx(joules)


def test_a_meter_counts_between_start_and_pause(powercap):
    meter = energy_meter([CPU], root=powercap)
    assert meter.source == "RAPL package-0, RAPL dram, RAPL package-1"
    meter.start()
    count(powercap / "intel-rapl:0", 600_000)
    with meter.paused():
        assert meter.joules == pytest.approx(0.1)
        count(powercap / "intel-rapl:0", 900_000)  # not counted
    count(powercap / "intel-rapl:1", 350_000)
    meter.pause()
    assert meter.joules == pytest.approx(0.15)


def test_a_tick_reads_now_and_then(powercap, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(energy.time, "monotonic", lambda: clock[0])
    meter = energy_meter([CPU], root=powercap)
    meter.start()
    for now, microjoules, joules in ((104.0, 900_000, 0.0), (105.0, 900_000, 0.4), (110.0, 100_000, 0.6)):
        clock[0] = now
        count(powercap / "intel-rapl:0", microjoules)
        meter.tick()
        assert meter.joules == pytest.approx(joules)


def test_nothing_is_measured_where_a_part_cannot_be_read(powercap, tmp_path):
    (powercap / "intel-rapl:1" / "energy_uj").unlink()
    assert rapl_domains(powercap) == []
    assert energy_meter([CPU], root=powercap) is None
    assert energy_meter([CPU], root=tmp_path / "nowhere") is None


def test_a_counter_that_fails_ends_the_measurement(powercap):
    meter = energy_meter([CPU], root=powercap)
    meter.start()
    content = (powercap / "intel-rapl:0" / "energy_uj").read_text()
    (powercap / "intel-rapl:0" / "energy_uj").unlink()
    meter.pause()
    assert meter.joules is None
    (powercap / "intel-rapl:0" / "energy_uj").write_text(content)
    meter.start()
    meter.pause()
    assert meter.joules is None


class PlayedError(Exception):
    pass


def played_nvml(energies):
    """An NVML with these GPUs: {uuid: millijoules}, None of one that counts none."""

    def handle(uuid):
        if uuid not in energies:
            raise PlayedError("Not Found")
        return uuid

    def total(uuid):
        if energies[uuid] is None:
            raise PlayedError("Not Supported")
        return energies[uuid]

    return SimpleNamespace(
        NVMLError=PlayedError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetName=lambda uuid: "a GPU", nvmlDeviceGetTotalEnergyConsumption=total,
    )  # fmt: skip


def test_gpus_are_found_by_their_uuids(monkeypatch):
    energies = {"GPU-one": 5000, "GPU-old": None}
    monkeypatch.setitem(sys.modules, "pynvml", played_nvml(energies))
    (device,) = nvml_devices(["one"])
    meter = EnergyMeter([device])
    meter.start()
    energies["GPU-one"] = 7500
    meter.pause()
    assert (meter.joules, meter.source) == (2.5, "NVML a GPU")
    assert nvml_devices(["one", "old"]) == []
    assert nvml_devices(["unknown"]) == []
    with pytest.raises(OSError, match="Not Supported"):
        NvmlDevice(played_nvml(energies), "old")


def test_an_accelerator_needs_its_own_counter(powercap, monkeypatch):
    device = SimpleNamespace(type="another", index=3)
    monkeypatch.setattr(energy, "uuid_of", lambda device: f"{device.index}")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # cannot be imported
    assert energy_meter([CPU, device], root=powercap) is None
    monkeypatch.setitem(sys.modules, "pynvml", played_nvml({"GPU-3": 0}))
    assert energy_meter([CPU, device], root=powercap).source.endswith("RAPL package-1, NVML a GPU")
