"""Replicas that go on from a checkpoint come to the numbers of a run that was not interrupted, to the last bit.

A save drains, so the run that is not interrupted flushes in its place.
"""

import copy
import json
import random
import zlib
from functools import partial

import pytest
import torch
from torch import nn

import stretto
from checkpoint.states import assert_same
from pairwise import thinned

METHODS = [
    "backprop", "1f1b(microbatches=3)", "zb-h1", "interleaved", "gpipe(recompute=True)", "greedy",
    "overlapping(delay=1)", "chunked", "pb", "pb-lwp-sc", "pb-lwpw", "spectrain", "pipedream", "pipedream-2bw",
    "paci(every=2)", "pipemare(warmup=3)", "pipemare",
]  # fmt: skip
NEEDS_THE_OPTIMIZER = {"pb-lwp-sc", "pb-lwpw", "spectrain"}  # where a parameter server has it
ONE_VERSION = [*METHODS[:6], "chunked"]  # what fully-shard and shard-optimizer can train
SYNCS = [
    "all-reduce", "all-reduce(hook=bf16)", "shard-optimizer", "fully-shard", "local-sgd(every=3)",
    "local-sgd(every=2,start=3)", "diloco(every=3)", "parameter-server(staleness=4)",
]  # fmt: skip
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "plain": partial(torch.optim.SGD, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
}
SCHEDULERS = {
    None: None,
    "one-cycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=80),
    "exponential": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),
}


def stages(seed=0, hidden=2):
    torch.manual_seed(seed)
    below = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.1)) for _ in range(hidden)]
    return [stage.double() for stage in (*below, nn.Linear(6, 4))]


def batches(number, size=29):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator).double(), torch.randint(4, (size,), generator=generator))
        for _ in range(number)
    ]


def build(case, seed=0, **changed):
    options = {key: value for key, value in {**case, **changed}.items() if key not in ("before", "after")}
    given = {
        "stages": stages(seed, options.pop("hidden", 2)),
        "optimizer": OPTIMIZERS[options.pop("optimizer", "sgd")],
        "scheduler": SCHEDULERS[options.pop("scheduler", None)],
        "mesh": stretto.Mesh(data=options.pop("replicas", 2)),
        "example": batches(1)[0][0],
    }
    return stretto.Trainer(loss=nn.functional.cross_entropy, **{**given, **options})


def draw(seed):
    """A configuration, and how many steps come before the checkpoint and after it."""
    pick = random.Random(seed)
    sync = SYNCS[seed % len(SYNCS)]
    served = sync.startswith("parameter-server")
    methods = ONE_VERSION if "shard" in sync else METHODS
    method = pick.choice([each for each in methods if not (served and each in NEEDS_THE_OPTIMIZER)])
    momentum = method in NEEDS_THE_OPTIMIZER
    return {
        "method": method,
        "sync": sync,
        "optimizer": "sgd" if momentum else pick.choice(list(OPTIMIZERS)),
        "scheduler": pick.choice(list(SCHEDULERS)),
        "clip": pick.choice([None, 0.5]),
        "replicas": pick.choice([2, 3]),
        "before": pick.randrange(8),
        "after": pick.randrange(1, 8),
    }


def everything(trainer):
    """What each replica has of each stage."""
    parts = ("module", "head", "optimizer", "scheduler")
    return [
        {
            "updates": stage.updates,
            **{name: getattr(stage, name).state_dict() for name in parts if getattr(stage, name) is not None},
        }
        for replica in trainer._replicas
        for stage in replica.values()
    ]


def go_on(trainer, data):
    """The losses told, and what each replica has before a flush and after it."""
    losses = [trainer.step(x, y) for x, y in data]
    apart = copy.deepcopy(everything(trainer))
    return losses, apart, trainer.flush(), everything(trainer), trainer.gather(), trainer.order()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(28))
def test_going_on_is_not_having_stopped(seed, tmp_path):
    assert_goes_on(draw(seed), tmp_path)


@pytest.mark.parametrize(
    ("sync", "method", "options"),
    [
        ("all-reduce", "pb-lwp-sc", {"scheduler": "one-cycle"}),
        ("all-reduce(hook=bf16)", "paci(every=2)", {"optimizer": "plain", "clip": 0.5}),
        ("shard-optimizer", "1f1b(microbatches=3)", {"optimizer": "adamw"}),
        ("fully-shard", "greedy", {"optimizer": "nadam", "scheduler": "exponential"}),
        ("local-sgd(every=3)", "spectrain", {}),
        ("local-sgd(every=2,start=3)", "pipemare(warmup=3)", {"optimizer": "adamw"}),
        ("diloco(every=3)", "overlapping(delay=1)", {"optimizer": "nadam", "clip": 0.5}),
        ("parameter-server(staleness=4)", "pipedream", {"scheduler": "one-cycle"}),
    ],
)
def test_each_sync_goes_on_in_the_middle_of_a_round(sync, method, options, tmp_path):
    assert_goes_on({"sync": sync, "method": method, "before": 4, "after": 3, "hidden": 1, **options}, tmp_path)


def assert_goes_on(case, tmp_path):
    data = batches(case["before"] + case["after"])
    first, second = data[: case["before"]], data[case["before"] :]
    through, saved = build(case), build(case)
    told = [[trainer.step(x, y) for x, y in first] for trainer in (through, saved)]
    assert told[0] == told[1]
    through.flush()
    saved.save(tmp_path / "half")
    wanted = go_on(through, second)
    fresh = build(case, seed=1)
    fresh.load(tmp_path / "half")
    assert_same(go_on(fresh, second), wanted)
    saved.step(*data[0])
    saved.load(tmp_path / "half")  # in the same trainer, with something in flight
    assert_same(go_on(saved, second), wanted)


def test_losses_that_three_replicas_owe_are_kept_to_the_bit(tmp_path):
    """A mean over three, added up over micro-batches, is not three thirds of itself."""
    case = {"method": "pipedream-2bw(microbatches=3)", "sync": "local-sgd(every=3)", "replicas": 3}
    kept, fresh = build(case), build(case)
    for x, y in batches(12):
        kept.step(x, y)
    kept.save(tmp_path / "run")
    fresh.load(tmp_path / "run")
    assert fresh.flush() == kept.flush()


# -- other replicas ---------------------------------------------------------------------------------------------------


def saved(folder, sync, replicas, steps=5, **options):
    trainer = build({"method": "pb"}, sync=sync, replicas=replicas, **options)
    for x, y in batches(steps):
        trainer.step(x, y)
    trainer.save(folder)
    return trainer


@pytest.mark.parametrize(
    ("had", "sync", "replicas"),
    thinned(
        [(2, "all-reduce", 3), (3, "all-reduce", 1), (2, "fully-shard", 3), (1, "all-reduce", 2),
         (2, "local-sgd", 3), (2, "shard-optimizer", 3), (2, "diloco", 2), (1, "local-sgd", 2)], 2,
    ),
)  # fmt: skip
def test_replicas_that_were_alike_go_on_as_any(had, sync, replicas, tmp_path):
    """All begin as the first one was; what is asked of them from then on is what a run does that begins so."""
    method = {"method": "1f1b"} if "shard" in sync else {}
    first = saved(tmp_path / "run", "all-reduce" if sync != "local-sgd" or had > 1 else sync, had, **method)
    trainer = build({"method": "pb"}, seed=1, sync=sync, replicas=replicas, **method)
    trainer.load(tmp_path / "run")
    own = everything(trainer)
    assert all(trainer.gather()[key].equal(value) for key, value in first.gather().items())
    for number in range(replicas):
        mine = own[3 * number : 3 * number + 3]
        wanted = everything(first)[3 * number : 3 * number + 3] if had == replicas else everything(first)[:3]
        assert_same(mine, wanted)
    for x, y in batches(5):
        trainer.step(x, y)
    trainer.flush()


def test_an_outer_step_begins_where_replicas_were_alike(tmp_path):
    """A whole outer step without momentum is the mean of the weights: DiLoCo is local SGD from the checkpoint on."""
    saved(tmp_path / "run", "all-reduce", 2)
    whole = stretto.DiLoCo(every=3, outer_lr=1, outer_momentum=0)
    runs = [build({"method": "pb"}, seed=1, sync=sync) for sync in (whole, "local-sgd(every=3)")]
    for trainer in runs:
        trainer.load(tmp_path / "run")
        for x, y in batches(7):
            trainer.step(x, y)
        trainer.flush()
    one, other = (trainer.gather() for trainer in runs)
    assert all(torch.allclose(one[key], other[key], rtol=0, atol=1e-14) for key in one)


@pytest.mark.parametrize(
    ("before", "had", "sync", "replicas", "words"),
    [
        ("local-sgd", 2, "local-sgd", 3, r".*'local-sgd' by 2 replicas.* has 3: go on with mesh=Mesh\(data=2\)"),
        ("diloco", 3, "diloco", 1, r".*by 3 replicas.*this trainer has 1: go on with .*\(--data-parallel 3\)"),
        ("diloco", 2, "local-sgd", 2, r".*sync='diloco'.*sync='local-sgd' cannot go on from: go on with sync='diloco'"),
        ("local-sgd", 2, "all-reduce", 2, r"saved with sync='local-sgd'.*sync='all-reduce' cannot go on from"),
        ("local-sgd", 2, "local-sgd", 1, r"saved with sync='local-sgd'.*sync='all-reduce' cannot go on from"),
        ("all-reduce", 2, "parameter-server", 2, r"saved with sync='all-reduce'.*'parameter-server' cannot go on from"),
        ("parameter-server", 2, "all-reduce", 1, r".*'all-reduce' cannot go on from.* with sync='parameter-server'"),
        ("parameter-server", 1, "parameter-server", 2, r".*by 1 replicas.*this trainer has 2"),
    ],
)  # fmt: skip
def test_replicas_that_cannot_go_on_so_are_refused(before, had, sync, replicas, words, tmp_path):
    saved(tmp_path / "run", before, had, steps=1, hidden=1)
    trainer = build({"method": "pb"}, seed=1, sync=sync, replicas=replicas, hidden=1)
    kept = copy.deepcopy(everything(trainer))
    with pytest.raises(stretto.UsageError, match=f"{tmp_path / 'run'} was {words}"):
        trainer.load(tmp_path / "run")
    assert_same(everything(trainer), kept)


def as_before(folder):
    """Make a checkpoint one of format 2: no word of replicas."""
    file = folder / "manifest.json"
    content = json.loads(file.read_text())
    for name in ("crc32", "replicas", "sync"):
        del content[name]
    content["format"] = 2
    content["crc32"] = f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
    file.write_text(json.dumps(content))


def test_a_checkpoint_of_former_versions_goes_on_where_replicas_are_alike(tmp_path):
    first = saved(tmp_path / "run", "all-reduce", 1)
    as_before(tmp_path / "run")
    for replicas in (1, 2):
        trainer = build({"method": "pb"}, seed=1, sync="all-reduce", replicas=replicas)
        trainer.load(tmp_path / "run")
        assert_same(everything(trainer), everything(first) * replicas)
    for sync in ("local-sgd", "diloco", "parameter-server"):
        with pytest.raises(stretto.UsageError, match=f"kept the optimizer of one replica for all, and sync='{sync}'"):
            build({"method": "pb"}, sync=sync).load(tmp_path / "run")


def test_what_replicas_have_in_common_is_written_once(tmp_path):
    """Under all-reduce each keeps its statistics; under local-sgd its optimizer too, not the weights."""
    for sync, own in (("all-reduce", 0), ("local-sgd", 2)):
        options = {"optimizer": torch.optim.Adam, "mesh": stretto.Mesh(data=2), "sync": sync}
        trainer = stretto.Trainer([Wide().double()], nn.functional.cross_entropy, **options)
        for _ in range(3):
            trainer.step(torch.randn(8, 20).double(), torch.randint(20, (8,)))
        trainer.save(tmp_path / sync)
        weights = sum(p.numel() * 8 for p in trainer.stages[0].parameters())
        written = (tmp_path / sync / "stage-0" / "replica-1" / "__0_0.distcp").stat().st_size
        assert (own + 0.04) * weights < written < (own + 0.2) * weights, sync  # the statistics are a twentieth


class Wide(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(20, 1000), nn.BatchNorm1d(1000, affine=False), nn.Linear(1000, 20))
