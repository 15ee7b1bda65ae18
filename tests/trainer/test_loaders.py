"""`Trainer.fit` with a DataLoader of any kind: the numbers of a plain loop over it, or a refusal."""

import copy
import random
from multiprocessing import current_process

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import stretto
from stretto import UsageError

torch.manual_seed(0)
X = torch.randn(23, 5, dtype=torch.float64)
Y = (X[:, 0] > 0).long()
EPOCHS = 3


class Items(Dataset):
    """Items of one's own, which draw from all three generators."""

    def __len__(self):
        return len(X)

    def __getitem__(self, number):
        return X[number] + torch.randn(5) * 0.1 + random.random() + np.random.random(), Y[number]


class AtOnce(Items):
    """A Dataset that is read by `__getitems__` where there is one."""

    def __getitems__(self, numbers):
        return [(2 * X[number], Y[number]) for number in numbers]


class Doubled(TensorDataset):
    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return 2 * x, 1 - y


class Batches(Dataset):
    """Items that are batches."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return X[5 * number : 5 * number + 5], Y[5 * number : 5 * number + 5]


class Endless(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


class Halves(DataLoader):
    """A loader of one's own, which gives half of each batch."""

    def __iter__(self):
        return ((x[::2], y[::2]) for x, y in super().__iter__())


class Pairs(list):
    """A sampler of batches of one's own."""

    def __iter__(self):
        return iter([[1, 2, 3, 4], [3, 3, 7, 9, 11], [5, 6]])


def generator():
    return torch.Generator().manual_seed(7)


def own_collate(items):
    x, y = default_collate(items)
    return x.flip(0), y.flip(0)


def seeded_worker(number):
    torch.manual_seed(number)


ROWS = TensorDataset(X, Y)
LOADERS = {
    "in order": lambda: DataLoader(ROWS, 6),
    "in order, the last dropped": lambda: DataLoader(ROWS, 6, drop_last=True),
    "a generator": lambda: DataLoader(ROWS, 6, shuffle=True, generator=generator()),
    "a generator of the sampler": lambda: DataLoader(ROWS, 6, sampler=RandomSampler(ROWS, generator=generator())),
    "a sampler of other data": lambda: DataLoader(ROWS, 6, sampler=RandomSampler(range(9))),
    "some of the examples": lambda: DataLoader(ROWS, 6, sampler=RandomSampler(ROWS, num_samples=11)),
    "with replacement": lambda: DataLoader(ROWS, 6, sampler=RandomSampler(ROWS, replacement=True)),
    "a subset": lambda: DataLoader(ROWS, 6, sampler=SubsetRandomSampler(range(13))),
    "weights": lambda: DataLoader(ROWS, 6, sampler=WeightedRandomSampler(X[:, 1].abs(), 20)),
    "batches of a sampler": lambda: DataLoader(ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS), 6, False)),
    "batches of one's own": lambda: DataLoader(ROWS, batch_sampler=Pairs()),
    "a list as a sampler": lambda: DataLoader(ROWS, 6, sampler=[3, 1, 2, 8, 8, 9, 10]),
    "another collate": lambda: DataLoader(ROWS, 6, shuffle=True, collate_fn=own_collate),
    "a loader of one's own": lambda: Halves(ROWS, 6),
    "a subclass of TensorDataset": lambda: DataLoader(Doubled(X, Y), 6, shuffle=True),
    "items that draw": lambda: DataLoader(Items(), 6, shuffle=True),
    "items read at once": lambda: DataLoader(AtOnce(), 6, shuffle=True),
    "items that are batches": lambda: DataLoader(Batches(), batch_size=None, shuffle=True),
    "batches without their dim": lambda: DataLoader(Batches(), 1, collate_fn=lambda batches: batches[0]),
    "a stream": lambda: DataLoader(Endless(), 6),
}


def stages():
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Linear(6, 2)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def seed():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def build(loss=cross_entropy, method="backprop", made=None):
    return stretto.Trainer([stage.double() for stage in made or stages()], loss, sgd, method, device="cpu")


def plain_loop(train, validation=(), loss=cross_entropy, epochs=EPOCHS):
    """Weights, and the mean losses of evaluations."""
    model, evaluated = nn.Sequential(*stages()).double(), []
    optimizer = sgd(model.parameters())
    for _ in range(epochs):
        for x, y in train:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            told = [(loss(model(x), y) * len(x), len(x)) for x, y in validation]
        evaluated += [float(sum(loss for loss, _ in told)) / sum(count for _, count in told)] if told else []
    return model, evaluated


def same(one, other):
    return all(
        torch.allclose(a, b, rtol=0, atol=1e-9) for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_trains_as_in_a_plain_loop(kind):
    seed()
    plain, _ = plain_loop(LOADERS[kind]())
    seed()
    trainer = build()
    trainer.fit(LOADERS[kind](), epochs=EPOCHS, quiet=True)
    assert same(trainer.model, plain)


@pytest.mark.parametrize("kind", ["items that draw", "in order"])
def test_validation_draws_as_in_a_plain_loop(kind):
    """Going through a loader draws a seed, also where nothing is shuffled."""
    seed()
    plain, evaluated = plain_loop(LOADERS["items that draw"](), LOADERS[kind]())
    seed()
    trainer = build()
    history = trainer.fit(LOADERS["items that draw"](), LOADERS[kind](), epochs=EPOCHS, quiet=True)
    assert same(trainer.model, plain)
    assert history.validation_loss == pytest.approx(evaluated, abs=1e-9)


def test_workers_of_a_loader_draw_as_in_a_plain_loop():
    def loader():
        return DataLoader(
            ROWS, 6, shuffle=True, num_workers=1, worker_init_fn=seeded_worker, prefetch_factor=3, timeout=9
        )

    seed()
    plain, _ = plain_loop(loader(), epochs=1)
    seed()
    trainer = build()
    trainer.fit(loader(), epochs=1, quiet=True)
    assert same(trainer.model, plain)


@pytest.mark.parametrize("kind", ["items that draw", "a generator", "weights", "batches of a sampler"])
@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_run_goes_on_in_the_middle_of_an_epoch_to_the_bit(kind, step, tmp_path):
    """Generators are those of the run that was cut: at its epoch's beginning, then after its last batch."""
    seed()
    whole = build()
    whole.fit(LOADERS[kind](), validation=DataLoader(ROWS, 6), steps=8, evaluate_every=step, quiet=True)
    seed()
    common = {
        "validation": DataLoader(ROWS, 6),
        "evaluate_every": step,
        "quiet": True,
        "checkpoint": tmp_path / "saved",
    }
    build().fit(LOADERS[kind](), steps=step, **common)
    torch.manual_seed(99)
    trainer = build()
    trainer.fit(LOADERS[kind](), steps=8, **common)
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), whole.model.parameters(), strict=True))


def test_rows_of_several_tensors_are_inputs_and_a_target():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 2)

        def forward(self, a, b):
            return self.linear(a + b)

    data = TensorDataset(X, X.flip(1), Y)
    trained = []
    for loader in (DataLoader(data, 6), DataLoader(data, 6, collate_fn=lambda items: default_collate(items))):
        torch.manual_seed(1)
        trainer = build(made=[Sum()])
        trainer.fit(loader, epochs=1, quiet=True)
        trained.append(trainer.model)
    assert same(*trained)


# -- data of other forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple])
def test_two_dicts_are_two_batches(kind):
    batches = kind({"x": X[n : n + 6], "labels": Y[n : n + 6]} for n in (0, 6))
    plain, _ = plain_loop([(batch["x"], batch["labels"]) for batch in batches])
    trainer = build()
    trainer.fit(batches, epochs=EPOCHS, quiet=True)
    assert same(trainer.model, plain)


FORMS = {
    "tensors": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "a Dataset": lambda: TensorDataset(X, Y),
    "a loader": lambda: DataLoader(TensorDataset(X, Y), 6),
    "pairs": lambda: [*zip(X.split(6), Y.split(6), strict=True)],
    "dicts": lambda: [{"x": x, "labels": y} for x, y in zip(X.split(6), Y.split(6), strict=True)],
    "a loader of dicts": lambda: DataLoader([{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)], 6),
}


@pytest.mark.parametrize("form", FORMS)
def test_evaluate_takes_what_fit_validates_on(form):
    trainer = build()
    history = trainer.fit((X[:6], Y[:6]), FORMS[form](), epochs=1, quiet=True)
    found = trainer.evaluate(FORMS[form]())
    assert found == {"loss": history["validation_loss"][0], "accuracy": history["validation_accuracy"][0]}
    assert found["loss"] == pytest.approx(cross_entropy(trainer.model(X), Y).item(), rel=1e-12)


@pytest.mark.parametrize(
    "make", [lambda: DataLoader(TensorDataset(X), 6), lambda: DataLoader(X, 6), lambda: [(x,) for x in X.split(6)]]
)
def test_data_without_targets_train_where_nothing_is_cut(make):
    rows = [(x,) for x in X.split(6)]
    plain, _ = plain_loop(((x, None) for _ in range(EPOCHS) for (x,) in rows), loss=energy, epochs=1)
    trainer = build(energy)
    history = trainer.fit(make(), make(), epochs=EPOCHS, quiet=True)
    assert same(trainer.model, plain)
    assert trainer.evaluate(make())["loss"] == history["validation_loss"][-1]
    for processes_or_cut in ("1f1b(microbatches=2)", "gpipe(microbatches=3)"):
        with pytest.raises(UsageError, match=r"Data without targets: a loss takes .*\(x, x\) to an autoencoder"):
            build(energy, processes_or_cut).fit(make(), epochs=1, quiet=True)


def energy(output, target):
    assert target is None
    return output.square().mean()


class Rows(nn.Module):
    """A detector by its form: a loss of rows of boxes, some for each image."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, x):
        return self.linear(x)


def boxes(output, targets):
    return torch.stack(
        [(row - target["boxes"]).square().mean() for row, target in zip(output, targets, strict=True)]
    ).mean()


def test_a_list_of_dicts_is_a_target_where_nothing_is_cut():
    torch.manual_seed(5)
    items = [(x, {"boxes": torch.randn(2 + n % 3, 4, dtype=torch.float64)}) for n, x in enumerate(X[:12])]
    loader = DataLoader(items, 4, collate_fn=lambda rows: (torch.stack([x for x, _ in rows]), [y for _, y in rows]))
    made = Rows()
    plain = Rows().double()
    plain.load_state_dict(made.state_dict())
    optimizer = sgd(plain.parameters())
    for x, targets in loader:
        optimizer.zero_grad()
        boxes(plain(x), targets).backward()
        optimizer.step()
    trainer = build(boxes, made=[made])
    trainer.fit(loader, epochs=1, quiet=True)
    assert same(trainer.model, plain)
    x, targets = next(iter(loader))
    cut = build(stretto.mean(boxes), "1f1b(microbatches=2)", made=[Rows(), nn.Identity()])
    for rows in (targets, [{"boxes": each["boxes"][:1].repeat(4, 1)} for each in targets]):  # as many boxes as images
        with pytest.raises(UsageError, match=r"y is a list of 4 dicts, .* a method without micro-batches takes them"):
            cut.step(x, rows)
    with pytest.raises(UsageError, match=r"x is a list of 4 tensors and y one of as many dicts.*stack images"):
        trainer.step([torch.randn(3, 5 + n) for n in range(4)], targets)


class OfGraphs(nn.Module):
    """Sums of the nodes of each graph, after a step along edges."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 2)

    def forward(self, nodes, edges, graph):
        sums = nodes.index_add(0, edges[1], nodes[edges[0]])
        return self.linear(sums).new_zeros(int(graph.max()) + 1, 2).index_add(0, graph, self.linear(sums))


def test_graphs_train_and_count_where_nothing_is_cut():
    torch.manual_seed(5)
    batches = []
    for sizes in ((3, 2, 4), (5, 2)):
        nodes, graph = torch.randn(sum(sizes), 5, dtype=torch.float64), torch.repeat_interleave(torch.tensor(sizes))
        batches.append(((nodes, torch.randint(sum(sizes), (2, 7)), graph), torch.randint(2, (len(sizes),))))
    made = OfGraphs()
    plain = OfGraphs().double()
    plain.load_state_dict(made.state_dict())
    optimizer = sgd(plain.parameters())
    for _ in range(EPOCHS):
        told = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = cross_entropy(plain(*x), y)
            loss.backward()
            optimizer.step()
            told.append(float(loss.detach()) * len(y))
    trainer = build(made=[made])
    history = trainer.fit(batches, epochs=EPOCHS, quiet=True)
    assert same(trainer.model, plain)
    assert history.train_loss[-1] == pytest.approx(sum(told) / 5)
    with torch.no_grad():
        wanted = sum(float(cross_entropy(plain(*x), y)) * len(y) for x, y in batches) / 5
    assert trainer.evaluate(batches)["loss"] == pytest.approx(wanted)
    with pytest.raises(UsageError, match="all of them need the same length there; a method without micro-batches"):
        build(method="1f1b(microbatches=2)", made=[OfGraphs(), nn.Identity()]).step(*batches[0])


# -- refusals -----------------------------------------------------------------------------------------------------


def test_a_sampler_that_has_to_be_told_of_epochs():
    def loader():
        return DataLoader(ROWS, 6, sampler=DistributedSampler(ROWS, num_replicas=1, rank=0))

    message = r"fit: train is a DataLoader with a DistributedSampler, whose set_epoch .* fit\(\.\.\., epochs=1\)"
    for asked in ({"epochs": 2}, {"steps": 9}):
        with pytest.raises(UsageError, match=message):
            build().fit(loader(), quiet=True, **asked)
    data, trainer, plain = loader(), build(), nn.Sequential(*stages()).double()
    optimizer = sgd(plain.parameters())
    for epoch in range(2):
        data.sampler.set_epoch(epoch)
        trainer.fit(data, DataLoader(ROWS, 6), epochs=1, quiet=True)
        for x, y in data:
            optimizer.zero_grad()
            cross_entropy(plain(x), y).backward()
            optimizer.step()
    assert same(trainer.model, plain)


def test_workers_in_a_process_that_may_not_start_any(monkeypatch):
    monkeypatch.setitem(current_process()._config, "daemon", True)
    loader = DataLoader(ROWS, 6, num_workers=2)
    trainer = build()
    with pytest.raises(UsageError, match="with num_workers=2, but this process is a daemon"):
        trainer.fit(loader, epochs=1, quiet=True)
    with pytest.raises(UsageError, match=r"evaluate: batches is .* with num_workers=2"):
        trainer.evaluate(loader)


def test_a_batch_of_one_row_for_a_batch_norm():
    made = [nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), nn.Linear(6, 2)]
    with pytest.raises(UsageError, match=r"two examples or more in each micro-batch: .*drop_last=True"):
        build(made=made).fit(DataLoader(TensorDataset(X[:13], Y[:13]), 6), epochs=1, quiet=True)
    cut = build(method="1f1b(microbatches=2)", made=copy.deepcopy(made))
    with pytest.raises(UsageError, match="two examples or more in each micro-batch: leave out a last, short batch"):
        cut.step(X[:3], Y[:3])
