from itertools import islice

import pytest
import torch

import stretto
from stretto.data import Dataset, Split, forever
from stretto.errors import UsageError
from stretto.stage.precision import Precision
from stretto.stage.trainer_arguments import Specification
from stretto.trainer.microbatches import MinibatchSplitter


def numbered(length, classes=2):
    x = torch.arange(length, dtype=torch.float32).unsqueeze(1)
    return Split(x, torch.arange(length) % classes)


def dataset(**changes):
    fields = {
        "name": "toy",
        "task": "classification",
        "num_classes": 2,
        "train": numbered(6),
        "validation": numbered(4),
        "test": numbered(4),
        "description": "Numbers.",
        "options": {},
    }
    return Dataset(**(fields | changes))


def drawn(batches):
    return [x.flatten().int().tolist() for x, _ in batches]


def test_batches_without_a_seed_come_in_order():
    assert drawn(numbered(5).batches(2)) == [[0, 1], [2, 3], [4]]
    assert drawn(numbered(5).batches(2, drop_last=True)) == [[0, 1], [2, 3]]
    assert drawn(numbered(4).batches(9)) == [[0, 1, 2, 3]]


def test_a_seed_shuffles_and_keeps_every_example_with_its_target():
    batches = list(numbered(50).batches(8, seed=3))
    x, y = torch.cat([x for x, _ in batches]).flatten(), torch.cat([y for _, y in batches])
    assert x.tolist() != list(range(50))
    assert sorted(x.tolist()) == list(range(50))
    assert torch.equal(x.long() % 2, y)


def test_shuffling_depends_on_the_seed_only_and_leaves_the_global_state():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = drawn(numbered(50).batches(8, seed=3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert drawn(numbered(50).batches(8, seed=3)) == first
    assert drawn(numbered(50).batches(8, seed=4)) != first


def test_forever_gives_full_batches_that_differ_by_epoch():
    stream = forever(numbered(10), 4, seed=0)
    batches = drawn(next(stream) for _ in range(20))
    assert all(len(batch) == 4 for batch in batches)
    assert all(len(set(batches[k] + batches[k + 1])) == 8 for k in range(0, 20, 2)), "an epoch repeats no example"
    assert len({tuple(batch) for batch in batches[::2]}) > 5


@pytest.mark.parametrize("start", [0, 1, 2, 3, 7])
def test_forever_can_be_resumed_at_any_position(start):
    whole, rest = forever(numbered(10), 3, seed=5), forever(numbered(10), 3, seed=5, start=start)
    expected = drawn(next(whole) for _ in range(15))[start:]
    assert drawn(next(rest) for _ in range(15 - start)) == expected


@pytest.mark.parametrize("draw", [lambda s, b: s.batches(b), lambda s, b: forever(s, b, 0)])
def test_a_batch_size_below_one_is_refused_at_the_call(draw):
    with pytest.raises(UsageError, match="batch_size=0 must be at least 1"):
        draw(numbered(5), 0)


@pytest.mark.parametrize("draw", [lambda s, b: s.batches(b, drop_last=True), lambda s, b: forever(s, b, 0)])
def test_a_batch_larger_than_the_split_is_refused_where_the_last_is_dropped(draw):
    with pytest.raises(UsageError, match=r"batch_size=6 .* split of 5 examples; take a batch_size of at most 5"):
        draw(numbered(5), 6)


def test_a_negative_start_is_refused():
    with pytest.raises(UsageError, match="start=-1 must be at least 0"):
        forever(numbered(5), 2, 0, start=-1)


def test_a_split_needs_a_target_for_each_example():
    with pytest.raises(UsageError, match="x has 3 and y 2"):
        Split(torch.zeros(3, 1), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_an_empty_split_is_refused_by_name(name):
    with pytest.raises(UsageError, match=f"data set 'toy': split '{name}' is empty"):
        dataset(**{name: numbered(0)})


def test_a_train_split_of_one_class_is_refused():
    with pytest.raises(UsageError, match="data set 'toy': all 6 examples of split 'train' are of class 0"):
        dataset(train=numbered(6, classes=1))
    dataset(validation=numbered(6, classes=1))
    dataset(train=numbered(6, classes=1), task="language")


def test_targets_outside_the_classes_are_refused():
    with pytest.raises(UsageError, match=r"split 'test' lie in 0\.\.2, but num_classes=2 allows 0\.\.1"):
        dataset(test=numbered(6, classes=3))


@pytest.mark.parametrize("start", [0, 3])
def test_replicas_share_every_batch_out_wherever_training_goes_on(start):
    """A data rank needs no sampler of its own: all draw the same batches, and the splitter gives each its examples."""
    batches = list(islice(forever(numbered(10), 4, seed=0, start=start), 3))
    assert drawn(batches) == drawn(islice(forever(numbered(10), 4, seed=0), start, start + 3))
    for x, y in batches:
        parts = []
        for rank in range(2):
            specification = Specification(
                method=stretto.method("backprop"), loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD,
                precision=Precision(None), device=torch.device("cpu"), mesh=stretto.Mesh(data=2),
                sync=stretto.AllReduce(),
            )  # fmt: skip
            schedule, _ = specification.method.plan(1)
            splitter = MinibatchSplitter(specification, schedule, own=[rank], merges=False, reads_x=True, reads_y=True)
            (load,) = splitter.loads(x, y)
            parts.append(load["activation"][0])
        assert torch.equal(torch.cat(parts), x)
        assert all(len(part) == 2 for part in parts)
