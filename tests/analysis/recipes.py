"""What trains with the recipes of docs/guide/diagnose.md, each a block of that page, in a folder with its files."""

import os
import re
import sys
from pathlib import Path

import torch
from torch import nn

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "diagnose.md"
PARTS = 4


def recipe(title, folder):
    """The names that the block below a heading defines, and the model and the batch of the page's file `own.py`."""
    sys.path.insert(0, str(folder))
    text = PAGE.read_text().split(f"\n### {title}\n")[1].split("\n## ")[0]
    found = {}
    try:
        (block,) = re.findall(r"^```python\n(.*?)^```$", text.split("\n### ")[0], re.DOTALL | re.MULTILINE)
        exec(compile(block, str(PAGE), "exec"), found)
        own = __import__("own")
        return found, own.build(), own.batch()
    finally:
        sys.path.remove(str(folder))
        for name in ("own", "dump"):
            sys.modules.pop(name, None)


def join():
    """This process's rank among those that train."""
    torch.distributed.init_process_group("gloo")
    return int(os.environ["RANK"])


def replicas(folder):
    """Two processes, by data parallelism, then sharded: each saves into its own folder below the current one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank = join()
    for kind in ("ddp", "fsdp"):
        found, model, (x, y) = recipe("A loop of your own, DDP, FSDP2", Path(folder))
        (Path(folder) / kind).mkdir(exist_ok=True)
        os.chdir(Path(folder) / kind)
        if kind == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        found["dump_loop"](optimizer, wrapped, rank)
        nn.functional.cross_entropy(wrapped(x.chunk(2)[rank]), y.chunk(2)[rank]).backward()
        optimizer.step()
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def stages(folder):
    """Two processes of a pipeline that is cut before the module 2: into modules that count anew, and into slices."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = join()
    found, model, (x, y) = recipe("torch.distributed.pipelining", Path(folder))
    for kind in ("anew", "slices"):
        (Path(folder) / kind).mkdir(exist_ok=True)
        os.chdir(Path(folder) / kind)
        part = (model[:2], model[2:])[rank]
        part = nn.Sequential(*part) if kind == "anew" else part
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        if kind == "anew":
            found["dump_stages"](optimizer, [stage], [0, 2], rank)
        else:
            found["dump"](optimizer, stage.submod.named_parameters, "dumped", rank)
        optimizer.zero_grad()
        schedule = Schedule1F1B(stage, n_microbatches=PARTS, loss_fn=nn.functional.cross_entropy)
        schedule.step(*([x] if rank == 0 else []), target=y if rank else None)
        optimizer.step()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def traced(folder):
    """The names of the parameters of stages that torch cuts."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    _, model, (x, _) = recipe("torch.distributed.pipelining", Path(folder))
    pipe = pipeline(model, mb_args=(x[:4],), split_spec={"2": SplitPoint.BEGINNING})
    return [[name for name, _ in pipe.get_stage_module(stage).named_parameters()] for stage in range(2)]
