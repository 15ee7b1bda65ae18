"""Energy and money to a method's best evaluation, and where each figure is from."""

from dataclasses import replace

import pytest

from stretto.report import units
from stretto.report.html import render
from stretto.report.measures import Tariff, expenses
from stretto.report.record import Point

from .synthetic import make_page, run

POWER = Tariff(cluster="cluster 'ours'", watts=200.0, price_per_hour=1.8)


def metered(made, joules):
    points = [
        replace(point, joules=value, seconds=10.0 * point.step)
        for point, value in zip(made.points, joules, strict=True)
    ]
    return replace(made, points=tuple(points), energy_source="RAPL package-0")


MEASURED = metered(run([2.0, 0.5, 0.4]), [100.0, 3600.0, 7200.0])
UNKNOWN = metered(run([2.0, 0.9, 0.6], method="greedy"), [None] * 3)


def measures_of(records, **values):
    return render(make_page(records, **values)).split('<section id="measures">')[1].split("</section>")[0]


def test_measured_energy_comes_first_and_says_so():
    spent = expenses(MEASURED, MEASURED.points[1], POWER)
    assert (spent.joules, spent.energy_source) == (3600.0, "measured (RAPL package-0)")
    assert spent.money == pytest.approx(1.8 * 20 / 3600)
    assert spent.money_source == "1.8 an hour on cluster 'ours', times its seconds by the clock"


def test_energy_from_the_power_of_devices():
    spent = expenses(UNKNOWN, UNKNOWN.points[2], POWER)
    assert (spent.joules, spent.energy_source) == (
        6000.0, "200 W on cluster 'ours', times its seconds by the clock")  # fmt: skip
    spent = expenses(UNKNOWN, UNKNOWN.points[2], replace(POWER, seconds_per_step=2.0))
    assert spent.joules == 200 * 2 * 3
    assert "predicted to take there" in spent.energy_source


def test_workers_of_their_own_come_before_the_one_device_of_an_emulation():
    predicted = replace(POWER, seconds_per_step=2.0)
    assert expenses(MEASURED, MEASURED.points[1], predicted, emulated=True).joules == 200 * 2 * 2
    alone = expenses(MEASURED, MEASURED.points[1], None, emulated=True)
    assert alone.joules == 3600.0
    assert "of one device that did the work of all workers" in alone.energy_source


def test_nothing_is_known():
    spent = expenses(UNKNOWN, UNKNOWN.points[2], None)
    assert (spent.joules, spent.money, spent.energy_source, spent.money_source) == (None, None, "", "")
    part = measures_of((UNKNOWN,), processes=2)
    assert "Wh" not in part
    assert "energy" not in part
    assert "money" not in part


def test_the_page_says_where_figures_are_from():
    part = measures_of((MEASURED, UNKNOWN), processes=2)
    assert "2.00 Wh" in part
    assert "measured (RAPL package-0)" in part
    assert "<th>money</th>" not in part
    part = measures_of((MEASURED, UNKNOWN), processes=2, tariffs={"backprop": POWER, "greedy": POWER})
    for said in ("measured (RAPL package-0): backprop", "200 W on cluster &#39;ours&#39;", "by the clock: greedy",
                 "1.67 Wh", "<td>0.0150</td>"):  # fmt: skip
        assert said in part, said


@pytest.mark.parametrize(
    ("joules", "text"), [(3.6, "1.00 mWh"), (5400, "1.50 Wh"), (7.2e6, "2.00 kWh"), (0, "0.00 µWh"), (None, "–")]
)
def test_energy_is_in_watt_hours(joules, text):
    assert units.energy(joules) == text


def test_a_record_keeps_its_energy():
    point = MEASURED.points[1]
    assert Point.from_json(point.to_json()).joules == 3600.0
    assert Point.from_json({key: value for key, value in point.to_json().items() if key != "joules"}).joules is None
