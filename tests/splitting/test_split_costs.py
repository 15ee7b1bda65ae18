import pytest
import torch
from torch import nn

from stretto.errors import UsageError
from stretto.splitting.cost import measure, show_flops


def cost(layer, x, by="flops"):
    [value] = measure([layer], ["layer 0"], (x,), by).values
    return value


def test_flops_by_hand():
    assert cost(nn.Linear(5, 7), torch.randn(3, 5)) == 2 * 3 * 5 * 7
    assert cost(nn.Conv2d(2, 4, 3), torch.randn(1, 2, 6, 6)) == 2 * 4 * 4 * 4 * 2 * 9


def test_attention_counts_on_the_cpu():
    """torch's counter leaves out the CPU's fused kernels; a block must not cost less here than on a GPU."""

    class SelfAttention(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    assert cost(SelfAttention(), torch.randn(2, 4, 16, 8)) == 2 * (2 * 2 * 4 * 16 * 16 * 8)


def test_a_transformer_layer_counts_though_its_fast_path_does_not():
    fast = torch.backends.mha.get_fastpath_enabled()
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert cost(layer, torch.randn(2, 5, 8)) == 2 * 10 * (4 * 64 + 2 * 128) + 2 * (2 * 2 * 5 * 5 * 8)
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_an_lstm_counts():
    assert cost(nn.LSTM(3, 4, batch_first=True), torch.randn(2, 5, 3)) == 2 * 10 * 16 * (3 + 4)


@pytest.mark.parametrize("by", ["flops", "time"])
def test_nothing_moves(by):
    """Statistics, modes, gradients and the generator are as they were, whatever the measure."""
    pieces = [nn.Linear(4, 6), nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5)), nn.Linear(6, 2)]
    pieces[1][0].eval()  # frozen on purpose
    pieces[0].weight.grad = torch.ones(6, 4)
    before = {index: {k: v.clone() for k, v in piece.state_dict().items()} for index, piece in enumerate(pieces)}
    means = pieces[1][0].running_mean
    generator = torch.get_rng_state()
    measure(pieces, ["a", "b", "c"], (torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),), by)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [module.training for piece in pieces for module in piece.modules()] == [True, True, False, True, True]
    assert pieces[1][0].running_mean is means
    for index, piece in enumerate(pieces):
        assert all(torch.equal(value, before[index][key]) for key, value in piece.state_dict().items())
    grads = [p.grad for piece in pieces for p in piece.parameters()]
    assert torch.equal(grads[0], torch.ones(6, 4))
    assert grads[1:] == [None] * 5


def test_time_finds_the_slow_layer():
    class Slow(nn.Module):
        def forward(self, x):
            for _ in range(60):
                x = torch.sin(x @ x.T) @ x
            return x

    values = measure([nn.ReLU(), Slow(), nn.ReLU()], ["a", "b", "c"], (torch.randn(64, 64),), "time").values
    assert values[1] > values[0] + values[2]


def test_time_takes_layers_without_gradients():
    pieces = [nn.Embedding(5, 4).requires_grad_(False), nn.Identity(), nn.Linear(4, 4)]
    assert len(measure(pieces, ["a", "b", "c"], (torch.tensor([1, 2]),), "time").values) == 3


def test_what_is_counted_falls_back_and_says_so():
    pieces = [nn.ReLU(), nn.LayerNorm(4)]
    costs = measure(pieces, ["a", "b"], (torch.randn(2, 4),), "flops")
    assert costs.values == [0, 8]
    assert "no FLOPs" in costs.how
    costs = measure([nn.ReLU(), nn.ReLU()], ["a", "b"], (torch.randn(2, 4),), "flops")
    assert costs.values == [1, 1]


def test_an_error_names_the_piece_and_the_shapes():
    with pytest.raises(UsageError, match=r"layer 1 \(Linear\).*\[2, 4\] float32"):
        measure([nn.Linear(3, 4), nn.Linear(5, 6)], ["layer 0", "layer 1 (Linear)"], (torch.randn(2, 3),), "flops")


def test_flops_in_words():
    assert [show_flops(n) for n in (12, 1234, 25 * 10**8)] == ["12 FLOP", "1.23 kFLOP", "2.50 GFLOP"]


def test_a_piece_that_gives_a_view_of_its_parameter():
    class View(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 1, 2))

        def forward(self, x):
            return x @ self.weight[:, 0].T, self.weight.squeeze(1).unsqueeze(1)

    assert cost(View(), torch.ones(5, 2)) == 2 * 5 * 2 * 3
