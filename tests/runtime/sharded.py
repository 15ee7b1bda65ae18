"""Scripts that train replicas of which each keeps a share of the weights, and know nothing of processes."""

import gc
import os
import signal
import time

import torch
from torch import nn

import stretto
from runtime import replicated
from stretto.optim.layerwise import LAMB, LARS

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "lars": lambda params: LARS(params, lr=1.0, vectors=True),
    "lamb": lambda params: LAMB(params, lr=0.01, weight_decay=0.1),
}
MESSAGES = ("all_gather", "reduce_scatter")


def everything(runs, folder):
    """What the other scripts give, in the same processes."""
    return {
        "train": replicated.train_all(runs),
        "optimizers": {name: adapt(name, stretto.Mesh(data=2), stretto.FullyShard()) for name in OPTIMIZERS},
        "held": {name: held(sync) for name, sync in (("all", "all-reduce"), ("share", "fully-shard"))},
        "messages": {each: messages(*each) for each in (("1f1b", False), ("1f1b", True), ("zb-h1", False))},
        "refused": refused(),
        "skipped": skipping(stretto.Mesh(data=2), stretto.FullyShard(min_block=0)),
        "saved": [
            replicated.save_in_the_middle("1f1b", stretto.Mesh(data=2), f"{folder}/sharded", sync="fully-shard"),
            replicated.resume("1f1b", stretto.Mesh(data=2), f"{folder}/emulated", sync="fully-shard"),
        ],
    }


def adapt(name, mesh, sync):
    """The weights that an optimizer comes to, which may look at a layer's norm; a checkpoint in between."""
    trainer = stretto.Trainer(
        replicated.stages(2), nn.functional.cross_entropy, OPTIMIZERS[name], mesh=mesh, sync=sync, clip=1.0
    )  # fmt: skip
    for x, y in replicated.batches(1):
        trainer.step(x, y)
    state = trainer._stages[0].state_dict()
    trainer._stages[0].load_state_dict(state, "its own")
    for x, y in replicated.batches(1):
        trainer.step(x, y)
    return replicated.weights_of(trainer)


def skipping(mesh, sync):
    """The weights of a stage of which every other forward leaves out a layer: its weights are gathered and not read."""

    class Skipping(nn.Sequential):
        def forward(self, x):
            calls.append(x.shape)
            for index, layer in enumerate(self):
                if index != 1 or len(calls) % 2:
                    x = layer(x)
            return x

    calls = []
    stage = Skipping(*replicated.stages(4)).double()
    trainer = stretto.Trainer([stage], nn.functional.cross_entropy, OPTIMIZERS["adamw"], mesh=mesh, sync=sync)
    for x, y in replicated.batches(4):
        trainer.step(x, y)
    return replicated.weights_of(trainer)


def held(sync):
    """The bytes of all tensors of this process, at an update and between two."""

    class Watched(torch.optim.Adam):
        def step(self, closure=None):
            result = super().step(closure)
            time.sleep(0.1)  # gloo's threads let go of what they have sent a moment after it has arrived
            at_update.append(tensor_bytes())
            return result

    torch.manual_seed(0)
    width, at_update = 256, []
    before = tensor_bytes()
    stage = nn.Sequential(*[nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(4)])
    trainer = stretto.Trainer([stage], nn.functional.mse_loss, Watched, mesh=stretto.Mesh(data=2), sync=sync)
    x = torch.randn(4, width)
    for _ in range(3):
        trainer.step(x, x)
    trainer.evaluate([(x, x)])
    weights = 4 * width**2 * 4
    return (at_update[-1] - before) / weights, (tensor_bytes() - before) / weights


def tensor_bytes():
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and type(each).__name__ != "DTensor"]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def killed():
    """The last replica is gone in its sixth forward."""

    class Fragile(nn.Linear):
        def forward(self, x):
            passes.append(x)
            if len(passes) == 6 and int(os.environ["RANK"]) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(x)

    passes = []
    trainer = stretto.Trainer(
        [Fragile(8, 4)], nn.functional.mse_loss, lambda params: torch.optim.SGD(params, lr=0.1),
        mesh=stretto.Mesh(data=2), sync="fully-shard",
    )  # fmt: skip
    for _ in range(12):
        trainer.step(torch.randn(6, 8), torch.randn(6, 4))


def refused():
    """What is said of a parameter that cannot be cut, and of an observer."""
    from stretto.runtime.fsdp import shard

    trainer = replicated.build("backprop", stretto.Mesh(data=2), sync="fully-shard")
    stage = nn.Linear(2, 2)
    stage.gain = nn.Parameter(torch.tensor(1.0))
    said = []
    for mistake in (
        lambda: shard(stage, trainer.backend._replica_group, trainer.sync, torch.device("cpu")),
        trainer.observe,
    ):
        try:
            mistake()
        except stretto.UsageError as error:
            said.append(str(error))
    return said


def messages(method, reshard):
    """How many gatherings and sums a stage's replicas take for an update of four micro-batches."""
    from stretto.runtime import fsdp

    former = [getattr(fsdp, name) for name in MESSAGES]
    counted = dict.fromkeys(MESSAGES, 0)

    def counting(name, function):
        def call(*args, **kwargs):
            counted[name] += 1
            return function(*args, **kwargs)

        return call

    trainer = replicated.build(
        f"{method}(microbatches=4)", stretto.Mesh(data=2), number=2, sync=stretto.FullyShard(reshard=reshard)
    )
    try:
        for name, function in zip(MESSAGES, former, strict=True):
            setattr(fsdp, name, counting(name, function))
        for x, y in replicated.batches(3):
            trainer.step(x, y)
    finally:
        for name, function in zip(MESSAGES, former, strict=True):
            setattr(fsdp, name, function)
    return [counted[name] / 3 / len(trainer.stages) for name in MESSAGES]
