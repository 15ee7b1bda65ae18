"""Losses that count what they sum: however a minibatch is cut, training follows its sum over its count.

The references are plain PyTorch on whole minibatches, and the same methods given what the whole minibatch counts
beforehand, as an ordinary mean.
"""

import copy
import functools
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy, cross_entropy, log_softmax, mse_loss, one_hot

import stretto
from pairwise import in_turn
from stretto import UsageError
from stretto.losses.comparison import is_cross_entropy
from stretto.losses.mean_check import sample

CLASSES, LENGTH, WIDTH = 5, 6, 8
SYNCHRONOUS = [
    "backprop", "gpipe(microbatches=3)", "1f1b(microbatches=3)", "interleaved", "looped-bfs", "zb-h1", "zb-v",
    "1f1b(microbatches=3, recompute=True)",
]  # fmt: skip
LOCAL = ["greedy", "overlapping", "overlapping(combine=mean, delay=1)", "chunked"]
DELAYED = [
    "pipedream", "pipedream-2bw", "paci(every=2)", "pb", "pb-lwp-sc", "spectrain", "pb(warmup=2)",
    "pipemare(microbatches=3, warmup=2)", "pb(recompute=True)",
]  # fmt: skip


def network():
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return [stage.double() for stage in (*hidden, nn.Linear(WIDTH, CLASSES))]


def heads(method):
    if not method.startswith(("greedy", "overlapping", "chunked")):
        return None
    stages = range(3) if method.startswith("greedy") else (1, 2) if method.startswith("overlapping") else (1,)
    torch.manual_seed(1)
    made = {stage: nn.Linear(WIDTH, CLASSES).double() for stage in stages}
    return [made.get(stage) for stage in range(4)]


def batches(number, size=13, padded=True):
    draw = torch.Generator().manual_seed(2)
    for _ in range(number):
        x = torch.randn(size, LENGTH, WIDTH, generator=draw).double()
        y = torch.randint(CLASSES, (size, LENGTH), generator=draw)
        lengths = torch.arange(size) * (LENGTH + 1) // size  # the first examples are nothing but padding
        if padded:
            y[torch.arange(LENGTH) >= lengths[:, None]] = -100
        yield x, y


def plain(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten())


def counted(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), (target != -100).sum()


@stretto.mean
def told(output, target):
    """What a part adds to the whole's mean, as a mean over its examples: the whole's count comes with the target."""
    target, count, examples = target
    total = cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return total / count[0] * examples[0] / len(output)


def with_a_mean_of_nothing(output, target):
    return plain(output, target) if bool((target != -100).any()) else 0 * output.sum()


def with_count(y):
    return y, (y != -100).sum().expand(len(y)), torch.tensor(len(y)).expand(len(y))


def sgd(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def build(loss, method, data=1, sync="all-reduce", **options):
    return stretto.Trainer(
        network(), loss, sgd, method, heads=heads(method), mesh=stretto.Mesh(data=data), sync=sync, **options
    )


def train(trainer, given):
    losses = [trainer.step(x, y) for x, y in given]
    return [loss for loss in (*losses, *trainer.flush()) if loss is not None]


def assert_alike(one, other, bound=1e-12):
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=bound)


def plainly(given, loss=plain, clip=None):
    """Minibatches in one piece, in plain PyTorch: the losses, and the trained weights by stage."""
    model = nn.ModuleList(network())
    optimizer, losses = sgd(list(model.parameters())), []
    for x, y in given:
        optimizer.zero_grad()
        for layer in model:
            x = layer(x)
        value = loss(x, y)
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("method", "axes"), in_turn(SYNCHRONOUS, [(2, 0.05), (1, None), (2, None), (1, 0.05)], rounds=4, slow=3)
)
def test_synchronous_methods_train_as_plain_pytorch_on_the_whole(method, axes):
    data, clip = axes
    expected, weights = plainly(batches(4), clip=clip)
    trainer = build(counted, method, data, clip=clip)
    assert train(trainer, batches(4)) == pytest.approx(expected, abs=1e-12)
    assert_alike(trainer.gather(), weights)


@pytest.mark.parametrize(
    ("method", "axes"),
    [
        *in_turn(SYNCHRONOUS, [(2, None), (1, None), (2, 0.05)], rounds=3, slow=3),
        *in_turn([*LOCAL, *DELAYED], [(2, None), (1, None), (2, 0.05)], rounds=3, slow=2),
    ],
)
def test_every_method_trains_as_if_it_were_told_the_count_beforehand(method, axes):
    data, clip = axes
    reference = build(told, method, data, clip=clip)
    expected = train(reference, ((x, with_count(y)) for x, y in batches(6)))
    trainer = build(counted, method, data, clip=clip)
    assert train(trainer, batches(6)) == pytest.approx(expected, abs=1e-12)
    assert_alike(trainer.gather(), reference.gather())


def test_a_plain_mean_would_be_far_off():
    """What the laws above keep from users: the same minibatches, their parts' means taken for shares of the whole's."""
    _, weights = plainly(batches(3))
    trainer = build(stretto.mean(with_a_mean_of_nothing), "1f1b(microbatches=3)")
    train(trainer, batches(3))
    start = nn.ModuleList(network()).state_dict()
    moved, off = (
        math.sqrt(sum(float((one[key] - other[key]).square().sum()) for key in weights))
        for one, other in ((weights, start), (trainer.gather(), weights))
    )
    assert off > 0.05 * moved


def test_replicas_that_train_by_themselves_divide_by_their_own_counts():
    every, given = 2, [(x, y) for x, y in batches(4, size=12)]
    for x, _ in given:
        x[:] = x[torch.randperm(12, generator=torch.Generator().manual_seed(3))]
    alone = [nn.ModuleList(network()) for _ in range(2)]
    optimizers = [sgd(list(model.parameters())) for model in alone]
    for step, (x, y) in enumerate(given, start=1):
        for model, optimizer, own_x, own_y in zip(alone, optimizers, x.split(6), y.split(6), strict=True):
            optimizer.zero_grad()
            for layer in model:
                own_x = layer(own_x)
            plain(own_x, own_y).backward()
            optimizer.step()
        if step % every == 0:
            with torch.no_grad():
                for one, other in zip(alone[0].parameters(), alone[1].parameters(), strict=True):
                    one.copy_((one + other) / 2)
                    other.copy_(one)
    trainer = build(counted, "backprop", 2, sync=f"local-sgd(every={every})")
    train(trainer, given)
    assert_alike(trainer.gather(), alone[0].state_dict())


@pytest.mark.parametrize("method", ["greedy(head=infopro)", "chunked(head=infopro)"])
def test_a_head_with_losses_of_its_own_is_the_same_with_replicas(method):
    results = []
    for data in (1, 2):
        example = torch.zeros(2, LENGTH, WIDTH).double()
        trainer = stretto.Trainer(network(), counted, sgd, method, mesh=stretto.Mesh(data=data), example=example)
        results.append((train(trainer, batches(4)), trainer.gather()))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-12)
    assert_alike(results[0][1], results[1][1])


# -- nothing counts ----------------------------------------------------------------------------------------------------


UNCOUNTED = ["backprop", "1f1b(microbatches=3)", "zb-h1", "greedy", "overlapping", "pb", "paci(every=2)"]


@pytest.mark.parametrize(("method", "data"), in_turn(UNCOUNTED, [1, 2], rounds=2, slow=1))
def test_a_minibatch_of_which_nothing_counts_makes_no_update_and_says_so(method, data):
    given = list(batches(2))
    trainer = build(counted, method, data, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))
    train(trainer, given)
    before, rates = copy.deepcopy(trainer.gather()), learning_rates(trainer)
    x, y = given[0]
    with pytest.warns(UserWarning, match=r"update \d+: nothing of its minibatch counts in the loss"):
        losses = train(trainer, [(x, torch.full_like(y, -100))])
    assert math.isnan(losses[-1])
    assert_alike(trainer.gather(), before, 0.0)
    assert learning_rates(trainer) == rates
    train(trainer, given)
    assert all(bool(value.isfinite().all()) for value in trainer.gather().values())
    assert not torch.equal(trainer.gather()["3.weight"], before["3.weight"])


def learning_rates(trainer):
    return [stage.optimizer.param_groups[0]["lr"] for stage in trainer._stages.values()]


def test_evaluate_divides_the_sum_of_all_batches_by_their_count():
    given = list(batches(3))
    trainer = build(counted, "backprop")
    model = nn.Sequential(*network())
    with torch.no_grad():
        whole = plain(torch.cat([model(x) for x, _ in given]), torch.cat([y for _, y in given]))
    assert trainer.evaluate(given)["loss"] == pytest.approx(float(whole), abs=1e-12)
    with pytest.raises(UsageError, match=r"evaluate got 13 examples of which nothing counts"):
        trainer.evaluate([(given[0][0], torch.full_like(given[0][1], -100))])


# -- torch's own losses ------------------------------------------------------------------------------------------------

WEIGHT = torch.tensor([0.1, 1.0, 3.0, 0.5, 2.0]).double()
OWN = [
    cross_entropy,
    nn.CrossEntropyLoss(weight=WEIGHT),
    nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1),
    functools.partial(cross_entropy, weight=WEIGHT, label_smoothing=0.2),
    functools.partial(cross_entropy, ignore_index=1, reduction="mean"),
]


CUT = [("1f1b(microbatches=3)", 1), ("backprop", 2), ("zb-h1", 2)]


@pytest.mark.parametrize(("loss", "cut"), in_turn(OWN, CUT, rounds=3, slow=2))
def test_torchs_cross_entropy_is_taken_for_its_sum_and_count(loss, cut):
    method, data = cut
    ignored = getattr(loss, "ignore_index", loss.keywords.get("ignore_index", -100) if hasattr(loss, "func") else -100)
    given = [(x, y.where(y >= 0, ignored)) for x, y in batches(4)]
    expected, weights = plainly(given, lambda output, y: loss(output.transpose(1, 2), y))
    trainer = stretto.Trainer(
        [*network()[:3], nn.Sequential(network()[3], Transposed())], loss, sgd, method, mesh=stretto.Mesh(data=data)
    )
    assert train(trainer, given) == pytest.approx(expected, abs=1e-12)
    assert_alike({key.replace("3.0.", "3."): value for key, value in trainer.gather().items()}, weights)


@pytest.mark.parametrize(("method", "data"), [("1f1b(microbatches=3)", 1), ("backprop", 2)])
def test_class_weights_are_counted_where_nothing_is_ignored(method, data):
    """Parts of a minibatch have as many targets then, but of other classes."""
    loss, given = nn.CrossEntropyLoss(weight=WEIGHT), list(batches(3, padded=False))
    expected, weights = plainly(given, lambda output, y: loss(output.transpose(1, 2), y))
    stages = [*network()[:3], nn.Sequential(network()[3], Transposed())]
    trainer = stretto.Trainer(stages, loss, sgd, method, mesh=stretto.Mesh(data=data))
    assert train(trainer, given) == pytest.approx(expected, abs=1e-12)
    assert_alike({key.replace("3.0.", "3."): value for key, value in trainer.gather().items()}, weights)


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def test_nll_loss_is_one_of_them():
    loss = nn.NLLLoss(weight=WEIGHT)
    expected, weights = plainly(batches(3), lambda output, y: loss(log_softmax(output, -1).flatten(0, 1), y.flatten()))
    stages = [*network()[:3], nn.Sequential(network()[3], nn.LogSoftmax(-1), Transposed())]
    trainer = stretto.Trainer(stages, loss, sgd, "gpipe(microbatches=3)")
    assert train(trainer, batches(3)) == pytest.approx(expected, abs=1e-12)
    assert_alike({key.replace("3.0.", "3."): value for key, value in trainer.gather().items()}, weights)


def test_hugging_faces_labels_are_shifted_and_counted():
    def labels(output, y):
        return cross_entropy(output[:, :-1].flatten(0, 1), y[:, 1:].flatten())

    expected, weights = plainly(batches(3), labels)
    trainer = build(stretto.losses.next_token_cross_entropy, "1f1b(microbatches=3)", 2)
    assert train(trainer, batches(3)) == pytest.approx(expected, abs=1e-12)
    assert_alike(trainer.gather(), weights)


def test_without_padding_torchs_cross_entropy_stays_a_mean():
    """No count travels, and nothing is divided: the same numbers to the last bit as of a loss that nobody knows."""
    weights = []
    for loss in (cross_entropy, stretto.mean(lambda output, target: cross_entropy(output, target))):
        stages = [*network()[:3], nn.Sequential(network()[3], Transposed())]
        trainer = stretto.Trainer(stages, loss, sgd, "1f1b(microbatches=3)")
        train(trainer, batches(3, padded=False))
        weights.append(trainer.gather())
    assert_alike(*weights, 0.0)


# -- a mean that is not over examples is refused -----------------------------------------------------------------------

REFUSED = {
    "padding": (plain, True),
    "padding to come": (plain, False),
    "class weights": (lambda o, y: cross_entropy(o.flatten(0, 1), y.flatten(), weight=WEIGHT), False),
    "another mark": (lambda o, y: cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=0), False),
    "a sum": (lambda o, y: mse_loss(o, one_hot(y, CLASSES).to(o), reduction="sum"), False),
    "over the batch": (lambda o, y: mse_loss(o, one_hot(y, CLASSES).to(o)) ** 0.5, False),
}


PARTS = [("1f1b(microbatches=3)", 1), ("backprop", 2), ("greedy", 2)]


@pytest.mark.parametrize(("case", "cut"), in_turn(REFUSED, PARTS, rounds=3, slow=2), ids=str)
def test_a_mean_that_is_not_over_examples_is_refused_before_an_update(case, cut):
    (loss, padded), (method, data) = REFUSED[case], cut
    trainer = build(loss, method, data)
    before = copy.deepcopy(trainer.gather())
    flat = r"return cross_entropy\(output.flatten\(0, -2\), target.flatten\(\), reduction=\"sum\"\), \(target != -100\)"
    advice = {
        "padding": r"return stretto.losses.token_cross_entropy.sum_and_count\(output, target\)",
        "padding to come": r"return stretto.losses.token_cross_entropy.sum_and_count\(output, target\)",
        "class weights": flat,
        "another mark": flat,
        "a sum": r"return \(error \* mask\)\.sum\(\), mask\.sum\(\)",
        "over the batch": "microbatches=1",
    }[case]
    with pytest.raises(UsageError, match=rf"not a mean over examples[\s\S]*{advice}[\s\S]*stretto.mean\(loss\)"):
        train(trainer, batches(1, padded=padded))
    assert_alike(trainer.gather(), before, 0.0)


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_not_refused_where_nothing_is_cut_or_the_user_knows(case):
    loss, padded = REFUSED[case]
    train(build(loss, "backprop"), batches(1, padded=padded))
    train(build(loss, "pb"), batches(1, padded=padded))
    train(build(stretto.mean(loss), "1f1b(microbatches=3)"), batches(1, padded=padded))


def means_of_examples(output, y):
    losses = cross_entropy(output.transpose(1, 2), y, reduction="none")
    return (losses.sum(1) / (y != -100).sum(1).clamp(min=1)).mean()


ACCEPTED = {
    "classes": (lambda o, y: cross_entropy(o[:, 0], y[:, 0]), False),
    "squared error": (lambda o, y: mse_loss(o, one_hot(y, CLASSES).to(o)), False),
    "probabilities": (lambda o, y: binary_cross_entropy(o.sigmoid(), one_hot(y, CLASSES).to(o)), False),
    "means of examples": (means_of_examples, True),
    "sum and count": (counted, True),
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_means_over_examples_are_accepted(case):
    loss, padded = ACCEPTED[case]
    train(build(loss, "1f1b(microbatches=3)", 2), batches(9, padded=padded))


def test_a_loss_that_takes_only_probabilities_is_looked_at_with_probabilities():
    stages = [*network()[:3], nn.Sequential(network()[3], nn.Sigmoid())]

    def uneven(output, y):
        known = y != -100
        return binary_cross_entropy(output[known], one_hot(y[known], CLASSES).to(output))

    trainer = stretto.Trainer(stages, uneven, sgd, "1f1b(microbatches=3)")
    with pytest.raises(UsageError, match="not a mean over examples"):
        train(trainer, batches(1))


criterion = nn.CrossEntropyLoss()


class Squares(nn.Module):
    def forward(self, output, y):
        return mse_loss(output, y)


@pytest.mark.parametrize(
    ("loss", "target", "crossed"),
    [
        (lambda o, y: criterion(o, y), torch.arange(3), True),
        (nn.CrossEntropyLoss(weight=WEIGHT), torch.arange(3), True),
        (functools.partial(plain), torch.arange(3), True),
        (plain, torch.rand(3, 4), False),  # probabilities have no -100
        (Squares(), torch.arange(3), False),
    ],
)
def test_the_advice_of_a_cross_entropy_is_for_cross_entropies_of_classes(loss, target, crossed):
    assert is_cross_entropy(loss, target) == crossed


def test_large_outputs_are_sampled():
    """No more numbers are made up than MOST says, but for one example of each of two parts."""
    y = torch.arange(1000)
    some, sizes = sample((y, 7), [300, 300, 300, 100], 40)
    assert sizes == (10, 10, 10, 10)
    assert some[0].tolist() == [start + each for start in (0, 300, 600, 900) for each in range(10)]
    assert some[1] == 7
    assert sample(y, [300, 300, 300, 100], 0)[0].tolist() == [0, 300]
    assert sample(y, [500, 500], 1000)[0] is y


def test_marks_that_come_later_are_looked_at_when_they_come():
    """One label an example, and some of them unknown from the 6th minibatch on: refused there, with 5 updates made."""

    def first(output, y):
        return cross_entropy(output[:, 0], y)

    trainer = build(first, "1f1b(microbatches=3)")
    given = [(x, y[:, 0]) for x, y in batches(6, padded=False)]
    given[5][1][:3] = -100
    train(trainer, given[:5])
    with pytest.raises(UsageError, match="not a mean over examples"):
        trainer.step(*given[5])
    train(trainer, given[:1])


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: None,
        lambda o, y: o,
        lambda o, y: (o.sum(), -1),
        lambda o, y: (o.sum(), math.nan),
        lambda o, y: (o.sum(), None),
        lambda o, y: (o.sum(), y),
        lambda o, y: (o.sum(), 1, 2),
        lambda o, y: 3.0,
    ],
)  # fmt: skip
def test_a_loss_of_another_kind_is_refused(loss):
    with pytest.raises(UsageError, match=r"the loss returned .*\(sum, count\)"):
        train(build(loss, "backprop"), batches(1))


def test_the_random_numbers_of_training_are_not_disturbed_by_the_check():
    def trained(loss):
        torch.manual_seed(5)
        stages = [
            nn.Sequential(stage, nn.Dropout(0.5)) if index < 3 else stage for index, stage in enumerate(network())
        ]
        trainer = stretto.Trainer(stages, loss, sgd, "1f1b(microbatches=3)")
        train(trainer, batches(3, padded=False))
        return trainer.gather(), torch.rand(1)

    known, draw = trained(stretto.mean(lambda o, y: mse_loss(o, one_hot(y, CLASSES).to(o))))
    looked, other = trained(lambda o, y: mse_loss(o, one_hot(y, CLASSES).to(o)))
    assert torch.equal(draw, other)
    assert_alike(known, looked, 0.0)
