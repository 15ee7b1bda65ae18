"""What torch.export cannot do is said before anything is trained, with the place and the remedy."""

import io
import logging

import pytest
import torch
from branching_models import Branching, Counting, Moody, Tied
from torch import nn

import stretto
from stretto.errors import UsageError
from stretto.nn.chain import Chain
from stretto.splitting.export.exported import fits


class Plain(nn.Module):
    """Two layers, and between them what a test says."""

    def __init__(self, between, out=lambda x: x):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self._between, self._out = between, out

    def forward(self, x):
        return self._out(self.second(self._between(self.first(x))))


def by_value(x):
    return -x if x.sum() > 0 else x


def by_rows(x):
    return x.view(6, 4)


def keep(x):
    return x


@pytest.mark.parametrize(
    ("model", "num_stages", "message"),
    [
        (
            Plain(by_value),
            2,
            r"Plain\.forward cannot be exported at .*mistakes\.py:\d+ \(return -x if x\.sum\(\) > 0 else x\): "
            r"GuardOnDataDependentSymNode: .*decide by nothing that a tensor holds.*list of layers",
        ),
        (Plain(by_rows), 2, r"Plain\.forward takes only as many rows of x as the example, 6 \(torch\.export\).*or -1"),
        (Plain(keep, out=lambda x: {"rows": 3}), 2, r"Plain\.forward returns no tensor .*as the loss takes them"),
        (Plain(keep), 3, r"3 stages from 2 pieces: a stage holds at least one piece\. Ask for at most 2 stages"),
    ],
)
def test_what_cannot_be_exported(model, num_stages, message):
    with pytest.raises(UsageError, match=message):
        stretto.split(model, num_stages, example=torch.randn(6, 4))


@pytest.mark.parametrize("model", [Branching(), Tied(), Counting()])
def test_without_an_example_nothing_is_exported(model):
    with pytest.raises(UsageError, match=r"Or give one input batch, example=x, and its graph is cut .*torch\.export"):
        stretto.split(model, 2)


def test_other_sizes_than_rows_are_the_examples():
    stages = stretto.split(Plain(lambda x: x if x.shape[0] < 10 else -x), 2, example=torch.randn(1, 4))
    assert Chain(*stages)(torch.randn(9, 4)).shape == (9, 4)
    for shape, said in (((10, 4), r"\[10, 4\]"), ((3, 5), r"\[3, 5\]"), ((4,), r"\[4\]")):
        with pytest.raises(
            UsageError, match=rf"x is {said}, but the model was split .* for \[1 to 9, 4\]: pad or crop"
        ):
            stages[0](torch.randn(shape))
    with pytest.raises(UsageError, match=r"x is \[2, 3\], .* for \[any, 4\]"):
        fits(torch.ones(2, 3), "x", [[1, 2**63 - 1], 4])


def test_the_model_is_left_as_it_was():
    """Modes, statistics, attributes and the generator; a frozen norm stays frozen while its stage trains."""
    model = Branching(0.5)
    model.stem.norm.eval()
    modes, attributes = [m.training for m in model.modules()], [set(vars(m)) for m in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    stages = stretto.split(model, 2, example=torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), generator)
    assert [m.training for m in model.modules()] == modes
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    Chain(*stages).train()(torch.randn(4, 3, 8, 8))
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, state[key])}
    assert moved
    assert not any(key.startswith("stem.") for key in moved)


def test_methods_with_own_losses_keep_tied_weights_together():
    with pytest.raises(UsageError, match=r"only 1 piece can be separated: .*share the parameter 'out\.weight'"):
        stretto.split(Tied(), 2, example=torch.ones(4, 5, dtype=torch.long), tied="together")


def test_bounds_and_pieces_agree():
    model, x = Moody(), torch.randn(4, 6)
    stages = stretto.split(model, 3, example=x)
    assert stretto.split(model, stages.bounds, example=x).bounds == stages.bounds
    assert "cut by torch.export: Moody has no one list of blocks" in stages.explanation


def test_torch_prints_nothing_before_the_message(capfd):
    """The graph that an export had come to is told by what caused the error; what a forward prints is printed."""

    class Talking(Plain):
        def forward(self, x):
            print("said")
            return super().forward(x)

    with pytest.raises(UsageError) as caught:
        stretto.split(Talking(by_value), 2, example=torch.randn(6, 4))
    assert capfd.readouterr() == ("", "")
    assert any("aten.gt" in note for note in caught.value.__cause__.__notes__)
    stretto.split(Talking(keep), 2, example=torch.randn(6, 4))
    said = capfd.readouterr()
    assert "said\n" in said.out
    assert said.err == ""


def test_a_log_whose_stream_is_closed_stops_no_export(monkeypatch):
    """A test runner that captured torch's first words, and a notebook, leave such handlers behind."""
    stream = io.TextIOWrapper(io.BytesIO())
    handler = logging.StreamHandler(stream)
    monkeypatch.setattr(logging.getLogger("torch"), "handlers", [handler])
    stream.close()
    assert len(stretto.split(Plain(keep), 2, example=torch.randn(6, 4))) == 2


def test_what_one_mode_alone_computes_in_vain():
    """transformers' Mamba, in float64, casts a parameter and does not use it: only while it trains."""

    def between(x):
        if torch.is_grad_enabled() and model.training:
            x.to(torch.float32)
        return x

    model = Plain(between).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    stages = stretto.split(model, 2, example=x)
    for training in (True, False):
        model.train(training)
        assert torch.equal(Chain(*stages).train(training)(x), model(x))


def test_one_stage_is_the_model_itself_where_nothing_can_be_recorded():
    """Data parallelism and plain training cut nothing; an LSTM of packed sequences decides by what a tensor holds."""

    model, x = Plain(by_value), torch.randn(6, 4)
    stages = stretto.split(model, 1, example=x)
    assert list(stages) == [model]
    weights = stretto.Trainer(stages, nn.functional.mse_loss, torch.optim.SGD, example=x).gather()
    assert stages.model_state(weights).keys() == model.state_dict().keys()
    with pytest.raises(UsageError, match="cannot be exported"):
        stretto.split(model, 1, example=torch.randn(6, 3))
