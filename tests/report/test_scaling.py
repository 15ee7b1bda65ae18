"""The page of a plan's scaling."""

import re

from stretto.report.scaling import ScaledPlan, build_scaling, verdict


def rows():
    return [
        ScaledPlan(way=way, workers=workers, batch=64, plan="gpipe", used=workers, seconds=0.5 / workers,
                   simulated=True, throughput=128.0 * workers * share, efficiency=share, utilisation=0.5 * share)
        for workers in (1, 8, 64)
        for way, share in (("hybrid", 1.0), ("data parallel", 0.5))
    ] + [ScaledPlan(way="pipeline", workers=64, batch=64)]  # fmt: skip


def test_the_page_has_its_charts_its_table_and_its_verdict(tmp_path):
    file = build_scaling(tmp_path / "plan.html", model="mlp", cluster="four", scaled=rows(), by_batch=rows(),
                         per_worker=False, facts={"Model": "mlp"})  # fmt: skip
    text = file.read_text()
    assert re.findall(r'<div class="chart" id="([^"]+)">', text) == ["throughput", "efficiency", "utilisation-batch"]
    assert "does not fit" in text
    assert "On 64 workers the best plan, hybrid (gpipe), comes to 8192 examples" in text
    assert text.count("<tr>") == 1 + 7


def test_where_nothing_fits():
    assert verdict([]) == "The model fits on none of these numbers of workers."
    assert ScaledPlan(way="pipeline", workers=64, batch=64).cells[2] == "does not fit"
