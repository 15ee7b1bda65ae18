"""Networks without data are counted on meta tensors, equal layers once: the rows are those of torch's fakes, whole."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn

from stretto.measure import layer_costs, with_times
from stretto.measure.layer_counting import LayerCounting, MetaOperators
from stretto.measure.tensor_costs import published_tensor_costs
from stretto.models.published import gpt3, planned_network
from stretto.models.published_network import made_by

TOKENS = {"depth": 4, "width": 32, "heads": 4, "context": 8, "vocabulary": 40}
LLAMA = {"kv_heads": 2, "positions": "rotary", "norm": "rms", "gated": True, "bias": False, "tied": True}
NETWORKS = {
    "decoder": partial(planned_network, "decoder", TOKENS),
    "fused": partial(planned_network, "decoder", TOKENS | LLAMA | {"attention": "fused", "dropout": 0.0}),
    "gpt3": partial(gpt3, **TOKENS),
    "resnet": partial(planned_network, "resnet", {"depth": 18, "side": 32}),
    "unet": partial(planned_network, "unet", {"depth": 2, "width": 8, "side": 16, "norm": "group"}),
}


def rows(network, layers, counting, form):
    """Rows of layers, or of the first of two processes that share them."""
    with torch.device("meta"):
        x, y = network.example(2), network.target(2)
    x = x.bfloat16() if x.is_floating_point() else x
    whole = layer_costs(layers, x, loss=network.loss, target=y, fake=counting)
    if form is None:
        return whole
    return published_tensor_costs(network, layers, (x, y), 2, whole, fake=counting, **form)


def built(network):
    with torch.device("meta"):
        return [layer.bfloat16() for layer in network.layers()]


DIVIDED = {"sequence": True, "recompute": "selective"}
SLOW = [pytest.param(name, None, marks=pytest.mark.slow) for name in ("decoder", "gpt3", "resnet", "unet")]
SLOW += [pytest.param("decoder", DIVIDED, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "form"), [("fused", None), *SLOW])
def test_rows_on_meta_tensors_are_those_of_fakes_and_equal_layers_have_equal_rows(name, form):
    network = NETWORKS[name]()
    few, places = network.condensed()
    counted = rows(few, built(few), LayerCounting(on_meta=True), form)
    assert counted.spread(places) == rows(network, built(network), LayerCounting(), form)
    assert len(few.recipe) < len(network.recipe) or name in ("resnet", "unet")
    assert all(made_by(network.recipe[i]) == made_by(few.recipe[place]) for i, place in enumerate(places))


def test_calls_that_share_a_counting_run_no_two_layers_that_are_alike():
    network, _ = NETWORKS["decoder"]().condensed()
    layers, counting = built(network), LayerCounting(on_meta=True)
    first = rows(network, layers, counting, None)
    number = len(counting.traced)
    assert number == 2 * 4  # on as many examples and on twice as many: start, block, end, loss
    assert rows(network, built(network), counting, None) == first
    assert len(counting.traced) == number
    rows(network, layers, counting, {"sequence": True})
    divided = len(counting.traced)
    rows(network, layers, counting, {"sequence": True, "recompute": "selective"})
    assert len(counting.traced) == divided + 2 * 3, "the blocks alone, of which the first and the last differ"


def test_a_second_call_of_an_operator_gives_another_tensor_of_the_same_shape():
    x = torch.ones(4, 6, device="meta")
    with MetaOperators():
        one, other = torch.nn.functional.gelu(x.t()), torch.nn.functional.gelu(x.t())
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata
        assert x.add_(1) is x
        assert x.view(24).untyped_storage()._cdata == x.untyped_storage()._cdata
        assert torch.add(x, 1).dtype == torch.float32
        assert torch.add(x.int(), 1).dtype == torch.int32
        assert torch.add(x.int(), 1.0).dtype == torch.float32


class Two(NamedTuple):
    mean: torch.Tensor
    spread: torch.Tensor


class Ends(nn.Module):
    """Two numbers an example, as a tensor, a tuple or a dict of two."""

    def __init__(self, form):
        super().__init__()
        self.two, self.form = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)]), form

    def forward(self, x):
        one, other = (layer(x) for layer in self.two)
        return self.form(one, other)


FORMS = {
    "tuple": (lambda one, other: (one, other), lambda output: output),
    "named": (Two, lambda output: (output.mean, output.spread)),
    "dict": (lambda one, other: {"mean": one, "spread": other}, lambda output: (output["mean"], output["spread"])),
    "nested": (
        lambda one, other: {"all": [one, {"b": other}]},
        lambda output: (output["all"][0], output["all"][1]["b"]),
    ),
}


@pytest.mark.parametrize("fake", [True, False])
def test_a_loss_takes_any_output_and_costs_the_same(fake):
    x, y, found = torch.randn(4, 8), {"y": torch.randn(4, 1)}, []
    for form, parts in FORMS.values():

        def loss(output, target, parts=parts):
            mean, spread = parts(output)
            return ((mean - target["y"]) ** 2 * spread).mean()

        layers = [nn.Linear(8, 8), Ends(form)]
        costs = layer_costs(layers, x, loss=loss, target=y, fake=fake)
        timed = with_times(costs, layers, [x, x[:2]], loss=loss, targets=[y, {"y": y["y"][:2]}], repeats=1)
        assert all(row.measured.backward.at(4) for row in timed.layers)
        found.append(costs)
    assert all(row.backward for row in found[0].layers)
    assert found[0].layers[1].output.each == 2 * 4, "both tensors"
    assert all(costs == found[0] for costs in found)


def test_autocast_is_counted_on_fakes():
    layer = nn.Linear(4, 4)
    assert LayerCounting(on_meta=True).on_meta
    with torch.autocast("cpu", dtype=torch.bfloat16):
        counting = LayerCounting(on_meta=True)
        assert not counting.on_meta
        cast = layer_costs([layer], torch.ones(2, 4), fake=counting)
    assert cast.layers[0].output.each == 4 * 2
