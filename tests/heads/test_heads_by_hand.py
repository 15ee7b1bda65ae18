"""Heads that know the network: one step of greedy equals plain PyTorch, written out function by function."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, batch_norm, conv2d, cross_entropy, interpolate, linear, relu

import stretto
from laws.networks import labels
from pairwise import thinned
from stretto.errors import UsageError
from stretto.heads import LocalLoss
from stretto.heads.auglocal import copied_stages, depth_at
from stretto.measure.flops import count
from stretto.methods import method

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS = 4


def cnn():
    """[N, 1, 6, 6] -> [N, 3, 6, 6] -> [N, 4, 3, 3] -> [N, 5, 3, 3] -> [N, 4]."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU()).double(),
        nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4)).double(),
        nn.Sequential(nn.Conv2d(4, 5, 3, padding=1), nn.ReLU()).double(),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4)).double(),
    ]


def images(seed=1):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(6, 1, 6, 6, generator=g, dtype=torch.float64), labels(g)) for _ in range(STEPS)]


def stage_by_hand(number, p, x, prefix=""):
    """What stage `number` of `cnn` computes with the parameters `p`; norms by the batch."""
    p = {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}
    if number == 0:
        return relu(conv2d(x, p["0.weight"], p["0.bias"], padding=1))
    if number == 1:
        h = conv2d(relu(x), p["1.weight"], p["1.bias"], padding=1, stride=2)
        return batch_norm(h, None, None, p["2.weight"], p["2.bias"], training=True)
    if number == 2:
        return relu(conv2d(x, p["0.weight"], p["0.bias"], padding=1))
    return linear(x.mean((2, 3)), p["2.weight"], p["2.bias"])


def two_layers(p, x, prefix=""):
    h = relu(linear(x.mean((2, 3)), p[prefix + "1.weight"], p[prefix + "1.bias"]))
    return linear(h, p[prefix + "3.weight"], p[prefix + "3.bias"])


def two_layer(number, p, x, image, y):
    return cross_entropy(two_layers(p, x), y)


def infopro(number, p, x, image, y):
    """Weights 2, 1.25, 0.5; conv, ReLU, conv on the enlarged image."""
    h = interpolate(x, size=(6, 6), mode="bilinear", align_corners=True)
    h = relu(conv2d(h, p["decoder.1.weight"], p["decoder.1.bias"], padding=1))
    h = conv2d(h, p["decoder.3.weight"], p["decoder.3.bias"], padding=1)
    return cross_entropy(two_layers(p, x, "classifier."), y) + (2, 1.25, 0.5)[number] * ((h - image) ** 2).mean()


def auglocal(number, p, x, image, y):
    """Behind 0: stages 2, 3 (of images of 3x3, with 4 channels); behind 1: 2 and 3; behind 2: 3."""
    if number == 0:
        x = conv2d(adaptive_avg_pool2d(x, (3, 3)), p["layers.0.each.0.1.weight"])
        layers = ((1, 2), (3, 3))
    else:
        layers = ((1, 2), (3, 3)) if number == 1 else ((1, 3),)
    for place, stage in layers:
        x = stage_by_hand(stage, p, x, f"layers.{place}.")
    return cross_entropy(x, y)


HEADS = {"two-layer": two_layer, "infopro(first=2.0, last=0.5)": infopro, "auglocal": auglocal}


@pytest.mark.parametrize("head", HEADS)
def test_a_step_of_greedy_is_plain_pytorch(head):
    data = images()
    trainer = stretto.Trainer(cnn(), cross_entropy, SGD, f"greedy(head={head})", example=data[0][0])
    stages, heads = copy.deepcopy((trainer.stages, trainer.heads))
    optimizers = [
        SGD([p for part in (stage, head) if part is not None for p in part.parameters()])
        for stage, head in zip(stages, heads, strict=True)
    ]
    for x, y in data:
        trainer.step(x, y)
        h = x
        for number, (stage, own) in enumerate(zip(stages, heads, strict=True)):
            given, optimizer = h.detach(), optimizers[number]
            h = stage_by_hand(number, dict(stage.named_parameters()), given)
            loss = cross_entropy(h, y) if own is None else HEADS[head](number, dict(own.named_parameters()), h, x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    trainer.flush()
    for wanted, found in zip([*stages, *heads[:-1]], [*trainer.stages, *trainer.heads[:-1]], strict=True):
        for (name, one), other in zip(wanted.named_parameters(), found.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-11, atol=1e-13), name


def test_which_layers_auglocal_takes():
    """By the authors' rule: l + (n - l - 1) / d i, rounded; depth goes from d to 1 with the coefficient."""
    assert copied_stages(0, 16, 2) == [8, 15]
    assert copied_stages(3, 16, 3) == [7, 11, 15]
    assert copied_stages(13, 16, 5) == [14, 15]
    assert [depth_at(stage, 16, 6, 1.0) for stage in range(15)] == [6, 6, 5, 5, 5, 4, 4, 4, 3, 3, 2, 2, 2, 1, 1]
    assert [depth_at(stage, 16, 2, 0.5) for stage in range(15)] == [2] * 15
    assert {depth_at(stage, 16, 6, 0) for stage in range(15)} == {6}
    assert depth_at(0, 2, 3, 1.0) == 3


@pytest.mark.parametrize("head", ["two-layer", "infopro", "auglocal"])
def test_heads_are_priced(head):
    """A plain head of stage 0 costs 2 x 3 x 4 FLOPs of forward; two layers another 2 x 3 x 3; the others more."""
    x, y = images()[0]
    plain, chosen = (
        count(stretto.Trainer(cnn(), cross_entropy, SGD, f"greedy(head={name})", example=x), x, y)["F", 0]
        for name in ("pooled", head)
    )
    decoder = 36 * 9 * (3 * 12 + 12 * 1)
    later = 9 * (3 * 4 + 4 * 5 * 9) + 5 * 4  # adapter, conv, linear
    extra = {"two-layer": 3 * 3, "infopro": 3 * 3 + decoder, "auglocal": later - 3 * 4}
    assert chosen - plain == 2 * extra[head]


class Halved(LocalLoss):
    """A user's own loss: half of the task's, and the mean of the input for all it is worth."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4).double()

    def forward(self, x):
        return self.linear(x.mean((2, 3)))

    def total(self, loss, features, inputs):
        return loss / 2 + features[0].mean() * inputs[0].mean()


def test_a_users_own_local_loss():
    (x, y), *_ = images()
    heads = [None, None, Halved(), None]
    trainer = stretto.Trainer(cnn(), cross_entropy, SGD, "chunked(chunks=4)", example=x, heads=heads)
    before = copy.deepcopy((trainer.stages[2], trainer.heads[2]))
    features = trainer.model[1](trainer.model[0](x)).detach()
    trainer.step(x, y)
    trainer.flush()
    h = before[0](features)
    (cross_entropy(before[1](h), y) / 2 + h.mean() * x.mean()).backward()
    for part, trained in zip(before, (trainer.stages[2], trainer.heads[2]), strict=True):
        for old, new in zip(part.parameters(), trained.parameters(), strict=True):
            assert torch.allclose(new, old - 0.1 * old.grad, atol=1e-13)


def test_microbatches_reconstruct_their_own_examples():
    """Four replicas and one come to the same weights: every part of a batch has its own inputs."""
    (x, y), *_ = images()
    found = []
    for replicas in (1, 3):
        stages = [nn.Sequential(nn.Flatten(), nn.Linear(36, 5)).double(), nn.Linear(5, 4).double()]
        torch.manual_seed(1)
        for parameter in (p for stage in stages for p in stage.parameters()):
            nn.init.normal_(parameter)
        trainer = stretto.Trainer(
            stages, cross_entropy, SGD, "greedy(head=infopro)", example=x, mesh=stretto.Mesh(data=replicas)
        )
        trainer.step(x, y)
        trainer.flush()
        found.append(
            torch.cat([p.detach().flatten() for m in (*trainer.stages, trainer.heads[0]) for p in m.parameters()])
        )
    assert torch.allclose(found[0], found[1], atol=1e-12)


def tokens():
    return [nn.Embedding(7, 4), nn.Linear(4, 7)], torch.zeros(3, 5, dtype=torch.int64)


def classified_tokens():
    stages, x = tokens()
    return [stages[0], nn.Sequential(nn.Flatten(), nn.Linear(20, 3))], x


@pytest.mark.parametrize(("head", "parts"), [
    ("infopro", ["reconstructs the model's input, but that is torch.int64"]),
    ("infopro(first=-1)", ["head 'infopro': first=-1 must be a number of at least 0"]),
    ("auglocal(depth=0)", ["head 'auglocal': depth=0 must be a whole number of at least 1"]),
    ("auglocal(coefficient=2)", ["head 'auglocal': coefficient=2 must be a number from 0 to 1"]),
])  # fmt: skip
def test_refusals(head, parts):
    stages, x = classified_tokens() if head == "infopro" else tokens()
    with pytest.raises(UsageError) as error:
        stretto.Trainer(stages, cross_entropy, SGD, f"greedy(head={head})", example=x)
    for part in parts:
        assert part in str(error.value)


def test_auglocal_says_where_it_cannot_go():
    stages = [nn.Linear(4, 6), nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 1)), nn.Conv2d(2, 2, 1),
              nn.Sequential(nn.Flatten(), nn.Linear(12, 3))]  # fmt: skip
    with pytest.raises(UsageError, match=r"cannot lead \[5, 6\] into its layers of stage 2, which take \[5, 2, 2, 3\]"):
        stretto.Trainer(stages, cross_entropy, SGD, "greedy(head=auglocal)", example=torch.zeros(5, 4))


def test_names_with_options_survive_being_written_and_read():
    for head in ("two-layer", "two-layer(width=64)", "auglocal(depth=3, coefficient=0.25)", "linear"):
        built = method(f"chunked(chunks=3, head={head})")
        assert built.head == head
        assert method(str(built)).head == head
        assert method("greedy", head=head).head == head


@pytest.mark.parametrize("head", thinned(["infopro", "linear", "auglocal", "two-layer"], 4))
def test_heads_are_predicted_as_they_are_counted(head):
    """The forward of a stage and all that stands behind it: off the layer table, and as torch counts a real step."""
    from stretto.settings.runs import TrainSettings
    from stretto.study.predicted_runs import costs_of_stages
    from stretto.study.prepare import prepare, resolve

    settings = TrainSettings(model_options={"depth": 3, "width": 12}, batch_size=16, method=f"greedy(head={head})")
    prepared = prepare(resolve(settings))
    costs, behind = costs_of_stages(prepared)
    x, y = prepared.dataset.train.x[:16], prepared.dataset.train.y[:16]
    counted = count(prepared.trainer, x, y)
    for stage, row in enumerate(behind[:-1]):
        works = [*costs.layers[stage].forward, *row.forward]
        assert sum(work.flops.at(1) for work in works) == counted["F", stage]
        assert row.parameter_bytes == sum(4 * p.numel() for p in prepared.trainer.heads[stage].parameters())


def test_losses_of_heads_need_whole_weights():
    (x, _), *_ = images()
    mesh = stretto.Mesh(data=2)
    with pytest.raises(UsageError, match=r"the heads of stages \[0, 1, 2\] have losses of their own"):
        stretto.Trainer(cnn(), cross_entropy, SGD, "greedy(head=infopro)", example=x, mesh=mesh, sync="fully-shard")
