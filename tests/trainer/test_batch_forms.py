"""Batches as dicts and NumPy arrays, against the same tensors by position; and batches that are refused."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from pairwise import in_turn
from stretto import UsageError

METHODS = ["backprop", "gpipe(microbatches=2)", "pb", "pb-lwp-sc", "pipedream", "greedy", "1f1b(recompute=True)"]


class Scaled(nn.Module):
    """A first stage of two arguments, the second of which may be named only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, ids, *, mask):
        return torch.tanh(self.linear(ids)) * mask


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.head = nn.Linear(3, 2)

    def forward(self, ids, scale=None, mask=None):
        for block in self.blocks:
            ids = block(ids).tanh()
        return self.head(ids if mask is None else ids * mask)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loss(output, target):
    return cross_entropy(output, target["class"]) + (output.mean(1) - target["mean"]).square().mean()


def data(steps=5, examples=8):
    torch.manual_seed(1)
    for _ in range(steps):
        x = {"mask": torch.rand(examples, 1), "ids": torch.randn(examples, 3)}
        yield x, {"class": torch.randint(2, (examples,)), "mean": torch.rand(examples)}


def stages():
    torch.manual_seed(0)
    return [Scaled(), nn.Linear(5, 2)]


def by_position(made):
    """The same network with its arguments by position."""

    class Positional(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids, mask):
            return self.inner(ids, mask=mask)

    return [Positional(made[0]), made[1]]


@pytest.mark.parametrize(("method", "replicas"), in_turn(METHODS, [1, 2], rounds=2, slow=1))
def test_a_dict_is_its_tensors_by_name(method, replicas):
    """Also a target's, cut with the examples; to the bit what tuples come to, under every policy of weights."""
    if method == "greedy" and replicas == 2:
        replicas = 1
    mesh = stretto.Mesh(data=replicas)
    named, plain = stages(), by_position(stages())
    example = next(data())[0]
    a = stretto.Trainer(named, loss, sgd, method, example=example, mesh=mesh)
    b = stretto.Trainer(
        plain, lambda o, t: loss(o, {"class": t[0], "mean": t[1]}), sgd, method,
        example=(example["ids"], example["mask"]), mesh=mesh,
    )  # fmt: skip
    for x, y in data():
        assert a.step(x, y) == b.step((x["ids"], x["mask"]), (y["class"], y["mean"]))
    assert a.flush() == b.flush()
    for one, other in zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    batches = list(data(2))
    arrays = [({k: v.numpy() for k, v in x.items()}, {k: v.numpy() for k, v in y.items()}) for x, y in batches]
    assert a.evaluate(batches) == a.evaluate(arrays)
    assert torch.equal(a.model(**batches[0][0]), b.model(batches[0][0]["ids"], batches[0][0]["mask"]))


def test_a_split_by_names_takes_dicts_in_any_order():
    torch.manual_seed(0)
    model = Blocks()
    example = {"ids": torch.randn(4, 3), "mask": torch.rand(4, 1)}
    cut = stretto.split(copy.deepcopy(model), 2, example=example)
    also = stretto.split(copy.deepcopy(model), 2, example=example)
    a, b = (stretto.Trainer(made, cross_entropy, sgd, "1f1b", example=example) for made in (cut, also))
    y = torch.tensor([0, 1, 1, 0])
    assert a.step({"mask": example["mask"], "ids": example["ids"]}, y) == b.step((example["ids"], example["mask"]), y)


def test_bfloat16_converts_what_a_dict_holds():
    example = next(data())[0]
    trainer = stretto.Trainer(stages(), loss, sgd, "1f1b(microbatches=2)", example=example, precision="bf16")
    assert all(trainer.step(x, y) > 0 for x, y in data(2))


def test_arrays_are_tensors():
    """Read-only and reversed ones, too, which torch does not take as they are."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    made = [nn.Linear(3, 4), nn.Linear(4, 2)]
    a, b = (stretto.Trainer(copy.deepcopy(made), cross_entropy, sgd, "gpipe(microbatches=2)") for _ in range(2))
    frozen = x.numpy().copy()
    frozen.flags.writeable = False
    reverse = y.numpy()[::-1].copy()[::-1]
    assert a.step(frozen, reverse) == b.step(x, y)
    assert a.evaluate([(x.numpy(), y.numpy())]) == b.evaluate([(x, y)])


X, Y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        ("text", Y, "x is 'text', a str: give a tensor or a NumPy array"),
        ((), Y, "x is an empty tuple"),
        ({}, Y, "x is an empty dict"),
        ((X, None), Y, r"x\[1\] is None, a NoneType"),
        ({1: X}, Y, "x is a dict with the keys"),
        ({"a": X}, Y, r"x names 'a', no argument of stage 0, Linear.forward\(input\)"),
        ({"a": np.array(["one"])}, Y, r"x\['a'\] is an array that torch cannot take"),
        (X.to("meta"), Y, r"x is Tensor \[4, 3\] of torch.float32 on meta: such a tensor holds no numbers"),
        (X, Y.to("meta"), "y is Tensor .* on meta"),
        (X, Y[:3], r"x has 4 examples and y has 3 \(\[3\]\)"),
        (X, torch.tensor(1), "y is a single number without dimensions"),
        (torch.tensor(1.0), Y, "x is a single number without dimensions"),
        (X[:0], Y[:0], r"x has the shape \[0, 3\], a batch without examples"),
        (X.double(), Y, r"stage 0 \(Linear\) cannot take what it is given, \[.*3\] float64"),
        (torch.ones(4, 5), Y, r"stage 0 \(Linear\) cannot take what it is given, \[.*5\] float32"),
        (
            X,
            torch.full((4,), 7),
            r"has a loss that fails \(the stage is given \[.*4\] float32\), with the target Tensor \[.*: "
            r"IndexError: Target 7 is out of bounds\. Cross entropy takes classes from 0 .*leaves yours out",
        ),
        (X, Y.to(torch.complex64), "with the target Tensor"),
    ],
)
@pytest.mark.parametrize("method", ["backprop", "gpipe(microbatches=2)", "pb"])
def test_batches_that_do_not_fit_are_refused(method, x, y, said):
    """Before training, and when some has been done; then training goes on as if nothing had been."""
    torch.manual_seed(0)
    made = [nn.Linear(3, 4), nn.Linear(4, 2)]
    trainer = stretto.Trainer(made, cross_entropy, sgd, method)
    late = method == "pb"  # the last stage meets a batch two steps later

    def give():
        trainer.step(x, y)
        trainer.flush() if late else None

    with pytest.raises(UsageError, match=said):
        give()
    if not late:
        trainer.step(X, Y)
        with pytest.raises(UsageError, match=said):
            give()
        trainer.step(X, Y)


def test_sparse_batches_are_taken_whole_and_not_cut():
    whole, cut = (
        stretto.Trainer([nn.Linear(3, 4), nn.Linear(4, 2)], cross_entropy, sgd, method)
        for method in ("backprop", "gpipe(microbatches=2)")
    )
    assert whole.step(X.to_sparse(), Y) > 0
    with pytest.raises(UsageError, match=r"torch.sparse_coo: only dense tensors can be cut into 2 micro-batches"):
        cut.step(X.to_sparse(), Y)


def test_errors_of_the_users_own_code_stay_what_they_are():
    """A batch of a kind that has been trained with is not to blame."""

    class Own(nn.Linear):
        passes = 0

        def forward(self, x):
            self.passes += 1
            if self.passes == 3:
                raise ValueError("bad luck")
            return super().forward(x)

    trainer = stretto.Trainer([Own(3, 4), nn.Linear(4, 2)], cross_entropy, sgd)
    trainer.step(X, Y)
    trainer.step(X, Y)
    with pytest.raises(ValueError, match="bad luck") as error:
        trainer.step(X, Y)
    assert not isinstance(error.value, UsageError)


def test_a_target_with_an_entry_for_each_token_of_an_example_is_flat_where_nothing_is_cut():
    torch.manual_seed(0)
    x, y = torch.randn(4, 6, 3), torch.randint(2, (24,))
    trainer = stretto.Trainer([nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2), nn.Flatten(0, 1))], cross_entropy, sgd)
    with torch.no_grad():
        expected = cross_entropy(trainer.model(x), y)
    assert trainer.step(x, y) == pytest.approx(float(expected))
    cut = stretto.Trainer([nn.Linear(3, 4), nn.Linear(4, 2)], cross_entropy, sgd, "gpipe(microbatches=2)")
    with pytest.raises(UsageError, match="x has 4 examples and y has 24"):
        cut.step(x, y)


class TakesDict(nn.Module):
    """A forward as many are written, of one dict."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, features):
        return self.layer(features["ages"] + features["prices"])


def test_a_forward_of_one_dict_is_told_what_to_take():
    batch = {"ages": X, "prices": X}
    remedy = (
        r"TakesDict\.forward\(features\): a dict of tensors is passed as keyword arguments: "
        r"write def forward\(self, ages, prices\)"
    )
    with pytest.raises(UsageError, match=rf"x names 'ages', no argument of stage 0, {remedy}"):
        stretto.Trainer([TakesDict()], cross_entropy, sgd, device="cpu").step(batch, Y)
    with pytest.raises(UsageError, match=rf"x names 'ages', no argument of stage 0, {remedy}"):
        stretto.Trainer([TakesDict()], cross_entropy, sgd, "greedy", example=batch, device="cpu")
    with pytest.raises(UsageError, match=rf"example names 'ages', no argument of {remedy}"):
        stretto.split(TakesDict(), 2, example=batch)
    with pytest.raises(UsageError, match=r"Choose from features; a dict of .* write def forward.self, ages.$"):
        stretto.split(TakesDict(), 2, example={"ages": X})


def test_evaluations_weigh_named_inputs_by_their_examples():
    """Targets with an entry for each token: batches weigh as many as they have examples."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 3)

        def forward(self, ids, scale):
            return self.linear(ids[..., None] * scale[:, None, None]).flatten(0, 1)

    torch.manual_seed(0)
    trainer = stretto.Trainer([Tokens()], lambda output, y: cross_entropy(output, y), sgd, device="cpu")
    batches = [
        ({"ids": torch.randn(n, t), "scale": torch.rand(n)}, torch.randint(3, (n * t,))) for n, t in ((2, 5), (4, 2))
    ]
    model = trainer.model
    with torch.no_grad():
        told = [(float(cross_entropy(model[0](**x), y)), len(x["ids"])) for x, y in batches]
    wanted = sum(loss * count for loss, count in told) / sum(count for _, count in told)
    assert trainer.evaluate(batches)["loss"] == pytest.approx(wanted)
