"""Studies 3 and 6 of experiments/findings: what they count beside hand-made formulas, and pages of made-up runs."""

import dataclasses
import importlib
import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import stretto
from stretto.data import load

FINDINGS = Path(__file__).parent.parent / "experiments" / "findings"
MODULES = ("harness", "depth", "heads", "local_updates", "sections", "chunks", "panels", "rotation")
BATCH = 6


@pytest.fixture
def imported(monkeypatch):
    """A function from a name to the module; another folder's `main` is imported by other tests."""
    monkeypatch.syspath_prepend(FINDINGS)
    yield importlib.import_module
    for name in [name for name in sys.modules if name.split(".")[0] in MODULES]:
        del sys.modules[name]


def trainer_of(method, widths):
    """A Linear a stage, [N, widths[0]] -> [N, widths[-1]]."""
    stages = [torch.nn.Linear(*pair, bias=False) for pair in itertools.pairwise(widths)]
    return stretto.Trainer(
        stages, cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), method, device="cpu"
    )


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("chunked(chunks=2)", "overlapping")]


@pytest.mark.parametrize("method", ["backprop", "greedy", *SLOW])
def test_compute_memory_and_bytes_are_those_of_formulas(imported, method):
    """FLOPs of matrices by hand: 2 x inputs x outputs forward, as much for each gradient that the method takes."""
    counted, widths = imported("harness.counted"), (5, 7, 7, 7, 3)
    trainer, x, y = trainer_of(method, widths), torch.randn(2, 5), torch.tensor([0, 2])
    found, stages, classes = counted.compute(trainer, x, y), 4, widths[-1]
    forward = [2 * a * b for a, b in itertools.pairwise(widths)]
    heads = {"backprop": [], "greedy": [0, 1, 2], "chunked(chunks=2)": [1], "overlapping": [1, 2]}[method]
    head = [2 * widths[s + 1] * classes if s in heads else 0 for s in range(stages)]
    detached = {"backprop": [0], "greedy": [0, 1, 2, 3], "chunked(chunks=2)": [0, 2], "overlapping": [0]}[method]
    assert found["heads"] == 3 * sum(head)
    assert found["total"] == sum((2 if s in detached else 3) * forward[s] + 3 * head[s] for s in range(stages))
    assert found["paper total"] == 3 * (sum(forward) + sum(head))
    each = [3 * (forward[s] + head[s]) for s in range(stages)]
    serial = {
        "backprop": sum(each), "greedy": max(each), "chunked(chunks=2)": max(each[0] + each[1], each[2] + each[3]),
    }  # fmt: skip
    assert method not in serial or found["paper serial"] == serial[method]
    costs = counted.worker_costs(trainer, x, y, BATCH, "sgd")
    gradients = {"backprop": 3, "greedy": 0, "chunked(chunks=2)": 2, "overlapping": 3}[method]
    assert costs["sent"] == BATCH * 4 * 7 * (3 + gradients)
    assert costs["memory"] > 3 * 4 * (7 * 7 + 7 * classes * bool(heads))  # weights, gradients, momentum
    pipelined = counted.worker_costs(trainer, x, y, BATCH, "sgd", "1f1b(microbatches=2)")
    assert pipelined["sent"] == BATCH * 4 * 7 * 6


def made_up(slow, factor, costs):
    """A study's train: a loss that falls from 4 to 1 in `slow` times the steps, times a factor, without noise."""

    def train(cell, rate, seed, steps, data):
        every = cell.settings.get("every", 25)

        def loss(step):
            return factor(cell) * (4 - 3 * step / (slow(cell) * cell.steps)) * (1 + 0.01 * seed)

        curve = [[step, loss(step), loss(step), loss(step) / 10] for step in range(0, steps + 1, every)]
        return {
            "curve": curve, "validation": abs(rate - cell.rates[len(cell.rates) // 3]), "diverged": None,
            "vocabulary": 90, "seconds a step": {"wall": 1, "cpu": 1}, **costs(cell),
        }  # fmt: skip

    return train


def finished(imported, study, train):
    """All runs of a study with this training in place of its own, by key."""
    halving, work = imported("harness.halving"), imported("harness.work")
    quick, runs = dataclasses.replace(study, train=train), {}
    while todo := halving.next_runs(quick, runs):
        runs.update({run.key: work.make_run(quick, run, None) for run in todo})
    return runs


def test_the_page_of_heads(imported):
    """A head that is 2 % worse, one that is 5 % worse, and one that costs as much as the network."""
    study = imported("heads").STUDY
    assert (study.base_runs, len(study.cells)) == (189, 27)
    names = [name for name in stretto.heads.HEADS if name not in imported("heads").FITTING]
    assert names == ["linear", "pooled", "sequence"]
    factors = {"2 chunks, language": 1.02, "2 chunks, solo": 1.05}

    def costs(cell):
        dear = cell.settings.get("head") == "auglocal"
        return {"compute": {"total": 200 if dear else 100, "heads": 100 if dear else 0}}

    train = made_up(lambda cell: 1, lambda cell: factors.get(cell.name, 1.1 if cell.reference else 1), costs)
    page = imported("harness.page").page(study, finished(imported, study, train))
    assert "Not finished" not in page
    assert "above backprop's | **reached** | 2 chunks, language | 2 % in every run |" in page
    assert "| 2 | `language` | 2 in every run | 0.0 | 100.0 | 2 in every run | worse |  |" in page
    assert "| 2 | `solo` | 5 in every run | 0.0 | 100.0 | 5 in every run | worse | worse |" in page
    # 175: 1.1 (4 - 1.5) / 1
    assert "| 4 | `auglocal` | 10 in every run | 100.0 | 200.0 | 175 in every run | worse |" in page
    assert "where both clip their gradients | **missed** | 2 chunks, language, clipped | 10 % in every run |" in page
    for name in names:
        assert f"- `{name}`: head '{name}' goes [N, " in page


def test_the_page_of_local_updates(imported):
    """Greedy needs 1.1 times the steps and an eighth of the serial compute; with batches of 1024 as many steps."""
    study = imported("local_updates").STUDY
    assert (study.base_runs, len(study.cells)) == (189, 27)
    assert {cell.settings["batch"] for cell in study.cells} == {16, 64, 1024}

    def slow(cell):
        late = {"greedy": "1024" not in cell.name.split(", ")[1], "2 chunks": "batches" in cell.name}
        return 1.1 if late.get(cell.name.rsplit(", ", 1)[1], False) else 1

    def costs(cell):
        local = cell.reference is not None
        compute = {"total": 9 if local else 8, "serial": 1 if local else 8}
        paper = {f"paper {name}": 2 * value if local else value for name, value in compute.items()}
        worker = {"memory": 3e6 if local else 9e6, "sent": 1e3 if local else 2e3}
        second = 2.5e6 if cell.settings["network"] == "resnet" else 5e6
        pipes = {"pipelined": {"a": {"memory": 4e6}, "b": {"memory": second}}}
        return {"compute": {**compute, **paper}, "worker": worker, **({} if local else pipes)}

    train = made_up(slow, lambda cell: 1, costs)
    page = imported("harness.page").page(study, finished(imported, study, train))
    assert "Not finished" not in page
    assert "| MLP 1024 | greedy | 0.138 in every run | 1.24 in every run | the cheapest |" in page
    assert "| MLP 4096 | greedy | 0.275 in every run | 2.48" in page  # by the paper's accounting
    assert "| 50 % | 2.55 | overlapping | 0.125 in every run | 1.12 in every run | less |" in page
    assert "| MLP 256 | greedy | 3.00 | 4.00 | **reached** | 1 | 2 | **reached** |" in page
    assert "| ResNet-20 | greedy | 3.00 | 2.50 | **missed** | 1 | 2 | **reached** |" in page
    assert "| greedy | 0.138 in every run | 0.125 in every run | **reached** |" in page
    assert "| 2 chunks | 0.125 in every run | 0.138 in every run | **missed** |" in page
    assert "| 8 | 1 | 0.138" in page
    assert "| greedy | 12.9 [" in page.split("## Random labels")[1]  # 0.1 (4 - 3 / 1.1) 1.01, in %


def test_a_run_of_heads(imported, monkeypatch, tmp_path):
    """Three steps of a small decoder; seeds decide the weights and the batches, and the first one counts costs."""
    heads, decoder = imported("heads"), imported("harness.decoder")
    words = "".join(chr(97 + (n * n) % 23) for n in range(900))
    (tmp_path / "text").mkdir()
    for split in ("train", "validation", "test"):
        (tmp_path / "text" / f"{split}.txt").write_text(words)
    for name, value in (("BLOCKS", 2), ("WIDTH", 8), ("CONTEXT", 8)):
        monkeypatch.setattr(decoder, name, value)
    cell = dataclasses.replace(heads.STUDY.cell("2 chunks, solo"), steps=3)
    runs = [heads.train(cell, 0.01, seed, 3, str(tmp_path / "text")) for seed in (0, 0, 1)]
    assert runs[0]["curve"] == runs[1]["curve"] != runs[2]["curve"]
    assert ["compute" in run for run in runs] == [True, True, False]
    assert runs[0]["compute"]["heads"] > 0


@pytest.mark.parametrize("name", ["random labels, 2 chunks", pytest.param("ResNet-20, greedy", marks=pytest.mark.slow)])
def test_a_run_of_local_updates(imported, monkeypatch, name):
    """Three steps on digits in place of MNIST; random labels are tested on the images that are trained on."""
    local, digits = imported("local_updates"), load("digits")
    monkeypatch.setattr(local, "images", lambda path: digits)
    monkeypatch.setattr(local, "MEMORISED", 32)
    cell = local.STUDY.cell(name)
    cell = dataclasses.replace(cell, steps=3, settings={**cell.settings, "batch": 4})
    run = local.train(cell, 0.01, 0, 3, None)
    assert [point[0] for point in run["curve"]] == [0, 3]
    assert run["worker"]["memory"] > run["worker"]["sent"] > 0
    task = local.task(cell, 0, None)
    tested = local.held_out(task.data, task.held)["test"][0][1]
    if "random labels" in name:
        assert torch.equal(tested, task.data.train.y)
        assert not torch.equal(task.data.train.y, digits.train.y[:32])
    else:
        assert len(task.stages) == 9
        assert torch.equal(tested, digits.test.y[:1000])


@pytest.mark.parametrize("method", ["backprop", "greedy", "chunked(chunks=2)"])
def test_training_losses_count_at_the_steps_of_their_minibatches(imported, method):
    sections = imported("sections.local_updates")
    trainer = trainer_of(method, [2] * 10)
    assert trainer.lag == (0 if method == "backprop" else sections.LAG)
    records = imported("harness.halving").Finals({0: {"curve": [[0, None, 2.0, 0.5], [25, 1.5, 1.0, 0.25]]}}, wanted=1)
    moved = sections.at_own_steps(f"ResNet-20, {method}", records)[0]["curve"]
    late = 25 - trainer.lag
    losses = [[point[0], point[sections.TRAINING]] for point in moved if point[sections.TRAINING] is not None]
    assert losses == [[late, 1.5]]
    assert [point[0] for point in moved if point[3] is not None] == [0, 25]


def test_the_page_of_chunks_tells_heads_from_local_losses(imported, monkeypatch, tmp_path):
    """Two chunks need half of backprop's steps, heads behind stage 3 with weight 1 need 0.7, all others as many."""
    chunks, tables = imported("chunks"), imported("sections.chunk_tables")
    study = chunks.STUDY
    assert (study.base_runs, len(study.cells)) == (162, 18)
    factors = {"2 chunks": 0.5, "heads at 3, weight 1": 0.7}

    def slow(cell):
        return factors.get(cell.name.partition(", ")[2], 1)

    def train(cell, rate, seed, steps, data):
        made = made_up(slow, lambda cell: 1, lambda cell: {})(cell, rate, seed, steps, data)
        return {**made, "validation": made["validation"] + slow(cell)}

    monkeypatch.setattr(tables, "CLUSTER", tmp_path / "cluster.toml")
    runs = finished(imported, study, train)
    assert "Not measured yet" in tables.more(study.cells, runs)
    (tmp_path / "cluster.toml").touch()
    seconds = {"1f1b": 2.0, "gpipe": 3.0, "zb-h1": 2.5, "greedy": 0.5}
    monkeypatch.setattr(
        tables, "seconds_a_step", lambda _, method, *__, **___: seconds.get(method.partition("(")[0], 1.0)
    )
    page = tables.more(study.cells, runs)
    assert (
        "| decoder | 500 | heads at 3, weight 1 (stands for heads) | 0.7 in every run | 60 % | more than half |" in page
    )
    assert "| ResNet-20 | 2000 | 2 chunks | 0.5 in every run | 100 % | more than half |" in page
    assert "| decoder | 2000 | greedy | 1 in every run | 0 % | less than half |" in page
    # 1f1b with heads takes 2 s and 0.7 of the steps, chunks 1 s and 0.5; greedy, 0.5 s, never arrives
    assert "soonest synchronous method | 0.357 in every run | reached |" in page
    row = next(line for line in page.splitlines() if line.startswith("| decoder | 8 | 100Mbit | greedy |"))
    assert row.endswith("|  |  | > 0.28 | undecided |")  # 0.5 s for 2,000 steps over 2 s for 1,800


def test_the_page_of_panels_compares_batches(imported, monkeypatch):
    """Greedy gains with large batches alone; its serial compute is a quarter of backprop's."""
    panels = imported("panels")
    assert (panels.STUDY.base_runs, len(panels.STUDY.cells)) == (177, 27)
    monkeypatch.setattr(panels, "serial_compute", lambda width, method: 1.0 if method == "greedy" else 4.0)
    gains = made_up(lambda cell: 0.5 if "1024, greedy" in cell.name else 1, lambda cell: 1, lambda cell: {})
    page = panels.more(finished(imported, panels.STUDY, gains))
    row = next(line for line in page.splitlines() if line.startswith("| 256 | 1024 | greedy |"))
    assert row.endswith("| less |")
    assert "| 256 | 1024 | 2 chunks | " in page


def test_the_decoder_with_the_delays_of_32_stages(imported):
    """Blocks of stages 0, 4, ..., 28 have gradients 31, 27, ..., 3 updates old, the readout new ones."""
    rotation = imported("rotation")
    deep, whole = (torch.nn.Sequential(*rotation.network(90, stages, 0)) for stages in (rotation.DEEP, 1))
    owners = [n for n, stage in enumerate(deep) if [*stage.parameters()]]
    assert owners == [0, 4, 8, 12, 16, 20, 24, 28, 31]
    chosen = stretto.method("pipedream")
    delays = chosen.delays(chosen.plan(rotation.DEEP)[0]).mean
    assert [delays[n] for n in owners] == [31, 27, 23, 19, 15, 11, 7, 3, 0]
    tokens = torch.randint(90, (2, rotation.CONTEXT))
    assert torch.equal(deep(tokens), whole(tokens))
