"""Wrong calls of what trains and of what it is given: `fit`, `compare`, `train`, optimizers, trackers, Lightning."""

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stretto
from attack import calls
from attack.calls import Call, Draws, batch, cross_entropy, raising, sgd, stages, stepped, trainer
from attack.protocol import Outcome
from stretto import checkpoint, cost, heads, losses, methods, optim, replicas, schedule, trackers
from stretto.methods import cure
from stretto.methods.table import METHODS
from stretto.schedule.library.one_f_one_b import one_f_one_b

SHARE = 250


WRONG = {
    **calls.WRONG,
    "a function that raises": lambda: raising,
    "[a function that raises]": lambda: [raising],
    "{'a': a function that raises}": lambda: {"a": raising},
    "[lambda: None]": lambda: [lambda: None],
    "{'a': lambda: None}": lambda: {"a": lambda: None},
    "{'a': lambda o, y: 'text'}": lambda: {"a": lambda o, y: "text"},
    "lambda *a: 'text'": lambda: lambda *a, **k: "text",
    "lambda *a: 5": lambda: lambda *a, **k: 5,
    "lambda *a: a[0]": lambda: lambda *a, **k: a[0],
    "'csv'": lambda: "csv",
    "'csv(every=0)'": lambda: "csv(every=0)",
    "'backprop('": lambda: "backprop(",
    "'adamw'": lambda: "adamw",
    "'missing.py:f'": lambda: "missing.py:f",
    "'/dev/null/x'": lambda: "/dev/null/x",
    "((x, y), (x, y))": lambda: (batch(), batch()),
    "(x, y)": batch,
    "(x, y[:3])": lambda: (batch()[0], batch()[1][:3]),
    "({'a': x}, y)": lambda: ({"a": batch()[0]}, batch()[1]),
    "[(x, y), 5]": lambda: [batch(), 5],
    "a Dataset of 5": lambda: [5, 5, 5],
    "an iterator of (x, y)": lambda: iter([batch()]),
    "a DataLoader": lambda: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch()), batch_size=2),
    "an empty DataLoader": lambda: torch.utils.data.DataLoader([], batch_size=2),
    "an EarlyStop": lambda: stretto.EarlyStop(2),
    "a CSV": lambda: trackers.CSV(folder="there"),
    "stages": stages,
    "an optimizer's list": lambda: [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)],
}
DRAWS = Draws(WRONG)
call = DRAWS.call


# -- fit --------------------------------------------------------------------------------------------------------------


@call
def fit(draw: random.Random) -> Call:
    made = trainer(draw)
    given = {"train": batch(), "validation": batch(), "epochs": 1, "quiet": True}
    if draw.random() < 0.4:
        given = {"train": [batch(), batch()], "validation": batch(), "steps": 3, "quiet": True}
    more = {
        "metrics": {"mine": lambda output, y: 0.5},
        "callbacks": [lambda trainer, entry: None],
        "log": draw.choice([lambda row: None, "csv"]),
        "checkpoint": "saved",
        "early_stop": draw.choice([2, stretto.EarlyStop(1, "train_loss")]),
    }
    more |= {"evaluate_every": 2} if "steps" in given else {"batch_size": 4}
    name = f"Trainer({made.method}, {made.mesh}).fit"
    return Call(name, made.fit, given, more, draw.choice([0, 1]), lets_out=("callbacks", "log"))


@call
def fitted_again(draw: random.Random) -> Call:
    before, given = draw.getstate(), {"train": (torch.ones(8, 3), torch.arange(8) % 3), "batch_size": 8}
    trainer(draw).fit(**given, epochs=1, quiet=True, checkpoint="saved")
    draw.setstate(before)
    again = trainer(draw)
    given |= {"epochs": 2, "quiet": True, "checkpoint": "saved"}
    return Call(f"Trainer({again.method}).fit again", again.fit, given, {}, 1)


@call
def others(draw: random.Random) -> Call:
    made = trainer(draw)
    named = {"folder": "weights"}, {"names": lambda key: key}
    return draw.choice(
        [
            Call("write_weights", made.write_weights, *named, 1),
            Call("write_weights", made.write_weights, *named, 1),
            Call("predict", made.predict, {"batches": [batch()[0]]}, {}, 1),
            Call("evaluate", made.evaluate, {"batches": [batch()]}, {"metrics": {"a": lambda output, y: 0.5}}, 1),
            Call("load_state_dict", made.load_state_dict, {"state": made.state_dict()}, {}, 1),
            Call("EarlyStop", stretto.EarlyStop, {"patience": 2},
                 {"metric": "train_loss", "least_change": 0.1, "higher": False}, 1),
        ]
    )  # fmt: skip


# -- whole runs -------------------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


def whole_run(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    data = tuple((torch.randn(8, 3), torch.arange(8) % 3) for _ in range(2))
    given = {"model": draw.choice([network, network()]), "data": data, "steps": 2, "quiet": True}
    more = {
        "loss": cross_entropy, "optimizer": draw.choice(["auto", "adamw"]), "lr": 0.1, "batch_size": 4, "stages": 2,
        "metrics": {"mine": lambda output, y: 0.5}, "workers": None, "mesh": stretto.Mesh(), "out": "run",
        "threads": 1, "device": "cpu", "log": "csv", "weight_decay": 0.1, "clip": 1.0, "schedule": "cosine",
        "precision": "bf16", "sync": "all-reduce", "momentum": 0.5, "examples": None, "evaluations": 2,
        "lr_warmup": 0.5, "lr_scaling": "momentum", "reference_batch": None, "accounting": "paper",
        "measure": ["noise"],
        "data_parallel": 1, "tensor": 1, "space": (1, 1), "recompute": "full", "model_options": {}, "data_options": {},
    }  # fmt: skip
    return given, {key: more[key] for key in draw.sample(list(more), 8)}


@call
def train(draw: random.Random) -> Call:
    given, more = whole_run(draw)
    return Call("train", stretto.train, given, {**more, "method": "backprop", "seed": 0, "resume": False}, 2)


@call
def compare(draw: random.Random) -> Call:
    given, more = whole_run(draw)
    given = {**given, "methods": ["backprop"], "seeds": 1, "jobs": 1}
    return Call("compare", stretto.compare, given, more, 2)


# -- registers and parts ----------------------------------------------------------------------------------------------


def mine(**options: Any) -> Any:
    return methods.method("backprop")


def narrow(site: heads.Site) -> nn.Module:
    return nn.Linear(3, 3)


def chosen_method(build: Any, **given: Any) -> Any:
    known = dict(METHODS)
    try:
        methods.register(**given)(build)
        return stretto.Trainer(stages(), cross_entropy, sgd, given["name"], device="cpu").step(*batch())
    finally:
        METHODS.clear()
        METHODS.update(known)


def chosen_head(build: Any, **given: Any) -> Any:
    known = dict(heads.HEADS)
    try:
        heads.register(**given)(build)
        method = f"greedy(head={given['name']})"
        return stretto.Trainer(stages(), cross_entropy, sgd, method, device="cpu", example=batch()[0]).step(*batch())
    finally:
        heads.HEADS.clear()
        heads.HEADS.update(known)


@call
def registers(draw: random.Random) -> Call:
    return draw.choice(
        [
            Call("methods.register", chosen_method, {"name": "mine", "build": mine}),
            Call("heads.register", chosen_head, {"name": "mine", "build": narrow},
                 {"takes": "[N, d]", "dims": lambda stage, model: True}),
        ]
    )  # fmt: skip


@call
def parts(draw: random.Random) -> Call:
    output, target = torch.randn(4, 3), batch()[1]
    site = {"stage": 0, "features": (torch.ones(4, 3),), "output": torch.ones(4, 3)}
    loss = losses.understand(nn.CrossEntropyLoss())
    own = ("loss", "weight")
    its = ("output", "target")  # a loss refuses as torch does
    return draw.choice(
        [
            Call("advised", stretto.advised,
                 {"chosen": "async", "optimizer": "adamw", "stages": 4}, {"whole": True}, 3),
            Call("with_microbatches", methods.with_microbatches, {"chosen": stretto.method("gpipe"), "count": 2}),
            Call("stable_rate", stretto.stable_rate, {"delay": 2}, {"momentum": 0.5, "feedback": 0.1}, 1),
            Call("mean", lambda loss: stretto.mean(loss)(output, target), {"loss": cross_entropy}, {}, 0, its, own),
            Call("losses.call", losses.call,
                 {"loss": loss, "output": output, "target": target}, {"counted": True}, 3, its, own),
            Call("losses.understand", losses.understand, {"loss": cross_entropy}, {}, 1),
            Call("losses.mean_and_weight", losses.mean_and_weight,
                 {"loss": loss, "output": output, "target": target, "examples": 4}, {}, 4, its, own),
            Call("CrossEntropy", lambda **k: losses.CrossEntropy(**k)(output, target), {},
                 {"weight": torch.ones(3), "ignore_index": -100, "label_smoothing": 0.1, "tokens": False,
                  "shift": False}, 0, its, own),
            Call("CrossEntropy.value", losses.CrossEntropy().value,
                 {"output": output, "target": target, "counted": True}, {}, 2, (*its, "counted"), own),
            Call("token_cross_entropy", losses.token_cross_entropy,
                 {"output": torch.randn(2, 3, 4), "target": torch.ones(2, 3, dtype=torch.int64)}, {}, 2, its, own),
            Call("next_token_cross_entropy", losses.next_token_cross_entropy,
                 {"output": torch.randn(2, 3, 4), "target": torch.ones(2, 3, dtype=torch.int64)}, {}, 2, its, own),
            Call("Site", heads.Site, site),
            Call("replicas.find", replicas.find, {"sync": "all-reduce"}, {}, 1),
            Call("Order", replicas.Order, {"replicas": {0: (0,)}, "staleness": {0: (0,)}}),
        ]
    )  # fmt: skip


@call
def schedules_on_disk(draw: random.Random) -> Call:
    laid, _ = stretto.method("1f1b").plan(3)
    Path("schedule.csv").write_text(schedule.to_csv(laid))
    return draw.choice(
        [
            Call("schedule.to_csv", schedule.to_csv, {"schedule": laid}, {}, 1),
            Call("schedule.read_csv", schedule.read_csv, {"path": "schedule.csv"}, {}, 1),
        ]
    )


# -- optimizers -------------------------------------------------------------------------------------------------------


@call
def optimizers(draw: random.Random) -> Call:
    weights = [nn.Parameter(torch.ones(2, 2))]
    adam = torch.optim.Adam(weights, lr=0.1)
    ours = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    betas = {"betas": (0.9, 0.99), "weight_decay": 0.1}
    labelled = nn.Sequential(nn.Linear(2, 2))
    params = {"params": weights, "lr": 0.1}
    for parameter in weights:
        parameter.grad = torch.ones_like(parameter)

    def muon(**given: Any) -> Any:
        return stepped(optim.muon)(**given)

    def combined(optimizers: Any) -> Any:
        return optim.CombinedOptimizer(optimizers).step()

    return draw.choice(
        [
            Call("LARS", stepped(optim.LARS), params,
                 {"momentum": 0.9, "weight_decay": 0.1, "trust": 0.1, "eps": 1e-6, "vectors": True}),
            Call("LAMB", stepped(optim.LAMB), params, {**betas, "eps": 1e-6, "vectors": True}),
            Call("SOAP", stepped(optim.SOAP), params, {**betas, "eps": 1e-6, "every": 2, "largest": 9}),
            Call("Lion", stepped(optim.Lion), params, betas),
            Call("muon", muon, params,
                 {"labels": optim.labels_of(nn.Linear(2, 2, bias=False)), "exclude": [], "momentum": 0.9,
                  "nesterov": True, "weight_decay": 0.1}),
            Call("CombinedOptimizer", combined, {"optimizers": [torch.optim.AdamW(weights)]}),
            Call("Label", optim.Label, {"name": "a", "module": "Linear"}, {"role": "hidden", "dims": 2}),
            Call("labels_of", optim.labels_of, {"model": labelled}, {}, 1),
            Call("Masters", optim.Masters, {}, {"copies": {}}),
            Call("NamedOptimizer", optim.NamedOptimizer, {"function": lambda named: ours}),
            Call("NamedOptimizer.named", lambda **k: optim.NamedOptimizer(k["f"]).named(k["names"])(weights),
                 {"f": lambda named: ours, "names": ["a"]}),
            Call("Rescheduled", lambda **k: optim.Rescheduled(**k).step(0),
                 {"optimizer": ours, "delay": 2.0, "until": 5, "step": ours.step}, {}, 0, (), ("step",)),
            Call("RotatedAdam", lambda **k: optim.RotatedAdam(**k).step(),
                 {"optimizer": adam, "interval": 5}, {"two_sided": True, "delay": 1.0}),
            Call("SpikeCompensation", lambda **k: optim.SpikeCompensation(**k).step(),
                 {"optimizer": ours, "delay": 1.0}),
            Call("UpdateFeedback", lambda **k: optim.UpdateFeedback(**k).step(),
                 {"optimizer": ours, "c": 0.1, "step": ours.step}, {}, 0, (), ("step",)),
        ]
    )  # fmt: skip


# -- trackers, checkpoints --------------------------------------------------------------------------------------------


def tracked(kind: Any) -> Any:
    def run(**given: Any) -> Any:
        return str(kind(**given))

    return run


@call
def trackings(draw: random.Random) -> Call:
    described = {"name": "run"}

    def opened(tracker: Any, **given: Any) -> Any:
        made = tracker.open(trackers.RunDescription(**given))
        made.write([(1, {"loss": 0.5})])
        made.close(finished=True)

    return draw.choice(
        [
            Call("CSV", tracked(trackers.CSV), {}, {"every": 5, "folder": "logs"}),
            Call("TensorBoard", tracked(trackers.TensorBoard), {}, {"every": 5, "folder": "logs"}),
            Call("WandB", tracked(trackers.WandB), {},
                 {"every": 5, "project": "mine", "entity": "me", "mode": "offline", "folder": "logs"}),
            Call("MLflow", tracked(trackers.MLflow), {}, {"every": 5, "uri": "sqlite:///a.db", "experiment": "mine"}),
            Call("trackers.find", trackers.find, {"given": ["csv"]}, {"where": "log"}, 1),
            Call("RunDescription", lambda **k: opened(trackers.CSV(), **k), described,
                 {"settings": {"a": 1}, "schedule": "F", "group": "g", "ids": {}, "since": 0}),
        ]
    )  # fmt: skip


@call
def checkpoints(draw: random.Random) -> Call:
    manifest = checkpoint.Manifest(method="backprop", seed=0, precision=None, entered=1)
    state = {"a": torch.ones(2), "b": [1, "c"]}
    checkpoint.write("there", [state], manifest)
    Path("steps").mkdir()
    chosen = draw.choice(
        [
            Call("checkpoint.write", checkpoint.write, {"path": "new", "states": [state], "manifest": manifest}),
            Call("checkpoint.begin", checkpoint.begin, {"path": "new"}),
            Call("checkpoint.discard", checkpoint.discard, {"path": "new"}),
            Call("checkpoint.exists", checkpoint.exists, {"path": "there"}),
            Call("checkpoint.partial_of", checkpoint.partial_of, {"path": "there"}),
            Call("checkpoint.contents", checkpoint.contents, {"index": 0, "state": state}),
            Call("checkpoint.read_manifest", checkpoint.read_manifest, {"path": "there"}),
            Call("checkpoint.read_stage", checkpoint.read_stage, {"path": "there", "index": 0}, {"replica": 0}),
            Call("checkpoint.verify", checkpoint.verify, {"path": "there"}, {"sizes_only": True}),
            Call("checkpoint.newest", checkpoint.newest, {"folder": "steps"}),
            Call("checkpoint.prune", checkpoint.prune, {"folder": "steps"}, {"keep": 2}),
            Call("checkpoint.write_stage", checkpoint.write_stage,
                 {"partial": checkpoint.begin("new"), "index": 0, "state": state}, {"replica": 0}),
            Call("Manifest", checkpoint.Manifest, {"method": "pb", "seed": 0, "precision": None, "entered": 1},
                 {"losses": {}, "stages": (), "parts": 1, "replicas": 1}),
        ]
    )  # fmt: skip
    chosen.documented = (OSError,)
    return chosen


# -- inside other trainers --------------------------------------------------------------------------------------------


def in_lightning(**given: Any) -> None:
    """Two steps of a module in Lightning's Trainer."""
    import lightning.pytorch as pl

    from stretto.lightning import StrettoStrategy

    strategy = StrettoStrategy(**given)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            return cross_entropy(self(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(list(self.parameters()))

    made = pl.Trainer(
        strategy=strategy, devices=1, accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    made.fit(Module(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch()), batch_size=2))


@call
def lightning(draw: random.Random) -> Call:
    given = {"method": draw.choice(["1f1b(microbatches=2)", "pb", "backprop"]), "stages": 2}
    more = {"network": "", "split": {"by": "parameters"}, "start_method": "popen", "mesh": stretto.Mesh(),
            "sync": "all-reduce", "heads": None, "timeout": 60, "seed": 1, "accelerator": None,
            "parallel_devices": None, "cluster_environment": None, "checkpoint_io": None,
            "precision_plugin": None}  # fmt: skip
    return Call("StrettoStrategy", in_lightning, given, more)


def in_transformers(model: Any, train_dataset: Any, **given: Any) -> None:
    """A step of a tiny language model in transformers' Trainer."""
    from transformers import TrainingArguments

    from stretto.transformers import StrettoTrainer

    args = TrainingArguments("out", max_steps=1, per_device_train_batch_size=2, report_to="none", use_cpu=True,
                             save_strategy="no", disable_tqdm=True, logging_strategy="no")  # fmt: skip
    StrettoTrainer(model, given.pop("args", args), train_dataset=train_dataset, **given).train()


@call
def transformers(draw: random.Random) -> Call:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=1, n_embd=4, vocab_size=8, n_positions=8)
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2
    given = {"model": GPT2LMHeadModel(config), "train_dataset": rows, "method": "pb", "stages": 2}
    more = {"mesh": stretto.Mesh(), "sync": "all-reduce", "precision": None, "heads": None, "workers": None,
            "device": "cpu", "seed": 1, "timeout": 60}  # fmt: skip
    return Call("StrettoTrainer", in_transformers, given, more, spared=("model", "train_dataset"))  # transformers' own


# -- data that methods and clusters are made of -----------------------------------------------------------------------


@call
def definitions(draw: random.Random) -> Call:
    method = {"name": "mine", "summary": "ours", "synchronous": True,
              "schedule": lambda stages, workers: one_f_one_b(stages, workers, 2)}  # fmt: skip
    more = {"reach": lambda n: schedule.Reach((None,) * (n - 1) + (n - 1,)),
            "weights": "current", "combine": "sum", "head": "auto", "recompute": False, "workers": lambda n: n,
            "options": {}, "cure": cure.Cure()}  # fmt: skip
    planning = {"cut": "microbatches", "allows": lambda count, workers: True, "workers": (2, None), "split": False,
                "held": lambda at: 1, "delay": lambda at: 0, "messages": "hidden", "order": "line"}  # fmt: skip
    return draw.choice(
        [
            Call(
                "Method", lambda **k: methods.Method(**k).plan(3), method, more, 0, (), ("schedule", "reach", "workers")
            ),
            Call("Planning", methods.Planning, {}, planning),
            Call(
                "Cure", cure.Cure, {}, {"spike": True, "reschedule": 5, "optimizer": "SGD", "feedback": lambda at: 1.0}
            ),
            Call("Prediction", cure.Prediction, {"form": "weight", "horizon": lambda at: at.delay}, {}, 2),
            Call("Correction", cure.Correction, {"span": lambda at: at.delay}, {}, 1),
        ]
    )


@call
def clusters(draw: random.Random) -> Call:
    device = {"memory": 1e9, "memory_bandwidth": 1e9, "peak": {"float32": 1e12}}
    link = {"latency": 1e-5, "bandwidth": 1e9}
    group = {"nodes": 1, "workers": 2, "device": "mine", "within": "wire"}
    whole = {"name": "ours", "groups": (cost.Group(**group),), "devices": {"mine": cost.Device(**device)},
             "links": {"wire": cost.Link(**link)}}  # fmt: skip
    made = cost.Cluster(**whole)
    return draw.choice(
        [
            Call("cost.Device", cost.Device, device, {"watts": 100, "mtbf_hours": 9.0, "price_per_hour": 1}),
            Call("cost.Link", cost.Link, link, {"contention": 2, "send": 1e-6, "residual": 0.1}),
            Call("cost.Group", cost.Group, group, {"speeds": (1.0, 0.5), "between": "wire"}),
            Call("cost.Cluster", cost.Cluster, whole, {"between": "wire", "storage_bandwidth": 1e9}),
            Call("cost.Rate", cost.Rate, {}, {"per_call": 1e-6, "per_flop": 1e-12, "contention": 1.5}),
            Call("Cluster.device", made.device, {"worker": 0}, {}, 1),
            Call("Cluster.link", made.link, {"a": 0, "b": 1}, {}, 2),
        ]
    )


@call
def finished(draw: random.Random) -> Call:
    given, _ = whole_run(draw)
    told_apart = (4 * torch.eye(3)[torch.arange(8) % 3], torch.arange(8) % 3)  # a run that learns nothing has failed
    given |= {"data": (told_apart, told_apart), "steps": 8}
    study = stretto.compare(**given, methods=["backprop"], seeds=1, jobs=1, lr=0.1, batch_size=4, out="study")
    return draw.choice(
        [
            Call("FinishedStudy.frontier", study.frontier, {"metric_name": "train_loss", "cut_off": 9.0}, {}, 2),
            Call("FinishedStudy.best", study.best, {}, {"metric_name": "train_loss"}),
        ]
    )


def attack(seed: int) -> Outcome:
    """One call in a folder of its own, with one or two arguments replaced."""
    return DRAWS.attack(seed)
