"""The roofline of a device: where points of known passes lie, and what is said of them."""

import math
import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from stretto.cost import Device
from stretto.cost.stage_prediction import Machine
from stretto.measure import layer_costs
from stretto.report.roofline import LayerPass, Roofline, sentence, svg

SVG = "{http://www.w3.org/2000/svg}"


def roofline(*passes):
    """A device of 100 GFLOP/s and 10 GB/s: the ridge is at 10 FLOPs a byte."""
    layers = [
        LayerPass(layer=f"layer {i}", kind=kind, flops=flops, bytes=num_bytes, seconds=seconds)
        for i, (kind, flops, num_bytes, seconds) in enumerate(passes)
    ]
    return Roofline(title="a < b", peak=1e11, bandwidth=1e10, passes=tuple(layers))


def drawn(found):
    """The pixels of the bounds' three ends, and of the marks of passes by their texts on hover."""
    root = ElementTree.fromstring(svg(found))
    path = next(each for each in root.iter(f"{SVG}path") if each.get("class") == "bounds").get("d")
    x0, y0, x1, y1, x2 = map(float, re.findall(r"[\d.]+", path))
    marks = {}
    for group in root.iter(f"{SVG}g"):
        title, mark = group
        side = float(mark.get("width", 0)) / 2
        corner = (mark.get("cx") or mark.get("x"), mark.get("cy") or mark.get("y"))
        marks[title.text.partition(":")[0]] = tuple(float(each) + side for each in corner)
    return [(x0, y0), (x1, y1), (x2, y1)], marks


def test_passes_at_a_bound_lie_on_its_line_and_slower_ones_below():
    """2 FLOPs a byte at the memory's bandwidth; 40 at the peak, and at a quarter of it; the ridge itself."""
    found = roofline(("F", 2e9, 1e9, 0.1), ("B", 4e10, 1e9, 0.4), ("F", 4e10, 1e9, 1.6), ("B", 1e10, 1e9, 0.1))
    (start, ridge, end), marks = drawn(found)
    x, y = marks["layer 0, forward"]
    along = (x - start[0]) / (ridge[0] - start[0])
    assert 0 < along < 1
    assert y == pytest.approx(start[1] + along * (ridge[1] - start[1]), abs=0.02)
    decade = (ridge[0] - x) / math.log10(10 / 2)  # pixels
    assert marks["layer 3, backward"] == pytest.approx(ridge, abs=0.02)
    assert marks["layer 1, backward"] == pytest.approx((ridge[0] + decade * math.log10(4), end[1]), abs=0.02)
    slope = (y - ridge[1]) / (ridge[0] - x)
    x, y = marks["layer 2, forward"]
    assert y - end[1] == pytest.approx(decade * slope * math.log10(4), abs=0.02)


def test_what_is_said_of_the_passes():
    """Two of four seconds left of the ridge, one without FLOPs; at the bounds they would take 0.2 + 0.1 + 0.5 s."""
    found = roofline(("F", 2e9, 2e9, 2.0), ("B", 1e10, 1e8, 1.0), ("F", 0.0, 5e9, 1.0))
    facts = found.facts() | {"file": "a.svg"}
    assert facts["ridge"] == 10
    assert (facts["left_of_ridge"], facts["not_drawn"]) == (0.5, 0.25)
    assert facts["of_the_bounds"] == pytest.approx(0.8 / 4)
    assert [(each["layer"], each["bound"], each["attained"]) for each in facts["passes"]] == [
        ("layer 0", 1e10, 1e9),
        ("layer 1", 1e11, 1e10),
    ]
    assert sentence(facts) == (
        "roofline: 50 % of the layers' time is left of the ridge at 10.0 FLOPs a byte, 25 % have no FLOPs; at its "
        "bounds the device would take 20 % of the time; drawn in a.svg"
    )
    assert "layer 2" not in svg(found)


def test_layers_on_a_device_of_which_only_the_bounds_are_known():
    """Products of [8, 64] by [64, 64]: 65,536 FLOPs, and 4 (512 + 4,096 + 512) bytes, at the bound."""
    layers, x = [nn.Linear(64, 64, bias=False) for _ in range(2)], torch.zeros(2, 64)
    costs = layer_costs(layers, x, loss=mse_loss, target=x)
    device = Device(memory=1e9, memory_bandwidth=1e10, peak={"float32": 1e11})
    found = Roofline.of("linear", costs, ["one", "two"], Machine(device, "float32"), 8)
    one, back, two, _, *loss = found.passes
    assert (one.layer, one.kind, back.kind, two.layer) == ("one", "F", "B", "two")
    assert (one.flops, one.bytes) == (65_536, 4 * 5_120)
    assert one.attained == pytest.approx(found.bound(one.intensity)) == pytest.approx(1e10 * 3.2)
    assert {each.layer for each in loss} == {"loss"}
    assert all(each.attained <= found.bound(each.intensity) * (1 + 1e-9) for each in found.drawn)


def test_a_model_without_flops_has_a_picture_of_bounds_alone():
    (_, ridge, end), marks = drawn(roofline(("F", 0.0, 1e6, 1e-3)))
    assert marks == {}
    assert ridge[1] == end[1]
