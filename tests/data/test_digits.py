import pytest
import torch

from stretto.data import DATASETS, load
from stretto.data.dataset import stratify
from stretto.data.digits import read
from stretto.errors import UsageError


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def splits(data):
    return {"train": data.train, "validation": data.validation, "test": data.test}


def test_shapes_types_and_sizes(digits):
    assert {name: len(split) for name, split in splits(digits).items()} == {
        "train": 1083,
        "validation": 359,
        "test": 355,
    }
    for split in splits(digits).values():
        assert split.x.shape == (len(split), 1, 8, 8)
        assert (split.x.dtype, split.y.dtype) == (torch.float32, torch.int64)
    assert (digits.name, digits.task, digits.num_classes, digits.options) == (
        "digits",
        "classification",
        10,
        {"side": 8},
    )
    assert all(size in digits.description for size in ("1083 train", "359 validation", "355 test"))


def test_scaled_by_the_train_split_alone(digits):
    assert abs(float(digits.train.x.mean())) < 1e-5
    assert abs(float(digits.train.x.std()) - 1) < 1e-5
    assert abs(float(digits.validation.x.mean())) > 1e-4, "validation's own mean must not have been taken out"


@pytest.mark.slow
def test_read_as_scikit_learn_reads_them():
    from sklearn.datasets import load_digits

    images, labels = read()
    assert torch.equal(images[:, 0], torch.from_numpy(load_digits().images).to(torch.float32))
    assert torch.equal(labels, torch.from_numpy(load_digits().target))


def test_every_example_is_in_one_split():
    _, labels = read()
    rows = torch.cat(stratify(labels, (0.6, 0.8)))
    assert sorted(rows.tolist()) == list(range(1797))


def test_stratified_and_shuffled(digits):
    total = sum(torch.bincount(split.y) for split in splits(digits).values())
    for share, split in zip((0.6, 0.2, 0.2), splits(digits).values(), strict=True):
        assert (torch.bincount(split.y) - share * total).abs().max() <= 1
        assert all(len(split.y[k : k + 32].unique()) >= 6 for k in range(0, 320, 32)), "in-order batches mix classes"


def test_the_same_whatever_the_global_state(digits):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    again = load("digits")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(
        torch.equal(a.x, b.x) and torch.equal(a.y, b.y)
        for a, b in zip(splits(digits).values(), splits(again).values(), strict=True)
    )


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(UsageError, match="unknown data set 'digit': did you mean 'digits'"):
        load("digit")
    with pytest.raises(UsageError, match="data set 'pydoc' has no option 'contxt'; did you mean 'context'"):
        load("pydoc", contxt=3)
    with pytest.raises(UsageError, match="data set 'digits' has no option 'level'; choose from side"):
        load("digits", level="byte")
    assert set(DATASETS) == {
        "digits",
        "pydoc",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "cifar100",
        "text",
        "number-words",
        "digit-masks",
        "imagenet",
        "saved",
        "parallel",
    }
