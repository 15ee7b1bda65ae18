"""What plans are made of, read off networks."""

from stretto.study.model_costs import costed


def test_layers_that_pass_on_several_tensors_have_costs_and_heads():
    data = {"limit": 100, "examples": 100}
    found = costed("encoder-decoder", {"depth": 2, "width": 16}, "number-words", data, "auto")
    assert len(found.layers) == 4
    assert len(found.heads) == 4
    assert all(row.forward for row in found.costs.layers[:4])
    assert found.sides == (0, 0, 0, 0)
