"""transformers and accelerate see one process: batches, counts and logs are those of one, and nothing is wrapped.

Both ask accelerate's PartialState how many processes there are. With two they would wrap the model for data
parallelism, deal batches out among the processes and add up their counts. Here all processes train one model on the
same batches, so each of them sees one process; only its index stays the true rank, by which rank 0 alone writes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.state import AcceleratorState, DistributedType, PartialState
from transformers import TrainingArguments


def show_one_process(args: TrainingArguments, rank: int, local_rank: int) -> None:
    """Make this process look like a single one of index `rank`; TrainingArguments made later undo it."""
    _ = args.device  # sets up the state, the first time
    states = [PartialState()]
    if AcceleratorState._shared_state:
        states.append(AcceleratorState())
    for state in states:
        state.distributed_type, state.num_processes = DistributedType.NO, 1
        state.process_index, state.local_process_index = rank, local_rank
    args._n_gpu = min(args.n_gpu, 1)  # several would be trained by nn.DataParallel


@contextmanager
def as_first(args: TrainingArguments) -> Iterator[None]:
    """In this block the process has index 0: workers of its DataLoaders get the seeds that those of rank 0 get."""
    state = PartialState()
    index = state.process_index
    state.process_index = 0
    try:
        yield
    finally:
        state.process_index = index
