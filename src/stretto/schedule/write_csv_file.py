"""Writes a schedule as the file that torch.distributed.pipelining reads."""

from stretto.errors import UsageError
from stretto.options.checks import of_kind
from stretto.schedule.schedule import Schedule


def to_csv(schedule: Schedule) -> str:
    """One minibatch as torch.distributed.pipelining's `_PipelineScheduleRuntime._load_csv` reads it ("compute_only").

    One row a worker, actions as stage, kind and micro-batch: forward F, whole backward B, input gradient I, weight
    gradient W. There the caller steps the optimizer after the last action, so updates are left out and only a
    synchronous schedule can be written: for others UsageError names the first action that does not fit. Heads and
    how far their gradients travel are not in the file either: torch runs it as backprop.
    """
    of_kind("schedule", schedule, Schedule, "a stretto.schedule.Schedule")
    for worker, actions in enumerate(schedule.body):
        for position, action in enumerate(actions):
            if action.kind == "C":
                raise UsageError(
                    f"{action} of worker {worker} is a recompute, which torch.distributed.pipelining's file does not "
                    "know: export the method without recompute=, and wrap the stages in torch.utils.checkpoint there"
                )
            if action.microbatch < 0:
                raise UsageError(
                    f"{action} of worker {worker} belongs to an earlier minibatch: torch.distributed.pipelining runs "
                    "one minibatch at a time; export a synchronous schedule (gpipe, 1f1b, interleaved, zb-h1, ...)"
                )
            if action.kind == "U" and any(later.stage == action.stage for later in actions[position + 1 :]):
                raise UsageError(
                    f"{action} of worker {worker} comes before the minibatch's end: torch.distributed.pipelining "
                    f"leaves updates to its caller; export a schedule with one update a stage, after its last backward"
                )
    rows = (",".join(str(action) for action in actions if action.kind not in "RU") for actions in schedule.body)
    return "".join(f"{row}\n" for row in rows)
