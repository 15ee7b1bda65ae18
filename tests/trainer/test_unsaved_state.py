"""Extra state of modules, and buffers that state_dict leaves out, go on to the bit; safetensors hold tensors alone."""

import pytest
import torch
from torch import nn

import stretto

X, Y = torch.linspace(-1, 1, 64).reshape(8, 8), torch.arange(8) % 3
EXTRA = {"dict": {"seen": 0}, "tensor": torch.arange(2.0), "number": 7, "tuple": (1, "a", None), "list": [1, [2.5]]}


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


class Counting(nn.Module):
    """Keeps a running mean and a count in buffers that are not persistent, one changed in place and one replaced."""

    def __init__(self, extra):
        super().__init__()
        self.linear, self.extra = nn.Linear(8, 8), extra
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("table", torch.ones(8), persistent=False)

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.seen = self.seen + 1
            if isinstance(self.extra, dict):
                self.extra["seen"] += 1
        return self.linear(x * self.table - self.mean) / self.seen.clamp(min=1)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def made(kind):
    torch.manual_seed(0)
    extra = EXTRA[kind].copy() if isinstance(EXTRA[kind], dict) else EXTRA[kind]
    stages = [Counting(extra), nn.Linear(8, 3)]
    return stages, stretto.Trainer(stages, nn.functional.cross_entropy, sgd)


@pytest.mark.parametrize("kind", EXTRA)
def test_training_goes_on_to_the_bit(kind, tmp_path):
    (ours, _), trainer = made(kind)
    for _ in range(2):
        trainer.step(X, Y)
    trainer.save(tmp_path / "checkpoint")
    state = trainer.state_dict()
    assert set(state["stages"][0][0]["buffers"]) == {"mean", "seen"}, "what has not changed is not written"
    (read, _), second = made(kind)
    second.load(tmp_path / "checkpoint")
    (loaded, _), third = made(kind)
    third.load_state_dict(state)
    losses = [[each.step(X, Y) for _ in range(2)] for each in (trainer, second, third)]
    assert losses[0] == losses[1] == losses[2]
    for other in (read, loaded):
        assert str(other.extra) == str(ours.extra)
        assert all(torch.equal(one, two) for one, two in zip(ours.buffers(), other.buffers(), strict=True))


def test_gathered_weights_are_tensors():
    names = set(made("dict")[1].gather())
    assert names == {"0.linear.weight", "0.linear.bias", "1.weight", "1.bias"}
    assert "0._extra_state" in made("tensor")[1].gather()


def test_a_run_writes_its_weights_and_says_what_is_left_out(tmp_path):
    data = (X.repeat(5, 1)[:32], Y.repeat(5)[:32]), (X, Y)
    model = lambda: [Counting({"seen": 0}), nn.Linear(8, 3)]  # noqa: E731 (as a user writes it)
    with pytest.warns(UserWarning, match=r"model.safetensors holds tensors alone: the extra state .*is not"):
        run = stretto.train(model, data, steps=3, batch_size=8, out=tmp_path / "run", quiet=True)
    assert run is not None
    assert (tmp_path / "run" / "model.safetensors").exists()
