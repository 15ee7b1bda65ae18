"""Where a pipeline's time goes between two processes: gloo, copies, Python. See README.md in this folder.

OMP_NUM_THREADS=1 python benchmarks/two_workers/transport.py
"""

import statistics
import time
from collections.abc import Callable
from threading import Thread

import torch
import torch.distributed as dist
from main import batch, cross_entropy, optimizer, start
from torch import Tensor, nn

import stretto

MEGABYTE = 2**20 // 4  # floats: the activations of 256 examples and 1024 units
PAYLOADS = {"8 bytes": 2, "64 kB": 2**14, "1 MB": MEGABYTE, "4 MB": 4 * MEGABYTE}
ROUNDS, MESSAGES, CHUNKS = 30, 8, 60
METHODS = ("backprop", "pb", "pipedream")


def once(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def median(work: Callable[[], object], times: int = 200) -> float:
    return statistics.median(once(work) for _ in range(times))


def ping_pong(floats: int) -> float:
    """Seconds from one process to the other while neither does anything else."""
    rank, tensor = dist.get_rank(), torch.ones(floats)

    def there_and_back() -> None:
        for sender in (0, 1):
            (dist.send if rank == sender else dist.recv)(tensor, 1 - rank)

    dist.barrier()
    return median(there_and_back) / 2


def stream(floats: int) -> float:
    """Seconds a message of eight that are under way at once, one direction."""
    rank, tensors = dist.get_rank(), [torch.ones(floats) for _ in range(MESSAGES)]

    def eight() -> None:
        post = dist.isend if rank == 0 else dist.irecv
        for work in [post(tensor, 1 - rank, tag=tag) for tag, tensor in enumerate(tensors)]:
            work.wait()
        dist.barrier()

    return (median(eight, ROUNDS) - median(dist.barrier)) / MESSAGES


def computing(floats: int) -> tuple[float, float, float]:
    """Both main threads multiply matrices while each sends and receives `floats`, 0: nothing.

    Returns seconds of the computation, CPU seconds of this process's other threads, and seconds from the first isend to
    the moment at which a thread that waits has the message: gloo's works say `is_completed` only after their `wait`.
    """
    rank, a, b = dist.get_rank(), torch.ones(128, 256), torch.ones(256, 256)
    there, here, arrived = torch.ones(max(floats, 1)), torch.ones(max(floats, 1)), []
    dist.barrier()
    begin, busy, main = time.perf_counter(), time.process_time(), time.thread_time()
    works = [dist.irecv(here, 1 - rank), dist.isend(there, 1 - rank)] if floats else []
    waiter = Thread(target=lambda: arrived.append(works[0].wait() and time.perf_counter() - begin))
    if works:
        waiter.start()
    for _ in range(CHUNKS):
        torch.mm(a, b)
    taken = time.perf_counter() - begin
    if works:
        waiter.join()
        works[1].wait()
    others = (time.process_time() - busy) - (time.thread_time() - main)
    return taken, others, arrived[0] if works else 0.0


def beside_computation() -> dict[str, float]:
    quiet, loaded = [], []
    for _ in range(ROUNDS):
        quiet.append(computing(0))
        loaded.append(computing(MEGABYTE))
    slower = statistics.median(a[0] - b[0] for a, b in zip(loaded, quiet, strict=True))
    return {
        "1 MB each way, both computing: until received": statistics.median(each[2] for each in loaded),
        "1 MB each way, both computing: CPU of gloo's threads": statistics.mean(each[1] for each in loaded)
        - statistics.mean(each[1] for each in quiet),
        "1 MB each way, both computing: main thread slower by": slower,
    }


def posting() -> dict[str, float]:
    """What the calls themselves cost: the messages arrive beside them."""
    rank, tensor, post, wait = dist.get_rank(), torch.ones(2), [], []
    for _ in range(200):
        dist.barrier()
        works: list[dist.Work] = []
        post.append(once(lambda works=works: works.append((dist.isend, dist.irecv)[rank](tensor, 1 - rank))))
        dist.barrier()  # the message is there
        wait.append(once(works[0].wait))
    return {"isend or irecv, the call": statistics.median(post), "wait, already complete": statistics.median(wait)}


def copying() -> dict[str, float]:
    source, target = torch.ones(MEGABYTE), torch.ones(MEGABYTE)
    cold = [torch.ones(MEGABYTE) for _ in range(64)]  # 64 MB: more than a cache holds
    at = iter(range(10**9))
    return {
        "copy of 1 MB, cached": median(lambda: target.copy_(source)),
        "copy of 1 MB, from memory": median(lambda: target.copy_(cold[next(at) % 64])),
        "clone of 1 MB (with allocation)": median(source.clone),
    }


def tiny_stages() -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(8)]


def hand_cut(x: Tensor, y: Tensor) -> Callable[[], None]:
    """Backprop cut in eight stages with eight optimizers: what the actions themselves cost."""
    stages = tiny_stages()
    optimizers = [optimizer(list(stage.parameters())) for stage in stages]

    def step() -> None:
        inputs, outputs, h = [], [], x
        for stage in stages:
            inputs.append(h.detach().requires_grad_())
            h = stage(inputs[-1])
            outputs.append(h)
        gradient = None
        for index in range(len(stages) - 1, -1, -1):
            if gradient is None:
                cross_entropy(outputs[index], y).backward()
            else:
                outputs[index].backward(gradient)
            gradient = inputs[index].grad
            optimizers[index].step()
            optimizers[index].zero_grad()

    return step


def python() -> dict[str, float]:
    """Stages so small that only Python counts; three actions a stage: F, B, U."""
    x, y = torch.randn(2, 4), torch.randint(0, 4, (2,))
    steps: dict[str, Callable[[], object]] = {"a hand-cut loop": hand_cut(x, y)}
    for method in METHODS:
        trainer = stretto.Trainer(tiny_stages(), cross_entropy, optimizer, method, device="cpu")
        steps[f"emulated {method}"] = lambda trainer=trainer: trainer.step(x, y)
    for step in steps.values():
        median(step, 20)
    return {f"Python an action, {name}": median(step, 100) / (3 * 8) for name, step in steps.items()}


def table() -> None:
    x, _ = batch()
    rows = {f"{name}, one way": ping_pong(floats) for name, floats in PAYLOADS.items()}
    rows["1 MB, one of eight under way"] = stream(MEGABYTE)
    rows |= beside_computation()
    rows |= posting()
    if dist.get_rank() == 0:
        forward = nn.Linear(1024, 1024)
        with torch.no_grad():
            rows |= copying() | {"for comparison: a forward of 256 x 1024 x 1024": median(lambda: forward(x), 30)}
        for name, each in rows.items():
            print(f"{name:<56} {1e6 * each:10.1f} us")
        print(f"{'1 MB, eight under way':<56} {4e-9 * MEGABYTE / rows['1 MB, one of eight under way']:10.2f} GB/s")


def main() -> None:
    start(table)
    torch.set_num_threads(1)
    for name, each in python().items():
        print(f"{name:<56} {1e6 * each:10.1f} us")


if __name__ == "__main__":
    main()
