"""Schedules for others to run: the file that torch.distributed.pipelining reads."""

from stretto.errors import UsageError
from stretto.schedule.schedule import Schedule


def to_csv(schedule: Schedule) -> str:
    """One minibatch as torch.distributed.pipelining's `_PipelineScheduleRuntime._load_csv` reads it ("compute_only").

    One row a worker, actions as stage, kind and micro-batch: forward F, whole backward B, input gradient I, weight
    gradient W. torch steps its optimizer after the last action, so updates are left out, and only synchronous
    schedules can be written: UsageError names the first action that an asynchronous one begins with an earlier or ends
    with a later minibatch. Where heads stand and how far gradients travel is not in the file: torch runs it as
    backprop.
    """
    last = schedule.per_turn - 1
    for worker, actions in enumerate(schedule.body):
        for position, action in enumerate(actions):
            where = f"{action} of worker {worker}"
            if action.microbatch < 0:
                raise UsageError(f"{where} belongs to an earlier minibatch: torch.distributed.pipelining runs one "
                                 f"minibatch at a time; export a synchronous schedule (gpipe, 1f1b, zb-h1, ...)")  # fmt: skip
            if action.kind == "U" and (
                action.microbatch != last or any(a.stage == action.stage for a in actions[position + 1 :])
            ):
                raise UsageError(f"{where} comes before the minibatch's end: torch.distributed.pipelining updates once "
                                 f"a minibatch; export a schedule whose updates come last")  # fmt: skip
    rows = (",".join(str(action) for action in actions if action.kind != "U") for actions in schedule.body)
    return "".join(f"{row}\n" for row in rows)
