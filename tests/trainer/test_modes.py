"""Training follows the modes that modules have, as a plain loop does: of layers, and of a model that was cut."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stretto

X = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)
Y = torch.arange(8) % 3


class Around(nn.Module):
    """Its forward decides by its mode between its blocks: it is cut by torch.export."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.last, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(torch.tanh(self.first(x)))
        if self.training:
            x = 2 * x
        return self.head(torch.tanh(self.last(x)))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def plainly(modes):
    model = Around().double()
    optimizer = sgd(model.parameters())
    for mode in modes:
        model.train(mode)
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    return model


def same(model, other):
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.allclose(one, two, rtol=1e-10, atol=1e-10) for one, two in pairs)


MODES = [(True, False, True), (False, True), (False, False)]


@pytest.mark.filterwarnings("ignore:all layers are in evaluation mode:UserWarning")
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("then", [True, False])
def test_a_model_that_was_cut_follows_eval_and_train(modes, then):
    """`then`: its mode when it was cut."""
    model = Around().double().train(then)
    stages = stretto.split(model, 2, example=X)
    assert stages.exported
    model.train(modes[0])
    trainer = stretto.Trainer(stages, F.cross_entropy, sgd)
    for mode in modes:
        model.train(mode)
        trainer.step(X, Y)
    assert same(model, plainly(modes))


def test_the_mode_of_one_module_in_a_graph_is_refused():
    model = Around().double()
    trainer = stretto.Trainer(stretto.split(model, 2, example=X), F.cross_entropy, sgd)
    trainer.step(X, Y)
    model.norm.eval()
    with pytest.raises(stretto.UsageError, match="norm of Around is in evaluation mode now, and was in training mode"):
        trainer.step(X, Y)
    model.train()
    trainer.step(X, Y)
    assert same(model, plainly((True, True)))


def layers():
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).double().eval(),
        nn.Linear(8, 3).double().eval(),
    ]


def test_stages_in_evaluation_train_so_with_a_warning():
    given, wanted = layers(), nn.Sequential(*layers())
    with pytest.warns(UserWarning, match=r"all layers are in evaluation mode.*call model.train\(\)"):
        trainer = stretto.Trainer(given, F.cross_entropy, sgd)
    optimizer = sgd(wanted.parameters())
    for _ in range(2):
        trainer.step(X, Y)
        trainer.evaluate([(X, Y)])
        optimizer.zero_grad()
        F.cross_entropy(wanted(X), Y).backward()
        optimizer.step()
    assert same(nn.Sequential(*given), wanted)


def test_runs_put_what_they_are_given_into_training(tmp_path):
    """`stretto.train` writes the loop itself: a builder may return a network that was loaded in evaluation mode."""
    made = []

    def build():
        made.append([layer.float() for layer in layers()])
        return made[-1]

    data = (X.float(), Y), (X.float(), Y)
    stretto.train(build, data, steps=2, batch_size=4, lr=0.1, out=tmp_path / "run", evaluations=1, quiet=True)
    assert int(made[-1][0][1].num_batches_tracked) == 2
